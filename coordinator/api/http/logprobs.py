"""Format logprobs for OpenAI's endpoints."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.api.http.messages import CONTENT, REASONING, Delta, Deltas
from coordinator.control.instructions import Chunk
from coordinator.text.detokenizer import Detokenizer
from protos.inference_pb2 import TokenLogprobs, TopLogprob

LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity

TokenBytes = Callable[[int], bytes]
"""Return the bytes of a token."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names of tokens in logprobs: their text, or `token_id:N` if requested."""

    token_bytes: TokenBytes
    as_ids: bool = False

    def text(self, token_id: int) -> str:
        """Return the token's name; invalid UTF-8 becomes U+FFFD."""
        return _id_text(token_id) if self.as_ids else self.token_bytes(token_id).decode(errors="replace")

    def unique_text(self, token_id: int) -> str:
        r"""Return the token's name; invalid UTF-8 becomes `bytes:\x..`, as OpenAI writes it."""
        if self.as_ids:
            return _id_text(token_id)
        token_bytes = self.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class TextOffsets:
    """Compute the offset of each token in the text of one output, in characters.

    Takes a detokenizer of its own. `num_chars` is the length of the text before the output.
    """

    def __init__(self, detokenizer: Detokenizer, num_chars: int = 0) -> None:
        self._detokenizer = detokenizer
        self._num_chars = num_chars

    def add(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens; a token within a character has the offset of that character."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars + self._detokenizer.num_chars_before(token_id))
            self._num_chars += len(self._detokenizer.add(token_id))
        return offsets


def chat_logprobs(items: Sequence[TokenLogprobs], names: TokenNames, *, tells_sampled: bool) -> dict[str, Any]:
    """Return the logprobs of a chat completion's choice.

    With `tells_sampled`, the sampled token is added to top_logprobs, which otherwise has the requested tokens alone.
    """

    def entry(item: TokenLogprobs | TopLogprob) -> dict[str, Any]:
        of_token = list(names.token_bytes(item.token_id))
        return {"token": names.text(item.token_id), "logprob": finite_logprob(item), "bytes": of_token}

    def listed(item: TokenLogprobs) -> list[TokenLogprobs | TopLogprob]:
        if not tells_sampled or any(top.token_id == item.token_id for top in item.top):
            return [*item.top]
        return sorted([*item.top, item], key=lambda each: -each.logprob)

    content = [{**entry(item), "top_logprobs": [entry(each) for each in listed(item)]} for item in items]
    return {"content": content, "refusal": None}


def completion_logprobs(
    items: Sequence[TokenLogprobs], offsets: Sequence[int], names: TokenNames, unscored: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the logprobs of a completion's choice.

    The most likely tokens are keys of an object: of two tokens with the same text, the more likely one is kept. The
    sampled token is included. `unscored` tokens precede the items and have no logprobs.
    """
    first = [names.unique_text(token_id) for token_id in unscored]
    tokens = [names.unique_text(item.token_id) for item in items]
    top_logprobs: list[dict[str, float] | None] = [None for _ in first]
    for token, item in zip(tokens, items, strict=True):
        most_likely: dict[str, float] = {}
        for top in item.top:  # most likely first
            most_likely.setdefault(names.unique_text(top.token_id), finite_logprob(top))
        most_likely.setdefault(token, finite_logprob(item))
        top_logprobs.append(most_likely)
    return {
        "tokens": first + tokens,
        "token_logprobs": [*(None for _ in first), *map(finite_logprob, items)],
        "top_logprobs": top_logprobs,
        "text_offset": list(offsets),
    }


def prompt_logprobs(scores: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """Return the logprobs of a prompt in vLLM's format.

    Each token has an object with its own logprob and the most likely ones, by token id; null for the first token. The
    rank of a token outside the most likely ones is unknown.
    """

    def entry(item: TokenLogprobs | TopLogprob, rank: int | None) -> dict[str, Any]:
        text = token_bytes(item.token_id).decode(errors="replace")
        return {"logprob": finite_logprob(item), "rank": rank, "decoded_token": text}

    listed: list[dict[str, Any] | None] = [None]
    for score in scores:
        entries = {str(top.token_id): entry(top, rank) for rank, top in enumerate(score.top, start=1)}
        listed.append({str(score.token_id): entry(score, None)} | entries)
    return listed


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def finite_logprob(item: TokenLogprobs | TopLogprob) -> float:
    """Return the logprob of a token, at least LEAST_LOGPROB."""
    return max(item.logprob, LEAST_LOGPROB)


# ---- Prompt text at the start of an echoing completion ----


@dataclass(frozen=True, slots=True)
class Echo:
    """Text of the prompt, and the offset of each token in it, in characters."""

    text: str = ""
    offsets: Sequence[int] = ()


NOTHING: Final = Echo()


def echo_of(prompt: Sequence[int], detokenizer: Detokenizer, sent: str | None) -> Echo:
    """Return the echo of the `sent` text, or of all tokens if `sent` is None.

    Tokens that the tokenizer adds around a text, such as a begin token, have no characters in it.
    """
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


# ---- Logprobs of the content without thoughts and tool calls, as OpenAI's /v1/responses has them ----

Scored = tuple[Delta, list[TokenLogprobs]]
"""A delta and the tokens of its content."""


class ScoredDeltas:
    """Yield the deltas of one output with the logprobs of their content, however the output is cut into chunks.

    Tokens whose text is left out, as tags and end tokens, are in no delta.
    """

    def __init__(self, deltas: Deltas, offsets: TextOffsets) -> None:
        self._deltas = deltas
        self._offsets = offsets
        self._num_chars = 0  # characters of the text that have been read
        self._to_come: deque[tuple[int, TokenLogprobs]] = deque()  # tokens that have not begun, by offset
        self._text = ""  # text that has been read and is in no delta
        self._read: deque[tuple[int, TokenLogprobs]] = deque()  # tokens in or before that text, by offset

    def feed(self, chunk: Chunk) -> list[Scored]:
        """Return the deltas that a chunk makes certain."""
        starts = self._offsets.add(item.token_id for item in chunk.logprobs)
        self._to_come.extend(zip(starts, chunk.logprobs, strict=True))
        told: list[Scored] = []
        for text in self._by_token(chunk.text):
            told += self._scored(self._deltas.feed(text))
        return told

    def finish(self) -> list[Scored]:
        """Return the remaining deltas, when the text has ended."""
        return self._scored(self._deltas.finish())

    def _by_token(self, text: str) -> Iterator[str]:
        """Yield the text in pieces cut where tokens begin, and record the tokens that have begun."""
        begin, end = self._num_chars, self._num_chars + len(text)
        while (first := self._num_chars) < end:
            while self._to_come and self._to_come[0][0] <= first:
                self._read.append(self._to_come.popleft())
            self._num_chars = min(end, self._to_come[0][0]) if self._to_come else end
            piece = text[first - begin : self._num_chars - begin]
            self._text += piece
            yield piece

    def _scored(self, deltas: list[Delta]) -> list[Scored]:
        return [(delta, self._tokens_of(delta)) for delta in deltas]

    def _tokens_of(self, delta: Delta) -> list[TokenLogprobs]:
        """Return the tokens of a delta's content, and drop the text before it."""
        told: str = delta.get(CONTENT) or delta.get(REASONING) or ""
        # Text before the delta was left out, as tags are; text after it is held back, as the start of a tag is.
        place = 0 if self._text.startswith(told) else self._text.rfind(told)
        if not told or place < 0:  # a tool call, whose text differs from the output's
            self._text = ""
            self._read.clear()
            return []
        first = self._num_chars - len(self._text) + place
        self._text = self._text[place + len(told) :]
        end = self._num_chars - len(self._text)
        items: list[TokenLogprobs] = []
        while self._read and self._read[0][0] < end:
            start, item = self._read.popleft()
            if start >= first:
                items.append(item)
        return items if CONTENT in delta else []
