"""One request under way, as its client sees it."""

from collections.abc import Callable, Mapping
from typing import Final

from serving_core.errors import SplitServeError
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.serve.wire import OrderedRequest

MOST_ERROR_CHARACTERS: Final = 300


class RequestFailed(SplitServeError):
    """A request without a complete answer. is_refused: the server turned it away; it may say when to come back."""

    def __init__(self, message: str, *, is_refused: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.is_refused = is_refused
        self.retry_after_s = retry_after_s


class Reply:
    """What came so far. `now_s` gives the seconds since the start of the load."""

    def __init__(self, request: OrderedRequest | PlannedRequest, now_s: Callable[[], float]) -> None:
        self.num_prompt_tokens = len(request.prompt)
        self.num_arrived_tokens = 0
        self.num_output_tokens: int | None = None  # the server's own count, when it has told it
        self.is_ended = False  # whether the server said that the answer ends here
        self.silent_end_s: float | None = None  # when that came, if with no token that could be counted
        self.is_stopped = False  # whether it said that it ends for another reason than its length
        self.timeline: Mapping[str, float] | None = None
        self.num_cached_tokens: int | None = None
        self._request = request
        self._now_s = now_s
        self._sent_s = now_s()
        self._arrivals_s: list[float] = []
        self._arrival_tokens: list[int] = []

    def arrived(self, moment_s: float, num_tokens: int) -> None:
        """So many tokens came, at a moment that `now_s` gave."""
        self._arrivals_s.append(moment_s)
        self._arrival_tokens.append(num_tokens)
        self.num_arrived_tokens += num_tokens

    def now_s(self) -> float:
        """The moment of what comes now."""
        return self._now_s()

    def check_complete(self) -> None:
        """Raises RequestFailed when the answer has not come to its end, or has another length than was asked for."""
        if not self.is_ended:
            raise RequestFailed("the stream ended before the answer did")
        wanted, counted, is_exact = self._request.output_tokens, self.num_output_tokens, self._request.ignore_eos
        if counted is not None and (counted > wanted or (is_exact and counted < wanted)):
            raise RequestFailed(f"the answer has {counted} tokens instead of {wanted}")
        if is_exact and counted is None and self.is_stopped:
            raise RequestFailed(f"the answer stopped before it had {wanted} tokens, and nobody counted them")

    def outcome(self, error: str = "", *, is_refused: bool = False, retry_after_s: float | None = None) -> Outcome:
        """What became of the request, which ends now. One that has begun to be answered is not turned away any more."""
        counted, is_refused = self.num_output_tokens, is_refused and not self._arrivals_s
        return Outcome(
            index=self._request.index,
            scheduled_s=self._request.send_at_s,
            sent_s=self._sent_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_arrived_tokens if counted is None else counted,
            arrivals_s=tuple(self._arrivals_s),
            arrival_tokens=tuple(self._arrival_tokens),
            ended_s=self._now_s(),
            error=bounded(error),
            is_refused=is_refused,
            retry_after_s=retry_after_s if is_refused else None,
            timeline=self.timeline,
            num_cached_tokens=self.num_cached_tokens,
            num_refusals_before=self._request.num_refusals_before,
        )


def bounded(text: str) -> str:
    """The beginning of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= MOST_ERROR_CHARACTERS else text[: MOST_ERROR_CHARACTERS - 3] + "..."
