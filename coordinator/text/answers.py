"""Turn the tokens of one output into text chunks, and end the output at stop strings."""

from dataclasses import dataclass

from coordinator.api.generation import Generation
from coordinator.control.instructions import Chunk
from coordinator.control.request import SoFar
from coordinator.text.detokenizer import Detokenizer
from coordinator.text.stop_strings import StopMatcher
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.reasons import ENGINE_ERROR


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of a request for the text of its outputs."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


class AnswerText:
    """Text of one output as its tokens come.

    The text ends before the first stop string, or after it if requested. The text of an end token is left out or
    included likewise.
    """

    def __init__(self, detokenizer: Detokenizer, options: TextOptions) -> None:
        self._detokenizer = detokenizer
        self._options = options
        self._matcher = StopMatcher(options.stop) if options.stop else None
        self._owed = ""  # text to return before the next piece
        self._num_known_chars = 0  # characters of the next text that the client already has
        self._num_foreseen = 0  # characters that the detokenizer holds back and the matcher has seen
        self._num_exempt = 0  # of these, the characters from before min_tokens
        self.num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        """Return the stop string that has ended the output, or None."""
        return self._matcher.matched if self._matcher is not None else None

    def resume(self, so_far: SoFar) -> None:
        """Begin with the tokens of an earlier call; `next` and `rest` then return the text that the client lacks.

        Must be called first. Takes long for a long output.
        """
        *others, last = so_far.token_ids
        pieces = [self._take(token_id) for token_id in others if self.matched_stop is None]
        if self.matched_stop is None:
            pieces.append(self._take(last, ends=so_far.finish_reason == inference_pb2.FINISH_REASON_STOP))
        self._num_known_chars = so_far.num_chars
        self._owed = "".join(pieces)

    def add(
        self, token_id: int, finish_reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_UNSPECIFIED
    ) -> str:
        """Add a token, and return the text that is certain now; often empty. No token may follow a stop string.

        `finish_reason` says how this token ends the output; FINISH_REASON_UNSPECIFIED if it does not. After the last
        token, `rest` returns the text that was held back.
        """
        return self._news(self._take(token_id, ends=finish_reason == inference_pb2.FINISH_REASON_STOP))

    def rest(self) -> str:
        """Return the text that was held back, when the tokens have ended."""
        if self.matched_stop is not None:
            return self._news("")
        rest = self._certain(self._detokenizer.flush())
        if self._matcher is not None and self._matcher.matched is None:
            rest += self._matcher.flush()
        return self._news(rest)

    def _take(self, token_id: int, *, ends: bool = False) -> str:
        self.num_tokens += 1
        if ends and not self._options.include_stop_str_in_output:
            return ""
        certain = self._certain(self._detokenizer.add(token_id))
        return certain + self._certain(self._detokenizer.flush()) if self._foresees_stop() else certain

    @property
    def _may_stop(self) -> bool:
        return self.num_tokens >= self._options.min_tokens

    def _foresees_stop(self) -> bool:
        """Return whether a stop string ends in the text that the detokenizer holds back, so that the output ends
        there."""
        if self._matcher is None or self._matcher.matched is not None:
            return False
        ahead = self._detokenizer.ahead
        piece, self._num_foreseen = ahead[self._num_foreseen :], len(ahead)
        if not self._may_stop:
            self._num_exempt = len(ahead)
        return self._matcher.foresee(piece, may_stop=self._may_stop)

    def _certain(self, text: str) -> str:
        if self._matcher is None or not text:
            return text
        exempt, self._num_exempt, self._num_foreseen = text[: self._num_exempt], 0, 0
        certain = self._matcher.feed(exempt, may_stop=False)
        certain += self._matcher.feed(text[len(exempt) :], may_stop=self._may_stop)
        if self._matcher.matched is not None and self._options.include_stop_str_in_output:
            certain += self._matcher.matched
        return certain

    def _news(self, text: str) -> str:
        """Return the next text without the characters that the client already has."""
        if not self._owed and not self._num_known_chars:
            return text
        text, self._owed = self._owed + text, ""
        num_known = min(self._num_known_chars, len(text))
        self._num_known_chars -= num_known
        return text[num_known:]


def check_follows(index: int, num_tokens: int) -> None:
    """Raise RequestError unless `index`, of the next token, is `num_tokens`, since a token would be missing."""
    if index != num_tokens:
        raise RequestError(ENGINE_ERROR, f"token {index} came in place of token {num_tokens}")


class Answer:
    """Write the tokens of one output, with their text, to the Generation of its call."""

    def __init__(self, generation: Generation, index: int, text: AnswerText) -> None:
        self.generation = generation
        self._index = index
        self._text = text

    @property
    def matched_stop(self) -> str | None:
        """Return the stop string that has ended the output, or None."""
        return self._text.matched_stop

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the output."""
        return self._text.num_tokens

    def add(self, chunk: Chunk) -> bool:
        """Add the text to a chunk of tokens and queue the chunk; return whether a stop string has ended the output.

        Tokens after the stop string are dropped. The chunk is changed and must not be used afterwards. Raises
        RequestError when the reader is too slow, or the tokens do not follow those before.
        """
        answer_text = self._text
        if answer_text.matched_stop is not None:
            return True
        check_follows(chunk.first_token_index, answer_text.num_tokens)
        *others, last = chunk.token_ids
        for number, token_id in enumerate(others, start=1):
            chunk.text += answer_text.add(token_id)
            if answer_text.matched_stop is not None:
                chunk.token_ids, chunk.logprobs = chunk.token_ids[:number], chunk.logprobs[:number]
                break
        else:
            chunk.text += answer_text.add(last, chunk.finish_reason)
        chunk.finish_reason = inference_pb2.FINISH_REASON_UNSPECIFIED
        self.generation.push_chunk(self._index, chunk)
        return answer_text.matched_stop is not None

    def end(self, complete: inference_pb2.Complete) -> None:
        """Queue the text that was held back, then the end `complete`.

        If a stop string has ended the output, the finish reason and the number of tokens in `complete` are replaced.
        """
        if rest := self._text.rest():
            self.generation.push_chunk(self._index, Chunk(self._text.num_tokens, [], rest))
        if self.matched_stop is not None:
            complete.finish_reason = inference_pb2.FINISH_REASON_STOP
            complete.matched_stop_str = self.matched_stop
            complete.ClearField("error")
            complete.completion_tokens = self._text.num_tokens
        self.generation.push_complete(self._index, complete)
