"""The tokens that a Lark grammar names: by their text, such as <|tool|>, or by id: <[7]>, <[1,5-9]>, all but <[^7]>.
Pure."""

import re
from collections.abc import Collection
from typing import Final

_NAME: Final = re.compile(r"<[^<>\s]+>")
_RANGE: Final = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_IDS: Final = re.compile(r"<\[(\^?)([\d,*-]+)\]>")


def names_any(grammar: str, tokens: Collection[tuple[int, str]]) -> bool:
    """Whether it may name one of these tokens, of which each has an id and a text. What stands in strings and comments
    counts too."""
    return any(_is_named(name, *token) for name in _NAME.findall(grammar) for token in tokens)


def _is_named(name: str, token_id: int, text: str) -> bool:
    ids = _IDS.fullmatch(name)
    if ids is None:
        return name == text
    is_listed = any(_holds(part, token_id) for part in ids[2].split(","))
    return is_listed != bool(ids[1])


def _holds(part: str, token_id: int) -> bool:
    ends = _RANGE.fullmatch(part)
    return part == "*" or (ends is not None and int(ends[1]) <= token_id <= int(ends[2] or ends[1]))
