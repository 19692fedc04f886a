"""The half that turns prompts into KV: which tokens of which prompt the next step computes. No I/O, no clock.

Oldest first, or as limits and priorities ask for it (prefill_node/order.py), by token budget: a step takes tokens of
the prompts that are being read until the budget is spent, so a long prompt goes through in chunks and several short
ones share a step; beside answers with limits time is a budget too (prefill_node/slack.py). A prompt starts only when
the pool has blocks for all of it, so whatever is being read can always finish.

A prompt starts with the leading blocks that an earlier one left in the pool, or one that is being read has published,
and computes the rest: it does not start beside a prompt that computes what it begins with, but behind that. It always
computes its last token where its logits choose the next one, or its hidden state is the prompt's
embedding, and all of it where it is to be scored, or a mean. It publishes its own full blocks step by step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from prefill_node.order import Order
from prefill_node.slack import Slack
from serving_core import reasons
from serving_core.costs import StepCosts, StepLoad
from serving_core.errors import RequestError
from serving_core.leases import Leases
from serving_core.requests import MEAN, Work
from serving_core.residents import Resident, Residents, Stage

MAX_SCORED_TOKENS: Final = 256  # of one step: the logits of each are held at once
SHARED: Final = 1 / 8  # of a step's tokens: for fewer that it would find behind that step a prompt does not wait
MAX_PASSED: Final = 64  # prompts that a step passes over for that: each is to be compared


@dataclass(slots=True)
class _Step:
    """One that is planned, with the chunks so far."""

    budget: int  # tokens that are left
    least_shared: int  # tokens that a prompt waits for, of one that begins alike
    num_scorable: int = MAX_SCORED_TOKENS  # tokens that are left
    num_passable: int = MAX_PASSED  # prompts
    held_up_from: float = math.inf  # the age from which on no prompt starts
    works: list[Work] = field(default_factory=list)


class Reading:
    """The prompts of one node."""

    def __init__(
        self,
        residents: Residents,
        leases: Leases,
        costs: StepCosts,
        *,
        max_num_queued: int,
        fit: Callable[[Resident, int], int] = lambda _, num_tokens: num_tokens,
    ) -> None:
        """`fit` tells of a prompt that has hosts how many of so many tokens it has blocks for."""
        self._fit = fit
        self._residents = residents
        self._leases = leases
        self._slack, self._order = Slack(costs), Order(costs, self._num_held)
        self._max_num_queued = max_num_queued
        self.num_prompt_tokens = 0  # of all prompts that ever started
        self.num_cached_tokens = 0  # of them, those that were not to be computed

    def check(self, num_tokens: int, *, may_grow_out: bool = False) -> None:
        """Raises RequestError when the queue is full, or a prompt of so many tokens can never fit, unless it
        `may_grow_out` of the pool."""
        num_blocks = self._leases.blocks_for(num_tokens)
        if num_blocks > self._leases.num_blocks and not may_grow_out:
            raise RequestError(
                reasons.PROMPT_TOO_LONG,
                f"the prompt needs {num_blocks} KV blocks, the prefill node has {self._leases.num_blocks}",
            )
        if self._residents.count(Stage.QUEUED) >= self._max_num_queued:
            raise RequestError(reasons.QUEUE_FULL, f"the prefill queue holds its {self._max_num_queued} requests")

    def plan(
        self,
        budget: int,
        may_start: Callable[[Resident], bool],
        start: Callable[[Resident], bool],
        answers: Sequence[Resident],
        now: float,
    ) -> list[Work]:
        """Chunks of at most `budget` tokens in all, and no more than the answers of the step leave time for. `start`
        gives a prompt its blocks if there are enough; if not, it holds up the younger ones that have none either. One
        that may not start is passed over. `took` is to follow when the step is done."""
        prompts = [each for each in self._residents.in_stage(Stage.QUEUED, Stage.READING) if not each.is_ending]
        self._slack.begin(answers, prompts, now)
        step = _Step(budget, least_shared=max(self._leases.block_size, int(budget * SHARED)))
        for resident in self._order.of(prompts, now, lambda: self._slack.pace(budget)):
            if step.budget == 0 or step.num_passable == 0:
                break
            if resident.stage is Stage.READING or self._starts(resident, step, may_start, start):
                self._add_chunk(resident, step)
        self._order.took(step.works)
        return step.works

    def _starts(
        self,
        resident: Resident,
        step: _Step,
        may_start: Callable[[Resident], bool],
        start: Callable[[Resident], bool],
    ) -> bool:
        """Whether a prompt that waits is read from this step on."""
        if resident.age > step.held_up_from:
            return False
        if self._is_computed(resident, step):
            step.num_passable -= 1
            return False
        if not may_start(resident):
            return False
        if not start(resident):
            step.held_up_from = min(step.held_up_from, resident.age)
            return False
        self._begin(resident)
        return True

    def _add_chunk(self, resident: Resident, step: _Step) -> None:
        """What the step has room and time for of a prompt; where that is too little time, nothing follows it."""
        is_scored = resident.request.is_scored
        num_asked = min(step.budget, resident.num_to_compute, step.num_scorable if is_scored else step.budget)
        if resident.hosts and (num_asked := self._fit(resident, num_asked)) == 0:
            return
        num_tokens = self._slack.afford(resident, num_asked) if num_asked else 0
        step.num_scorable -= num_tokens * is_scored
        if num_tokens:
            step.works.append(resident.work(num_tokens))
        step.budget = step.budget - num_tokens if num_tokens == num_asked else 0

    def took(self, load: StepLoad, step_s: float, now: float | None = None) -> None:
        """What a step has taken that is done now, or when it had computed, whatever it was of."""
        self._slack.took(load, step_s, now)

    def start(self, resident: Resident, *, num_spare: int) -> bool:
        """Gives a prompt the blocks for all of it, if that leaves num_spare free. Tells whether it did."""
        return self._leases.take(
            resident, self.tokens_to_hold(resident), num_cacheable=num_cacheable(resident), num_spare=num_spare
        )

    def num_needed(self, resident: Resident) -> int:
        """Free blocks that the start of a prompt takes."""
        return self._leases.num_needed(resident, self.tokens_to_hold(resident), num_cacheable=num_cacheable(resident))

    def tokens_to_hold(self, resident: Resident) -> int:
        """Tokens that a prompt gets blocks for: with a new one that is answered here, the first of the answer. One that
        has hosts gets more as it goes."""
        if resident.hosts:
            return 1
        return resident.num_given if resident.hands_over else len(resident.request.token_ids) + resident.computes_prompt

    def _is_computed(self, resident: Resident, step: _Step) -> bool:
        """Whether a planned step computes enough of the prompt's tokens for another one that begins alike."""
        least = step.least_shared
        return any(
            work.num_tokens >= least
            and self._shares(resident, self._residents.of(work.request), work.start, work.start + least)
            for work in step.works
        )

    def _shares(self, resident: Resident, other: Resident, start: int, end: int) -> bool:
        """Whether a prompt will find the tokens of another one up to `end`, and lacks those from `start` on."""
        tokens, others = resident.request.token_ids, other.request.token_ids
        return (
            end <= num_cacheable(resident)
            and tokens[start:end] == others[start:end]  # which tells most apart at their first token
            and tokens[:start] == others[:start]
            and self._leases.may_share(resident, other)
            and self._num_held(resident) <= start
        )

    def take_hopeless(self) -> Sequence[Resident]:
        """Return, once, the prompts that the last plan has left out, since they are to be refused."""
        return self._order.take_hopeless()

    @property
    def decode_margin(self) -> float:
        """Return what the mean of steps without prompts rarely exceeds, by the expected one."""
        return self._slack.decode_margin

    @property
    def oldest_age(self) -> float:
        """Of the prompts that are here; inf where there is none."""
        return next((each.age for each in self._residents.in_stage(Stage.QUEUED, Stage.READING)), math.inf)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of prompts still to be computed, as far as one can tell before a prompt starts."""
        return sum(
            each.num_to_compute if each.lease is not None else each.num_to_compute - self._num_held(each)
            for each in self._residents.in_stage(Stage.QUEUED, Stage.READING)
        )

    def _num_held(self, resident: Resident) -> int:
        return self._leases.num_held_tokens(resident, num_cacheable(resident))

    def _begin(self, resident: Resident) -> None:
        self._residents.enter(resident, Stage.READING)
        resident.has_looked = False
        self.count(resident)

    def count(self, resident: Resident) -> None:
        """Counts a prompt that has got its blocks; once, however often it begins."""
        if not resident.has_begun:
            resident.has_begun = True
            self.num_prompt_tokens += resident.num_given
            self.num_cached_tokens += self._leases.num_cached_tokens(resident)


def num_cacheable(resident: Resident) -> int:
    """Leading tokens of a prompt that need not be computed if they are there. Where a token is sampled in the end, the
    last one is in any case: its logits choose it. So are those whose logits are yet to score the next one, and all of
    which the mean is wanted."""
    request = resident.request
    if request.pooling is not None and request.pooling.kind == MEAN:
        return 0
    if request.is_scored:
        return len(request.scores)
    if resident.hands_over:
        return resident.num_given - (not resident.has_first_token)
    return len(request.token_ids) - 1
