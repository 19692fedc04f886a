"""Count requests, tokens and seconds from the start of the coordinator. Pure: no clock, no metrics library, no names.

coordinator/api/exposition.py names the metrics.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from coordinator.control.request import Phase
from coordinator.control.slo import UNNAMED, AttainmentCounts, SloClass
from protos import inference_pb2
from serving_core.figures import ANSWERS, TOKENS, Histogram

# Outcomes of a remote prefix fetch: with blocks, or without any.
FETCHED: Final = "lent"
NOT_FETCHED: Final = "not_lent"


class Metrics:
    """Hold all counters. A request is one sequence here: a call with n outputs counts n times, and so does its
    prompt."""

    def __init__(self, slo_classes: Sequence[SloClass] = ()) -> None:
        self.attainment = AttainmentCounts(slo_classes)
        self.ttft = Histogram()
        self.itl = Histogram()
        self.tpot = Histogram()
        self.e2e = Histogram()
        self.migration_pause = Histogram()
        self.phases = {phase: Histogram() for phase in Phase}
        self.inference = Histogram()  # the time of a request without its prefill queue
        self.prompt_lengths, self.output_lengths = Histogram(TOKENS), Histogram(TOKENS)
        self.params_n, self.params_max_tokens = Histogram(ANSWERS), Histogram(TOKENS)  # per call
        # By SLO class, over the requests that have ended.
        names = [*(each.name for each in slo_classes), UNNAMED]
        self.ttft_by_class = {name: Histogram() for name in names}
        self.tpot_by_class = {name: Histogram() for name in names}
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_kv_bytes = 0
        self.num_kv_bytes_saved = 0
        self.num_migrated_kv_bytes = 0
        self.num_proposed = 0
        self.num_accepted = 0
        self.num_fetched_blocks = 0
        self.num_fetched_kv_bytes = 0
        self.prefix_fetch = Histogram()
        self.num_restarts = 0
        self.node_losses = Counter[str]()  # by LossCause
        self.num_kept = 0
        self.migrations = Counter[str]()  # by outcome
        self.prefix_fetches = Counter[str]()  # by outcome
        # By reason.
        self.finished = Counter[str]()
        self.failed = Counter[str]()
        self.refused = Counter[str]()
        self.transfers_failed = Counter[str]()

    def call_begun(self, num_sequences: int, max_tokens: int) -> None:
        """Count a call that has begun: its number of sequences (n) and its max_tokens."""
        self.params_n.observe(num_sequences)
        self.params_max_tokens.observe(max_tokens)

    def prompt_prefilled(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Count a prompt that has its first token: its tokens, and those among them that were cached."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens

    def tokens_came(self, num_tokens: int, gap_s: float, *, is_first: bool) -> None:
        """Count the `num_tokens` tokens of one sequence that came together.

        `gap_s` is the time since the tokens before; with `is_first`, since the request's arrival.
        """
        self.num_generated_tokens += num_tokens
        (self.ttft if is_first else self.itl).observe(gap_s)
        if num_tokens > 1:
            self.itl.observe(0.0, num_tokens - 1)

    def kv_transferred(self, num_bytes: int, num_bytes_saved: int) -> None:
        """Count a complete KV transfer: the bytes sent, and those not sent because the target had them cached."""
        self.num_kv_bytes += num_bytes
        self.num_kv_bytes_saved += num_bytes_saved

    def prefix_fetch_ended(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        """Count a remote prefix fetch that took `seconds`; without blocks it counts as not fetched."""
        self.num_fetched_blocks += num_blocks
        self.num_fetched_kv_bytes += num_bytes
        self.prefix_fetches[FETCHED if num_blocks else NOT_FETCHED] += 1
        self.prefix_fetch.observe(seconds)

    def ended(self, finish_reason: str, complete: inference_pb2.Complete) -> None:
        """Count a request that has ended, with times, lengths and draft tokens of its Complete message.

        `finish_reason` is the label. An aborted request is counted and adds nothing else.
        """
        self.finished[finish_reason] += 1
        if complete.finish_reason == inference_pb2.FINISH_REASON_ABORT:
            return
        timeline = complete.timeline
        self.e2e.observe(timeline.e2e_s)
        for phase, histogram in self.phases.items():
            histogram.observe(getattr(timeline, f"{phase.value}_s"))
        self.inference.observe(timeline.e2e_s - timeline.prefill_queue_s)
        self.prompt_lengths.observe(complete.prompt_tokens)
        self.output_lengths.observe(complete.completion_tokens)
        self.num_proposed += complete.proposed_tokens
        self.num_accepted += complete.accepted_tokens
        if complete.completion_tokens and not complete.resumed_tokens:
            self._first_and_others(complete)

    def _first_and_others(self, complete: inference_pb2.Complete) -> None:
        """Observe TTFT and TPOT of a request whose first token came in this call."""
        timeline, num_others = complete.timeline, complete.completion_tokens - 1
        slo_class = complete.attainment.slo_class or UNNAMED
        self.ttft_by_class[slo_class].observe(timeline.ttft_s)
        if num_others:
            tpot_s = (timeline.e2e_s - timeline.ttft_s) / num_others
            self.tpot.observe(tpot_s)
            self.tpot_by_class[slo_class].observe(tpot_s)
