"""Measure how long a request spends in each phase. Pure."""

from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import Any, Final, NamedTuple

from protos import inference_pb2

MAX_MARKS: Final = 64  # per timeline: about twenty restarts or migrations


class Phase(Enum):
    """The phase of a request; the values are the fields of the Timeline message, less their _s.

    Where one node does both prefill and decode, there is neither CREDIT_WAIT nor TRANSFER: the wait for blocks is part
    of PREFILL_QUEUE.
    """

    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    CREDIT_WAIT = "credit_wait"
    TRANSFER = "transfer"
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"


class Mark(NamedTuple):
    """The start of a phase: from here on the request is in it, on this prefill node and this decode node."""

    at_s: float
    phase: Phase
    prefill_node: str = ""
    decode_node: str = ""
    attempt: int = 0  # number of the attempt, from 1; the last one's while no node has the request


class Timeline:
    """Record the phases of a request.

    A request is in exactly one phase at any time, so the phases add up to its whole time. The seconds of a phase that
    is entered again, after a migration or a restart, add up too.
    """

    def __init__(self, start_s: float, first_token_s: float | None = None) -> None:
        """Start in PREFILL_QUEUE. `first_token_s` is set for an output whose first token an earlier call has
        returned."""
        self.phase = Phase.PREFILL_QUEUE
        self._start_s = self._entered_s = start_s
        self._first_token_s = first_token_s
        self._last_token_s = start_s
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._marks = [Mark(start_s, self.phase)]
        self._num_attempts = 0
        self.failures: dict[int, str] = {}  # reasons of failed attempts, by number

    def enter(self, phase: Phase, now: float, *, ago_s: float = 0.0) -> None:
        """End the current phase and start another, `ago_s` before now, though never before the current one began."""
        at_s = max(self._entered_s, min(now, now - ago_s))
        self._seconds[self.phase] += at_s - self._entered_s
        self.phase, self._entered_s = phase, at_s
        self._mark(self._marks[-1]._replace(at_s=at_s, phase=phase))

    def placed(self, now: float, prefill_node: str = "", decode_node: str = "", *, begins: bool = False) -> None:
        """Record the nodes that have the request from now on; empty names for none. `begins`: with a new attempt."""
        self._num_attempts += begins
        self._mark(Mark(now, self.phase, prefill_node, decode_node, self._num_attempts))

    def failed(self, reason: str) -> None:
        """Record why the last attempt failed."""
        if len(self.failures) < MAX_MARKS:
            self.failures[self._num_attempts] = reason

    def _mark(self, mark: Mark) -> None:
        last = self._marks[-1]
        if mark[1:] == last[1:]:
            return
        if mark.at_s <= last.at_s:
            mark = mark._replace(at_s=last.at_s)
            self._marks.pop()
        elif len(self._marks) >= MAX_MARKS:
            self._marks.pop()  # the span before is extended
        self._marks.append(mark)

    def spans(self, now: float) -> Iterator[tuple[Mark, float]]:
        """Yield the phases up to now, each with its end."""
        for mark, following in pairwise([*self._marks, Mark(now, self.phase)]):
            if following.at_s > mark.at_s:
                yield mark, following.at_s

    @property
    def start_s(self) -> float:
        return self._start_s

    @property
    def first_token_s(self) -> float | None:
        """Return when the first token came; None before."""
        return self._first_token_s

    @property
    def ttft_s(self) -> float:
        """Return the TTFT; 0 before the first token, and where an earlier call has returned it."""
        return 0.0 if self._first_token_s is None else max(0.0, self._first_token_s - self._start_s)

    def tpot_s(self, num_tokens: int) -> float:
        """Return the mean time per token after the first, of `num_tokens` tokens; 0 with fewer than two."""
        first_s = self._first_token_s
        return (self._last_token_s - first_s) / (num_tokens - 1) if first_s is not None and num_tokens > 1 else 0.0

    def tokens(self, now: float) -> float:
        """Record tokens that came now. Return the seconds since the tokens before, or since the start."""
        if self._first_token_s is None:
            self._first_token_s = now
        gap_s, self._last_token_s = now - self._last_token_s, now
        return gap_s

    def to_wire(self, now: float, **others: Any) -> inference_pb2.Timeline:
        """Return the Timeline message of a request that ends now. `others` are its fields beside the times."""
        self.enter(self.phase, now)
        seconds: dict[str, Any] = {f"{phase.value}_s": spent_s for phase, spent_s in self._seconds.items()}
        return inference_pb2.Timeline(
            **seconds,
            e2e_s=sum(self._seconds.values()),
            ttft_s=self.ttft_s,
            **others,
        )
