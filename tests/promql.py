"""Which metrics and labels a PromQL expression names: enough of the language for dashboards and alerts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

FUNCTIONS: Final = frozenset(
    ["absent", "avg", "count", "histogram_quantile", "increase", "max", "max_over_time", "min", "rate", "sum", "vector"]
)
GROUPING: Final = frozenset(["by", "without", "on", "ignoring", "group_left", "group_right"])
WORDS: Final = frozenset(["and", "or", "unless", "bool"])
OF_SCRAPES: Final = frozenset(["job", "instance", "__name__"])  # labels that Prometheus adds
_TOKEN: Final = re.compile(
    r"""\s*(?: (?P<text>"(?:[^"\\]|\\.)*") | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*) | (?P<range>\[[^\]]*\])
    | (?P<number>[0-9.]+(?:[eE][+-]?[0-9]+)?[smhd]?) | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^=<>(),{}]) )""",
    re.VERBOSE,
)


@dataclass
class Selector:
    """A metric, and what its labels are to be: (label, operator, value)."""

    metric: str
    matchers: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass
class Expression:
    """What an expression names."""

    selectors: list[Selector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)  # that results are grouped or joined by


def parse(text: str) -> Expression:
    """Raises ValueError for what is not an expression, or has more of the language than is known here."""
    tokens, found = list(_tokens(text)), Expression()
    depth, position = 0, 0
    while position < len(tokens):
        kind, word = tokens[position]
        position += 1
        if word in GROUPING:
            names, position = _names(tokens, position)
            found.labels |= names
        elif kind == "name" and word not in FUNCTIONS | WORDS:
            selector = Selector(word)
            if position < len(tokens) and tokens[position][1] == "{":
                position = _matchers(tokens, position + 1, selector)
            found.selectors.append(selector)
        elif word in FUNCTIONS and tokens[position][1] != "(" and tokens[position][1] not in GROUPING:
            raise ValueError(f"{word} is called with nothing in {text!r}")
        depth += (word == "(") - (word == ")")
        if depth < 0:
            raise ValueError(f"a bracket too many in {text!r}")
    if depth:
        raise ValueError(f"a bracket is open in {text!r}")
    return found


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position, text = 0, text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"{text[position:]!r} cannot be read")
        position = match.end()
        assert match.lastgroup is not None
        yield match.lastgroup, match[match.lastgroup]


def _names(tokens: list[tuple[str, str]], position: int) -> tuple[set[str], int]:
    if tokens[position][1] != "(":
        raise ValueError("labels stand in brackets")
    end = tokens.index(("sign", ")"), position)
    return {word for kind, word in tokens[position:end] if kind == "name"}, end + 1


def _matchers(tokens: list[tuple[str, str]], position: int, selector: Selector) -> int:
    while tokens[position][1] != "}":
        (_, label), (_, operator), (kind, value) = tokens[position : position + 3]
        if kind != "text":
            raise ValueError(f"{label} is to be a text")
        selector.matchers.append((label, operator, value[1:-1]))
        position += 3
        if tokens[position][1] == ",":
            position += 1
    return position + 1
