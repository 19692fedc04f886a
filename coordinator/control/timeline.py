"""Where the time of a request went. Pure."""

from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import Any, Final, NamedTuple

from protos import inference_pb2

MAX_MARKS: Final = 64  # of one timeline: some twenty restarts or moves


class Phase(Enum):
    """What a request is waiting for or doing; the values are the fields of the Timeline message, less their _s.

    One node that reads and writes knows neither CREDIT_WAIT nor TRANSFER: the wait for blocks is part of PREFILL_QUEUE.
    """

    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    CREDIT_WAIT = "credit_wait"
    TRANSFER = "transfer"
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"


class Mark(NamedTuple):
    """From here on the request is in this phase, on these nodes: that which reads, and that which writes."""

    at_s: float
    phase: Phase
    reader: str = ""
    writer: str = ""
    attempt: int = 0  # its number, from 1; while no node has the request, that of the last one


class Timeline:
    """A request is in exactly one phase at any time, so the phases add up to its whole time. A phase may be entered
    again, after a move to other nodes; its seconds then add up too."""

    def __init__(self, start_s: float, first_token_s: float | None = None) -> None:
        """`first_token_s` is of an answer that goes on: an earlier call has given its first token."""
        self.phase = Phase.PREFILL_QUEUE
        self._start_s = self._entered_s = start_s
        self._first_token_s = first_token_s
        self._last_token_s = start_s
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._marks = [Mark(start_s, self.phase)]
        self._num_attempts = 0
        self.failures: dict[int, str] = {}  # the reasons of attempts that came to nothing, by their numbers

    def enter(self, phase: Phase, now: float, *, ago_s: float = 0.0) -> None:
        """Ends the current phase and begins another, ago_s before now, though never before the current one began."""
        at_s = max(self._entered_s, min(now, now - ago_s))
        self._seconds[self.phase] += at_s - self._entered_s
        self.phase, self._entered_s = phase, at_s
        self._mark(self._marks[-1]._replace(at_s=at_s, phase=phase))

    def placed(self, now: float, reader: str = "", writer: str = "", *, begins: bool = False) -> None:
        """From now on these nodes have the request; without names none has. `begins`: as another attempt."""
        self._num_attempts += begins
        self._mark(Mark(now, self.phase, reader, writer, self._num_attempts))

    def failed(self, reason: str) -> None:
        """The last attempt has come to nothing, and others may follow."""
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
            self._marks.pop()  # the span before takes its time
        self._marks.append(mark)

    def spans(self, now: float) -> Iterator[tuple[Mark, float]]:
        """What the request did one after the other until now, and when each ended."""
        for mark, following in pairwise([*self._marks, Mark(now, self.phase)]):
            if following.at_s > mark.at_s:
                yield mark, following.at_s

    @property
    def start_s(self) -> float:
        return self._start_s

    @property
    def first_token_s(self) -> float | None:
        """When the first token came; None before."""
        return self._first_token_s

    @property
    def ttft_s(self) -> float:
        """0 before the first token, and where an earlier call has given it."""
        return 0.0 if self._first_token_s is None else max(0.0, self._first_token_s - self._start_s)

    def tpot_s(self, num_tokens: int) -> float:
        """The mean from each of so many tokens to the next; 0 without two."""
        first_s = self._first_token_s
        return (self._last_token_s - first_s) / (num_tokens - 1) if first_s is not None and num_tokens > 1 else 0.0

    def tokens(self, now: float) -> float:
        """Marks tokens of the answer that came now. Returns the seconds since those before, or since the start."""
        if self._first_token_s is None:
            self._first_token_s = now
        gap_s, self._last_token_s = now - self._last_token_s, now
        return gap_s

    def to_wire(self, now: float, **others: Any) -> inference_pb2.Timeline:
        """The request ends now; `others` are the fields that are not its time."""
        self.enter(self.phase, now)
        seconds: dict[str, Any] = {f"{phase.value}_s": spent_s for phase, spent_s in self._seconds.items()}
        return inference_pb2.Timeline(
            **seconds,
            e2e_s=sum(self._seconds.values()),
            ttft_s=self.ttft_s,
            **others,
        )
