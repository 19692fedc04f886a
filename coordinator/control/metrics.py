"""What the coordinator counts: requests, tokens and seconds, from its start. Pure: no clock, no library, no names.

The names under which all this is shown stand in coordinator/doors/exposition.py.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final

from coordinator.control.attainment import AttainmentCounts
from coordinator.control.slo import SloClass
from coordinator.control.timeline import Phase
from protos import inference_pb2

# From a token of a GPU to a long answer of a CPU; dense where limits of TTFT and TPOT lie.
BOUNDS_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip


class Histogram:
    """How many observations fell between which of BOUNDS_S, and their sum."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)  # the last is of those beyond the last bound
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class Metrics:
    """All counters. A request here is one answer: a call for n answers counts n times, like its prompt."""

    def __init__(self, slo_classes: Sequence[SloClass] = ()) -> None:
        self.attainment = AttainmentCounts(slo_classes)
        self.ttft = Histogram()
        self.itl = Histogram()
        self.tpot = Histogram()
        self.e2e = Histogram()
        self.move_pause = Histogram()
        self.phases = {phase: Histogram() for phase in Phase}
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_kv_bytes = 0
        self.num_kv_bytes_saved = 0
        self.num_moved_kv_bytes = 0
        self.num_restarts = 0
        self.num_kept = 0
        self.moves = Counter[str]()  # by outcome
        # by reason
        self.finished = Counter[str]()
        self.failed = Counter[str]()
        self.refused = Counter[str]()
        self.transfers_failed = Counter[str]()

    def prompt_read(self, num_tokens: int, num_cached_tokens: int) -> None:
        """A prompt has its first token; so many of its own tokens were cached."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens

    def tokens_came(self, num_tokens: int, gap_s: float, *, is_first: bool) -> None:
        """Tokens of one answer came together, gap_s after those before, or after the request if they are the first."""
        self.num_generated_tokens += num_tokens
        (self.ttft if is_first else self.itl).observe(gap_s)
        for _ in range(num_tokens - 1):
            self.itl.observe(0.0)

    def kv_moved(self, num_bytes: int, num_bytes_saved: int) -> None:
        """A transfer is complete."""
        self.num_kv_bytes += num_bytes
        self.num_kv_bytes_saved += num_bytes_saved

    def answered(self, finish_reason: str, complete: inference_pb2.Complete) -> None:
        """An answer has ended. The times of one that nobody waited for say nothing."""
        self.finished[finish_reason] += 1
        if complete.finish_reason == inference_pb2.FINISH_REASON_ABORT:
            return
        timeline = complete.timeline
        self.e2e.observe(timeline.e2e_s)
        for phase, histogram in self.phases.items():
            histogram.observe(getattr(timeline, f"{phase.value}_s"))
        if complete.completion_tokens > 1 and not complete.resumed_tokens:
            self.tpot.observe((timeline.e2e_s - timeline.ttft_s) / (complete.completion_tokens - 1))
