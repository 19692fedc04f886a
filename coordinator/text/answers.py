"""The text of one answer: tokens in, chunks out, stop strings in between."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.doors.generation import Generation
from coordinator.text.detokenizer import Detokenizer
from coordinator.text.stop_strings import StopMatcher
from protos import fleet_pb2, inference_pb2


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What a request asks of the text of its answers."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


class Answer:
    """One answer of a generation. Its text ends where the first stop string begins, or after it when asked to include
    it; the text of a token that ended the answer is left out likewise."""

    def __init__(self, generation: Generation, index: int, detokenizer: Detokenizer, options: TextOptions) -> None:
        self.generation = generation
        self._index = index
        self._detokenizer = detokenizer
        self._options = options
        self._matcher = StopMatcher(options.stop) if options.stop else None
        self._num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that has ended the answer."""
        return self._matcher.matched if self._matcher is not None else None

    def add(self, tokens: Sequence[fleet_pb2.SampledToken]) -> None:
        """Takes the next tokens; those after a stop string are dropped. Raises RequestError for a slow reader."""
        if self.matched_stop is not None:
            return
        first_token_index, text = self._num_tokens, ""
        token_ids: list[int] = []
        logprobs: list[inference_pb2.TokenLogprobs] = []
        for token in tokens:
            self._num_tokens += 1
            token_ids.append(token.token_id)
            if token.HasField("logprob"):
                logprobs.append(
                    inference_pb2.TokenLogprobs(token_id=token.token_id, logprob=token.logprob, top=token.top)
                )
            text += self._text_of(token)
            if self.matched_stop is not None:
                break
        self.generation.push_chunk(
            self._index,
            inference_pb2.Chunk(first_token_index=first_token_index, token_ids=token_ids, text=text, logprobs=logprobs),
        )

    def end(self, complete: inference_pb2.Complete) -> None:
        """Sends the text held back, then the end. A stop string found in the answer is its finish reason, whatever
        the nodes had to say."""
        if self.matched_stop is None and (rest := self._rest()):
            chunk = inference_pb2.Chunk(first_token_index=self._num_tokens, text=rest)
            self.generation.push_chunk(self._index, chunk)
        if self.matched_stop is not None:
            complete.finish_reason = inference_pb2.FINISH_REASON_STOP
            complete.matched_stop_str = self.matched_stop
            complete.completion_tokens = self._num_tokens
        self.generation.push_complete(self._index, complete)

    def _text_of(self, token: fleet_pb2.SampledToken) -> str:
        if token.finish_reason == inference_pb2.FINISH_REASON_STOP and not self._options.include_stop_str_in_output:
            return ""
        return self._certain(self._detokenizer.add(token.token_id))

    def _certain(self, text: str) -> str:
        if self._matcher is None:
            return text
        certain = self._matcher.feed(text, may_stop=self._num_tokens >= self._options.min_tokens)
        if self._matcher.matched is not None and self._options.include_stop_str_in_output:
            certain += self._matcher.matched
        return certain

    def _rest(self) -> str:
        rest = self._certain(self._detokenizer.flush())
        if self._matcher is not None and self._matcher.matched is None:
            rest += self._matcher.flush()
        return rest
