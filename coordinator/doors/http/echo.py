"""The prompt as a completion that echoes it begins with it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt's text, and where each of its tokens begins in it, in characters."""

    text: str = ""
    offsets: Sequence[int] = ()


NOTHING: Final = Echo()


def echo_of(prompt: Sequence[int], detokenizer: Detokenizer, sent: str | None) -> Echo:
    """Of the text that was sent, or of all tokens where there is none. What a tokenizer puts around a text, such as a
    token that begins every prompt, has no characters in it."""
    offsets, pieces, num_chars = list[int](), list[str](), 0
    for token_id in prompt:
        offsets.append(num_chars + detokenizer.num_chars_before(token_id))
        pieces.append(detokenizer.add(token_id))
        num_chars += len(pieces[-1])
    told = "".join(pieces) + detokenizer.flush()
    if sent is None:
        return Echo(told, offsets)
    num_before = max(0, told.find(sent))
    return Echo(sent, [min(max(0, offset - num_before), len(sent)) for offset in offsets])
