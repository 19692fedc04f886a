"""Predict how many requests with an SLO become late through one more request. Pure.

One more request wants something of a node: to prefill the prompt, to decode the sequence, or both. Its requests with an
SLO are known, and so are the costs of its steps, which the node itself has measured. Then

    sequences are late whose last token is: all sequences of a decode node advance together, each step takes what it
              takes with those that have begun and not ended, and a sequence whose prompt is to be prefilled begins when
              that is expected; one that arrives by KV transfer must also make up for the longest chunk that it may have
              to wait for
    prompts   are late as far as the node could not prefill them in time one after the other, the most that it can

Where a node has no running slot, or no room in its pool, the sequence waits until enough of those with an SLO have
ended, or as long as others waited recently.

Predictions are uncertain: planned deadlines are before the limits, by margins that the coordinator has learned from its
own errors (coordinator/control/admission.py), and decode steps count as long as they rarely are in the mean, by the
margins of the nodes (serving_core/slo.py).

On a mixed node, prompts get the time that sequences leave: first the slack of the sequences, and then of each step what
the tightest limit that can be attained leaves; at least PROMPT_TIME_SHARE of the time, and all of it once the sequences
are over. Of the sequences whose prompts are still to be prefilled there, the share STARTED_SHARE counts. Sequences
without an SLO leave a chunk with each of their steps. The node's scheduler divides its time in the same way
(prefill_node/chunk_budget.py, prefill_node/scheduler.py). Output lengths are estimated from those that ended
(coordinator/control/load.py).

A sequence that makes no other late as things stand is still one too many where, at any time while it decodes, a step of
all sequences takes longer than the tightest limit (`tpot_ratio`): prompts would get no time, and a sequence that gets
more tokens than expected would be late.

A sequence also costs prompts that have not arrived: while it decodes, its node prefills little. So sequences do no harm
if they leave one node free (`spared_node`). On that node a sequence counts as one violation for each request that loses
its prefill (`num_lost`). A prompt on another node is prefilled beside sequences, also beside those to come
(`lasting_begins_s`). The steps that a node makes for one sequence alone count as seconds (`added_decode_s`): else
short sequences that are cheap one by one would keep a prefill node decoding.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heappop, heappush
from typing import Final, NamedTuple

from coordinator.control.load import Ledger, LimitedPart, LiveRequest
from coordinator.control.nodes import Node
from coordinator.control.placement.costs import Wanted
from serving_core.node.costs import StepLoad
from serving_core.slo import PROMPT_TIME_SHARE, timely

STARTED_SHARE: Final = (
    0.4  # share of the waiting sequences that decode while the others are prefilled; tuned in simulation
)


class Job(NamedTuple):
    """A prompt that a node is to prefill."""

    seconds: float
    due_s: float  # seconds from now


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """The progress of prompts on a node: the first `bank_s` seconds of work run at full speed, the rest at the share
    `share`.

    Prompts lose at most `most_lost_s` seconds by that.
    """

    bank_s: float
    share: float
    most_lost_s: float = math.inf

    def work_s(self, seconds: float) -> float:
        """Return how many seconds of prefill work are done after `seconds` seconds."""
        beyond_s = max(0.0, seconds - self.bank_s)
        return seconds - min(beyond_s * (1 - self.share), self.most_lost_s)

    def seconds(self, work_s: float) -> float:
        """Return how many seconds pass until `work_s` seconds of prefill work are done."""
        beyond_s = max(0.0, work_s - self.bank_s)
        return work_s + min(beyond_s * (1 / self.share - 1), self.most_lost_s)


def step_s(node: Node, ledger: Ledger, num_more: int = 0, num_more_cached: int = 0) -> float:
    """Return the seconds of a decode step of the node with `num_more` sequences more than it has.

    Those have `num_more_cached` tokens together. 0 without any sequence. Sequences that the node still has to prefill
    are left out.
    """
    account = ledger.of(node)
    num_sequences = account.num_sequences - account.num_unprefilled + num_more
    if not num_sequences:
        return 0.0
    return node.step_weights.of_step(StepLoad(num_sequences, account.tokens_held + num_more_cached))


def spared_node(nodes: Collection[Node], ledger: Ledger, now: float) -> Node | None:
    """Return the ready prefill node whose sequences with an SLO end first, to be kept free for prompts to come.

    None where several are equal, or none is ready.
    """
    most_left = ledger.most_left(now)
    by_left = [(most_left.get(node, 0), node) for node in nodes if node.prefills and node.is_ready]
    least = min((num_left for num_left, _ in by_left), default=0)
    first = [node for num_left, node in by_left if num_left == least]
    return first[0] if len(first) == 1 else None


class SloForecast:
    """Predict how many SLOs one request would violate on any node."""

    def __init__(
        self, ledger: Ledger, wanted: Wanted, now: float, num_fetched: Callable[[Node], int] = lambda node: 0
    ) -> None:
        """Create the forecast for the request `wanted` at `now`.

        `num_fetched` returns how many tokens of the prompt a node would fetch from another node's prefix cache.
        """
        self._ledger, self._wanted, self._now, self._num_fetched = ledger, wanted, now, num_fetched
        self._nodes: dict[Node, NodeForecast] = {}
        self._most_left = ledger.most_left(now)

    def added_decode_s(self, node: Node) -> float:
        """Return the seconds of decode steps that the node would make for the sequence alone.

        These are the steps after the end of the sequences that it decodes now.
        """
        num_steps = self._wanted.num_expected - 1 - self._most_left.get(node, 0)
        return num_steps * node.load.lone_step_s if num_steps > 0 else 0.0

    @property
    def has_slos(self) -> bool:
        """Return whether the request or any request on nodes has an SLO."""
        return self._wanted.due is not None or self._ledger.has_limits

    def on(self, node: Node) -> "NodeForecast":
        """Return the forecast for the request on this node, computed once."""
        if node not in self._nodes:
            coming = self._ledger.prefill_hashes(node)
            num_tokens = self._wanted.prompt.tokens_to_compute(node, coming) - self._num_fetched(node)
            self._nodes[node] = NodeForecast(node, self._ledger, self._wanted, num_tokens, self._now, self)
        return self._nodes[node]

    def begins_s(self, request: LiveRequest) -> float:
        """Return the seconds until the prompt of a sequence is prefilled, on whatever node; 0 if it is."""
        node = request.prefill_node
        return 0.0 if node is None else self.on(node).prefilled_s[id(request)]

    def least_begins_s(self, request: LiveRequest) -> float:
        """Return the seconds until the prompt of a sequence is prefilled if prompts got all of its node's time.

        0 if the prompt is prefilled.
        """
        node = request.prefill_node
        return 0.0 if node is None else self.on(node).least_prefilled_s[id(request)]


class _Sequence(NamedTuple):
    """A sequence on a decode node: seconds until it begins, its tokens to come, and seconds until the last one is due.

    `is_arriving`: another node prefills it, so it may have to wait for a chunk when it arrives.
    """

    begins_s: float
    num_left: int
    due_s: float
    is_arriving: bool = False


def _yet_to_begin(begins_s: float, num_left: int, tpot_s: float, is_arriving: bool) -> _Sequence:
    """Return a sequence with `num_left` tokens after its first. Without such tokens it cannot be late on the decode
    node."""
    return _Sequence(begins_s, num_left, begins_s + num_left * tpot_s if num_left else math.inf, is_arriving)


class NodeForecast:
    """Predict the SLO violations on one node, with and without one more request."""

    def __init__(
        self,
        node: Node,
        ledger: Ledger,
        wanted: Wanted,
        num_own_tokens: int,
        now: float,
        forecast: SloForecast,
    ) -> None:
        self._weights, self._chunk_tokens, self._now = node.step_weights, node.chunk_tokens, now
        self._decode_margin = node.decode_margin * wanted.tpot_margin
        self._begins_s, self._least_begins_s = forecast.begins_s, forecast.least_begins_s
        account = ledger.of(node)
        self._num_prompt_tokens = account.tokens_to_compute
        self._num_slots_lacking = account.num_sequences + 1 - node.usable.slots
        num_needed = len(wanted.prompt) - ledger.tokens_shared(node, wanted.prompt)
        self._num_tokens_lacking = ledger.tokens_taken(node) + num_needed - node.pool_tokens
        self._tokens_alone = partial(ledger.tokens_alone, node)
        self._steps_s = step_s(node, ledger), step_s(node, ledger, 1, len(wanted.prompt))
        parts = ledger.limited_parts(node)
        self._unprefilled = [each for each in parts if each[0].tokens_to_compute]
        num_unbegun = sum([part.is_decoded for part, _, _ in self._unprefilled])
        num_begin = round(STARTED_SHARE * num_unbegun)
        self._paces_s = step_s(node, ledger, num_begin), step_s(node, ledger, 1 + num_begin, len(wanted.prompt))
        self._decoded = [each for each in parts if each[0].is_decoded]
        self._jobs = [
            self._job(part.tokens_to_compute, due.token_s(request.num_output))
            for part, request, due in self._unprefilled
        ]
        self._each_s: dict[int, float] = {}  # seconds of a step, by its sequences
        self._paces: dict[int, PrefillPace] = {}  # by the number of additional sequences
        self._num_unlimited = account.num_sequences - account.num_unprefilled - (len(self._decoded) - num_unbegun)
        self._cached_each = (account.tokens_held + len(wanted.prompt)) / (account.num_sequences + 1)
        self._arrivals = wanted.arrivals
        self._num_ahead, self._num_spare = wanted.num_ahead, wanted.num_spare
        self._most_left = max([request.num_left for _, request, _ in self._decoded], default=0)
        self._own_num_left = wanted.num_expected - 1  # once its prompt is prefilled
        self._own = None if wanted.due is None else wanted.due.tpot_s
        own_due_s = math.inf if wanted.due is None else wanted.due.token_s(wanted.num_output)
        self._own_tokens = num_own_tokens
        self._own_job = self._job(self._own_tokens, own_due_s)

    @cached_property
    def late_by_prefill(self) -> int:
        """Return how many more requests miss their SLO if the node prefills the request's prompt."""
        num_late = self._late_sequences(num_prompt_tokens=self._own_tokens)
        return num_late + self._late_prompts([*self._jobs, self._own_job]) - self._num_late

    @cached_property
    def least_prefill_s(self) -> float:
        """Return the seconds until the request's prompt is prefilled, if prompts got all of the node's time.

        Prompts that are due earlier, and not late already, go first.
        """
        work_s = sum(each.seconds for each in self._jobs if 0 < each.due_s <= self._own_job.due_s)
        return work_s + self._own_job.seconds

    @property
    def own_due_s(self) -> float:
        """Return the seconds until the request's first token is due."""
        return self._own_job.due_s

    @cached_property
    def is_prefill_timely(self) -> bool:
        """Return whether the request's prompt is one of the most prompts that the node can prefill in time.

        A prompt that takes longer may have to give way to it. True without a deadline.
        """
        own = self._own_job
        return own.due_s == math.inf or not own.seconds or own in self._timely_prompts([*self._jobs, own])

    @cached_property
    def displaces_prompt(self) -> bool:
        """Return whether a prompt that takes longer gives way to the request's prompt.

        The node then has as many prompts in time as without it, and more time for those to come.
        """
        with_own, others = self._timely_prompts([*self._jobs, self._own_job]), self._timely_prompts(self._jobs)
        is_shorter = sum(each.seconds for each in with_own) < sum(each.seconds for each in others)
        return self.is_prefill_timely and len(with_own) <= len(others) and is_shorter

    @property
    def is_own_late(self) -> bool:
        """Return whether the request's first token would be late even if prompts got all of the node's time."""
        return self.least_prefill_s > self._own_job.due_s

    def late_by_decode(self, waits_s: float, begins_s: float = 0.0, transfer_s: float = 0.0) -> int:
        """Return how many more requests miss their SLO if the node decodes the sequence, and another one prefills it.

        That takes `begins_s` seconds, the sequence waits `waits_s` seconds for credit, and its first decode step begins
        `transfer_s` seconds after that.
        """
        own = self._own_sequence(max(waits_s, begins_s), is_arriving=True)
        own = own._replace(due_s=own.due_s - transfer_s)
        is_late = self._own is not None and self._own < math.inf and waits_s > begins_s
        if is_late:
            own = own._replace(due_s=math.inf)  # it counts only once
        num_more = self._late_sequences(own) + is_late - self._num_late_sequences
        # A sequence that becomes late leaves prompts more time, but that is no gain.
        return num_more + max(0, self._late_prompts(self._jobs, 1) - self._num_late_prompts)

    def late_by_both(self, waits_s: float) -> int:
        """Return how many more requests miss their SLO if the node prefills and decodes the request.

        The request waits `waits_s` seconds for blocks before its prefill.
        """
        num_late = self._late_sequences(self._own_sequence(waits_s + self.own_begins_s), self._own_tokens)
        own = self._own_job._replace(due_s=self._own_job.due_s - waits_s)
        return num_late + self._late_prompts([*self._jobs, own]) - self._num_late

    @cached_property
    def own_begins_s(self) -> float:
        """Return the seconds until the node has prefilled the request's prompt, after those that are due before it."""
        work_s = sum(each.seconds for each in self._jobs if each.due_s <= self._own_job.due_s)
        return self._pace(0).seconds(work_s + self._own_job.seconds)

    @property
    def own_prefill_s(self) -> float:
        """Return the seconds to prefill the request's prompt beside the node's sequences, with no other prompt."""
        return self._pace(0).seconds(self._own_job.seconds)

    @property
    def is_beyond(self) -> bool:
        """Return whether the request's SLO on TPOT is shorter than a step of its sequence alone takes."""
        return self._own is not None and self._own < self._step_s(1)

    @cached_property
    def least_prefilled_s(self) -> dict[int, float]:
        """Return the seconds until each prompt of the node is prefilled if prompts got all of its time, by request.

        The key is the id() of the request.
        """
        work_s, prefilled_s = 0.0, {}
        for job, (_, request, _) in sorted(
            zip(self._jobs, self._unprefilled, strict=True), key=lambda pair: pair[0].due_s
        ):
            work_s += job.seconds
            prefilled_s[id(request)] = work_s
        return prefilled_s

    @cached_property
    def prefilled_s(self) -> dict[int, float]:
        """Return the seconds until each prompt of the node is prefilled beside its sequences, by request.

        The key is the id() of the request.
        """
        pace = self._pace(0)
        return {request: pace.seconds(work_s) for request, work_s in self.least_prefilled_s.items()}

    def num_lost(self, num_others: int) -> int:
        """Return how many requests to come lose their prefill if the node decodes the sequence.

        These are the prompts that the node would prefill in the time that the sequence takes. Prompts count at the
        recent rate of arrivals, and at most as many as `num_others` nodes like this one can decode.
        """
        each_s = self._weights.of_chunk(0, round(self._arrivals.num_tokens), is_first=False)
        if not each_s:
            return 0
        most = num_others * self._weights.num_sequences_within(self._tightest_s, self._cached_each)
        num_decoded_per_s = self._arrivals.per_s * min(1.0, most / max(1.0, self._num_to_come))
        wanted = min(1.0, num_decoded_per_s * each_s)  # share of the node's time
        own_s = math.inf if self._own is None else self._own
        alone = self._pace_beside(self._step_s(1), self._own_num_left, own_s).share
        num_beside = min(self._own_num_left, self._most_left)
        num_steps = num_beside * (min(wanted, self._pace(0).share) - min(wanted, self._pace(1).share))
        num_steps += (self._own_num_left - num_beside) * (wanted - min(wanted, alone))
        return max(0, int(num_steps * self._lasting_step_s / each_s))

    @cached_property
    def lasting_begins_s(self) -> float:
        """Return the seconds until the request's prompt is prefilled beside all sequences that are expected to come."""
        each_s = self._step_s(max(1, len(self._decoded), round(self._num_to_come)))
        share = 1 - each_s / self._tightest_s if self._tightest_s < math.inf else self._chunk_share(each_s)
        return max(self.own_begins_s, self._own_job.seconds / max(PROMPT_TIME_SHARE, share))

    @property
    def _num_to_come(self) -> float:
        """Return how many of the sequences that are expected decode at a time."""
        return self._arrivals.per_s * self._arrivals.num_output * self._lasting_step_s

    @property
    def _lasting_step_s(self) -> float:
        """Return the seconds of the steps that prompts fill: the tightest limit on TPOT, or a step of one sequence."""
        return self._tightest_s if self._tightest_s < math.inf else self._step_s(1)

    def tpot_ratio(self, begins_s: float) -> float:
        """Return the decode step that is rarely exceeded, as a multiple of the tightest attainable SLO on TPOT.

        The step is the longest while the sequence decodes, which begins in `begins_s` seconds at the earliest. Returns
        0 without SLOs on TPOT. Sequences that have not begun count from the earliest end of their prefill, and all of
        them until they end in steps of that limit. A result of at most 1 may be that of all sequences at once, an upper
        bound.
        """
        limit_s = self._tightest_s
        if limit_s == math.inf:
            return 0.0
        num_others = self._num_unlimited + 1 + self._num_spare
        ratio = self._decode_margin * self._step_s(num_others + len(self._decoded)) / limit_s
        if ratio <= 1:
            return ratio  # even if all decoded at once
        return self._decode_margin * self._step_s(num_others + self._most_beside(begins_s, limit_s)) / limit_s

    @cached_property
    def _tightest_s(self) -> float:
        """Return the tightest SLO on TPOT, the request's included, that a step of one sequence attains; inf without
        one."""
        limits_s = [due.tpot_s for _, _, due in self._decoded] + ([] if self._own is None else [self._own])
        alone_s = self._step_s(1)
        return min([each for each in limits_s if each >= alone_s], default=math.inf)

    def num_late_beside(self, begins_s: float) -> int:
        """Return how many sequences of the node, this one included, miss their SLO on TPOT.

        This one begins in `begins_s` seconds. A sequence misses its SLO if its last token is late.
        """
        return self._late_sequences(self._own_sequence(begins_s))

    def _most_beside(self, begins_s: float, each_s: float) -> int:
        """Return the most sequences with an SLO that decode at any time beside one that begins then, in steps of
        `each_s`."""
        ends_s = begins_s + self._own_num_left * each_s
        moments = []
        for _, request, _ in self._decoded:
            from_s = 0.0 if request.num_output else self._least_begins_s(request)
            until_s = from_s + request.num_left * each_s
            if from_s < ends_s and until_s > begins_s:
                moments += [(max(from_s, begins_s), 1), (until_s, -1)]
        most = num_now = 0
        for _, change in sorted(moments):
            num_now += change
            most = max(most, num_now)
        return most

    def prefill_wait_s(self) -> float:
        """Return the seconds to wait until the prompt could be prefilled in time, behind all that the node has."""
        work_s = sum(each.seconds for each in self._jobs if each.due_s < math.inf) + self._own_job.seconds
        return max(0.0, self._pace(0).seconds(work_s) - self._own_job.due_s)

    def decode_wait_s(self) -> float:
        """Return the seconds until running slots are free for the sequence and for those deferred before it.

        Slots become free as running sequences with an SLO end; where these are fewer, the last of them counts. 0
        without such sequences.
        """
        nums_left = sorted([request.num_left for _, request, _ in self._decoded if request.num_output])
        return self._steps_s[0] * nums_left[min(self._num_ahead, len(nums_left) - 1)] if nums_left else 0.0

    @cached_property
    def room_s(self) -> float:
        """Return the seconds until the node has a running slot and blocks for one more sequence; 0 where it has.

        The end of sequences without an SLO is unknown: the prediction goes as far as the last of the others.
        """
        num_slots, num_tokens = self._num_slots_lacking, self._num_tokens_lacking
        if num_slots <= 0 and num_tokens <= 0:
            return 0.0
        num_left = 0
        for part, request, _ in sorted(self._decoded, key=lambda each: each[1].num_left):
            if num_slots <= 0 and num_tokens <= 0:
                break
            num_slots, num_tokens = num_slots - 1, num_tokens - self._tokens_alone(part)
            num_left = request.num_left
        return num_left * self._steps_s[0]

    def _job(self, num_tokens: int, due_s: float) -> Job:
        if not num_tokens:
            return Job(0.0, due_s - self._now)
        weights = self._weights
        seconds = weights.of_prompt(0, num_tokens, max(1, self._chunk_tokens), weights.step_s)
        return Job(seconds, due_s - self._now)

    @property
    def _num_late(self) -> int:
        return self._num_late_sequences + self._num_late_prompts

    @cached_property
    def _num_late_sequences(self) -> int:
        return self._late_sequences()

    @cached_property
    def _num_late_prompts(self) -> int:
        return self._late_prompts(self._jobs)

    @cached_property
    def _not_begun(self) -> list[LimitedPart]:
        """Return the sequences without a first token, or whose first token's time is unknown."""
        return [each for each in self._decoded if not each[1].num_output or each[2].began_s is None]

    @cached_property
    def _lost_and_slowest_s(self) -> tuple[int, float]:
        """Return how many sequences that have begun are late even alone, and the slowest steps in which no other is.

        The seconds are inf without another one. They decide at little cost that none becomes late, the usual case.
        """
        now, alone_s = self._now, self._decode_margin * self._step_s(self._num_unlimited + 1)
        paces_s = [
            (began_s + (request.num_output + (num_left := request.num_left) - 1) * due.tpot_s - now) / num_left
            for _, request, due in self._decoded
            if request.num_output and (began_s := due.began_s) is not None
        ]
        slowest_s = [each for each in paces_s if each >= alone_s]
        return len(paces_s) - len(slowest_s), min(slowest_s, default=math.inf)

    @cached_property
    def _sequences(self) -> list[_Sequence]:
        return [self._sequence(each) for each in self._decoded]

    def _sequence(self, limited: LimitedPart) -> _Sequence:
        part, request, due = limited
        num_left = request.num_left
        if request.num_output and due.began_s is not None:
            last = request.num_output + num_left - 1
            return _Sequence(0.0, num_left, due.began_s + last * due.tpot_s - self._now)
        return _yet_to_begin(self._begins_s(request), num_left - 1, due.tpot_s, part.is_arriving)

    def _own_sequence(self, begins_s: float, *, is_arriving: bool = False) -> _Sequence:
        return _yet_to_begin(begins_s, self._own_num_left, math.inf if self._own is None else self._own, is_arriving)

    def _late_sequences(self, own: _Sequence | None = None, num_prompt_tokens: int = 0) -> int:
        """Return how many sequences of the node miss their SLO, with `own` and `num_prompt_tokens` more tokens to
        prefill.

        A sequence is late if its last token is, in steps of all sequences that decode at the same time.
        """
        chunk_s, num_late = self._longest_chunk_s(num_prompt_tokens), 0
        num_sequences = len(self._decoded) + (own is not None)
        longest_s = self._step_s(self._num_unlimited + num_sequences)

        def is_late(sequence: _Sequence, elapsed_s: float) -> bool:
            elapsed_s = self._decode_margin * elapsed_s + sequence.is_arriving * chunk_s
            return elapsed_s > sequence.due_s - sequence.begins_s

        num_lost, slowest_s = self._lost_and_slowest_s
        if self._decode_margin * longest_s < slowest_s:
            others = [self._sequence(each) for each in self._not_begun] + ([] if own is None else [own])
            if not any(is_late(each, each.num_left * longest_s) for each in others):
                return num_lost  # no other is late even if all decoded until the last one ends
        sequences = sorted([*self._sequences, own] if own is not None else self._sequences)
        now_s, num_steps, place = 0.0, 0.0, 0
        running: list[tuple[float, _Sequence]] = []  # by the number of steps at its end
        while place < len(sequences) or running:
            each_s = self._step_s(self._num_unlimited + len(running))
            ends_s = now_s + (running[0][0] - num_steps) * each_s if running else math.inf
            if place < len(sequences) and sequences[place].begins_s <= ends_s:
                begins_s = sequences[place].begins_s
                if running and each_s > 0:
                    num_steps += (begins_s - now_s) / each_s
                now_s = begins_s
                heappush(running, (num_steps + sequences[place].num_left, sequences[place]))
                place += 1
            else:
                now_s = ends_s
                num_steps, ended = heappop(running)
                num_late += is_late(ended, now_s - ended.begins_s)
        return num_late

    def _step_s(self, num_sequences: int) -> float:
        if num_sequences not in self._each_s:
            load = StepLoad(num_sequences, round(num_sequences * self._cached_each))
            self._each_s[num_sequences] = self._weights.of_step(load)
        return self._each_s[num_sequences]

    def _longest_chunk_s(self, num_more_tokens: int) -> float:
        """Return the seconds of the longest prefill chunk, which running sequences limit to the tightest TPOT."""
        num_tokens = min(self._num_prompt_tokens + num_more_tokens, self._chunk_tokens)
        chunk_s = self._weights.of_chunk(0, num_tokens, is_first=True) if num_tokens else 0.0
        return min(chunk_s, self._tightest_begun_s)

    @cached_property
    def _tightest_begun_s(self) -> float:
        """Return the tightest SLO on TPOT of the sequences that have a token; inf without one."""
        return min([due.tpot_s for _, request, due in self._decoded if request.num_output], default=math.inf)

    def _late_prompts(self, jobs: list[Job], num_more: int = 0) -> int:
        due = [each for each in jobs if each.seconds and each.due_s < math.inf]
        return len(due) - len(self._timely_prompts(due, num_more))

    def _timely_prompts(self, jobs: list[Job], num_more: int = 0) -> list[Job]:
        """Return the most of the prompts with a deadline that can be in time."""
        due = [each for each in jobs if each.seconds and each.due_s < math.inf]
        if not due:
            return []
        pace = self._pace(num_more)
        found = timely([each.seconds for each in due], [pace.work_s(each.due_s) for each in due])
        return [due[index] for index in found]

    def _pace(self, num_more: int) -> PrefillPace:
        """Return the progress of prompts beside the node's sequences and `num_more` more."""
        if num_more not in self._paces:
            num_left = max(self._most_left, self._own_num_left if num_more else 0)
            own_s = self._own if num_more and self._own is not None else math.inf
            self._paces[num_more] = self._pace_beside(self._paces_s[num_more], num_left, own_s)
        return self._paces[num_more]

    def _pace_beside(self, step_s: float, num_left: int, own_s: float) -> PrefillPace:
        """Return the progress of prompts beside sequences with steps of `step_s`, the longest of which has `num_left`
        tokens.

        `own_s` is the SLO on TPOT of one more sequence that begins now; inf for none.
        """
        if not step_s:
            return PrefillPace(math.inf, 1.0)
        share = self._chunk_share(step_s)
        own_s = own_s if own_s >= step_s else math.inf
        tightest_s = min([own_s, *[due.tpot_s for _, _, due in self._decoded if due.tpot_s >= step_s]])
        if tightest_s == math.inf:
            return PrefillPace(0.0, share)
        next_s = min([own_s, *[next_s for tpot_s, next_s in self._next_s if tpot_s >= step_s]])
        bank_s = (next_s if next_s < math.inf else 0.0) - step_s
        share = max(PROMPT_TIME_SHARE, min(share, 1 - step_s / tightest_s))
        return PrefillPace(max(0.0, bank_s), share, num_left * step_s)

    def _chunk_share(self, step_s: float) -> float:
        """Return the share of the time that prompts get with a whole chunk in each step of `step_s`."""
        chunk_s = self._weights.of_chunk(0, self._chunk_tokens, is_first=True)
        return chunk_s / (chunk_s + step_s) if chunk_s else 1.0

    @cached_property
    def _next_s(self) -> list[tuple[float, float]]:
        """Return, for each sequence, its SLO on TPOT and the seconds until its next token on this node is due.

        A sequence that another node prefills arrives with its first token. A sequence whose first token is overdue is
        left out: its prompt is prefilled after those that can be in time.
        """
        now = self._now
        next_s = [
            (due.tpot_s, began_s + request.num_output * due.tpot_s - now)
            for _, request, due in self._decoded
            if request.num_output and (began_s := due.began_s) is not None
        ]
        for part, request, due in self._not_begun:
            if request.num_output:
                next_s.append((due.tpot_s, due.token_s(request.num_output) - now))
            elif due.first_s > now:
                arrives_s = self._least_begins_s(request) + due.tpot_s
                next_s.append((due.tpot_s, arrives_s if part.is_arriving else due.first_s - now))
        return next_s
