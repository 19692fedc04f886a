"""Logprobs of an answer's content alone, as OpenAI's /v1/responses has them: not those of thoughts and calls. Pure."""

from collections import deque
from collections.abc import Iterator

from coordinator.doors.http.logprobs import TextOffsets
from coordinator.doors.http.messages import CONTENT, REASONING, Delta, Deltas
from protos.inference_pb2 import Chunk, TokenLogprobs

Scored = tuple[Delta, list[TokenLogprobs]]
"""A delta, and the tokens that its content is made of."""


class ScoredDeltas:
    """The deltas of one answer with the logprobs of their content, which do not depend on how the answer is cut into
    chunks. Tokens whose text is left out, as that of tags and of the answer's end, have no delta."""

    def __init__(self, deltas: Deltas, offsets: TextOffsets) -> None:
        self._deltas = deltas
        self._offsets = offsets
        self._num_chars = 0  # of the text, that were read
        self._to_come: deque[tuple[int, TokenLogprobs]] = deque()  # by where the token begins in the text
        self._text = ""  # that was read, and is in no delta
        self._read: deque[tuple[int, TokenLogprobs]] = deque()  # tokens that begin in it, and where; or before it

    def feed(self, chunk: Chunk) -> list[Scored]:
        """Return what a chunk makes certain."""
        starts = self._offsets.add(item.token_id for item in chunk.logprobs)
        self._to_come.extend(zip(starts, chunk.logprobs, strict=True))
        told: list[Scored] = []
        for text in self._by_token(chunk.text):
            told += self._scored(self._deltas.feed(text))
        return told

    def finish(self) -> list[Scored]:
        """Return the rest, when no more text will come."""
        return self._scored(self._deltas.finish())

    def _by_token(self, text: str) -> Iterator[str]:
        """Cut the text where tokens begin, and note those that have begun."""
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
        """Return the tokens of a delta's content. Text that was read before it is in no delta any more."""
        told: str = delta.get(CONTENT) or delta.get(REASONING) or ""
        # Text before it was left out, as tags are; text behind it is held back, as the beginning of a tag is.
        place = 0 if self._text.startswith(told) else self._text.rfind(told)
        if not told or place < 0:  # a call, whose words are not those of the text
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
