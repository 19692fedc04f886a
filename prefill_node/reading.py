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
from serving_core.node_requests import NodeRequest, NodeRequests, Stage
from serving_core.requests import MEAN, Work

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
        node_requests: NodeRequests,
        leases: Leases,
        costs: StepCosts,
        *,
        max_num_queued: int,
        fit: Callable[[NodeRequest, int], int] = lambda _, num_tokens: num_tokens,
    ) -> None:
        """`fit` tells of a prompt that has hosts how many of so many tokens it has blocks for."""
        self._fit = fit
        self._node_requests = node_requests
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
        if self._node_requests.count(Stage.QUEUED) >= self._max_num_queued:
            raise RequestError(reasons.QUEUE_FULL, f"the prefill queue holds its {self._max_num_queued} requests")

    def plan(
        self,
        budget: int,
        may_start: Callable[[NodeRequest], bool],
        start: Callable[[NodeRequest], bool],
        answers: Sequence[NodeRequest],
        now: float,
    ) -> list[Work]:
        """Chunks of at most `budget` tokens in all, and no more than the answers of the step leave time for. `start`
        gives a prompt its blocks if there are enough; if not, it holds up the younger ones that have none either. One
        that may not start is passed over. `took` is to follow when the step is done."""
        prompts = [each for each in self._node_requests.in_stage(Stage.QUEUED, Stage.READING) if not each.is_ending]
        self._slack.begin(answers, prompts, now)
        step = _Step(budget, least_shared=max(self._leases.block_size, int(budget * SHARED)))
        for node_request in self._order.of(prompts, now, lambda: self._slack.pace(budget)):
            if step.budget == 0 or step.num_passable == 0:
                break
            if node_request.stage is Stage.READING or self._starts(node_request, step, may_start, start):
                self._add_chunk(node_request, step)
        self._order.took(step.works)
        return step.works

    def _starts(
        self,
        node_request: NodeRequest,
        step: _Step,
        may_start: Callable[[NodeRequest], bool],
        start: Callable[[NodeRequest], bool],
    ) -> bool:
        """Whether a prompt that waits is read from this step on."""
        if node_request.age > step.held_up_from:
            return False
        if self._is_computed(node_request, step):
            step.num_passable -= 1
            return False
        if not may_start(node_request):
            return False
        if not start(node_request):
            step.held_up_from = min(step.held_up_from, node_request.age)
            return False
        self._begin(node_request)
        return True

    def _add_chunk(self, node_request: NodeRequest, step: _Step) -> None:
        """What the step has room and time for of a prompt; where that is too little time, nothing follows it."""
        is_scored = node_request.request.is_scored
        num_asked = min(step.budget, node_request.num_to_compute, step.num_scorable if is_scored else step.budget)
        if node_request.hosts and (num_asked := self._fit(node_request, num_asked)) == 0:
            return
        num_tokens = self._slack.afford(node_request, num_asked) if num_asked else 0
        step.num_scorable -= num_tokens * is_scored
        if num_tokens:
            step.works.append(node_request.work(num_tokens))
        step.budget = step.budget - num_tokens if num_tokens == num_asked else 0

    def took(self, load: StepLoad, step_s: float, now: float | None = None) -> None:
        """What a step has taken that is done now, or when it had computed, whatever it was of."""
        self._slack.took(load, step_s, now)

    def start(self, node_request: NodeRequest, *, num_spare: int) -> bool:
        """Gives a prompt the blocks for all of it, if that leaves num_spare free. Tells whether it did."""
        return self._leases.take(
            node_request,
            self.tokens_to_hold(node_request),
            num_cacheable=num_cacheable(node_request),
            num_spare=num_spare,
        )

    def num_needed(self, node_request: NodeRequest) -> int:
        """Free blocks that the start of a prompt takes."""
        return self._leases.num_needed(
            node_request, self.tokens_to_hold(node_request), num_cacheable=num_cacheable(node_request)
        )

    def tokens_to_hold(self, node_request: NodeRequest) -> int:
        """Tokens that a prompt gets blocks for: with a new one that is answered here, the first of the answer. One that
        has hosts gets more as it goes."""
        if node_request.hosts:
            return 1
        return (
            node_request.num_given
            if node_request.hands_over
            else len(node_request.request.token_ids) + node_request.computes_prompt
        )

    def _is_computed(self, node_request: NodeRequest, step: _Step) -> bool:
        """Whether a planned step computes enough of the prompt's tokens for another one that begins alike."""
        least = step.least_shared
        return any(
            work.num_tokens >= least
            and self._shares(node_request, self._node_requests.of(work.request), work.start, work.start + least)
            for work in step.works
        )

    def _shares(self, node_request: NodeRequest, other: NodeRequest, start: int, end: int) -> bool:
        """Whether a prompt will find the tokens of another one up to `end`, and lacks those from `start` on."""
        tokens, others = node_request.request.token_ids, other.request.token_ids
        return (
            end <= num_cacheable(node_request)
            and tokens[start:end] == others[start:end]  # which tells most apart at their first token
            and tokens[:start] == others[:start]
            and self._leases.may_share(node_request, other)
            and self._num_held(node_request) <= start
        )

    def take_hopeless(self) -> Sequence[NodeRequest]:
        """Return, once, the prompts that the last plan has left out, since they are to be refused."""
        return self._order.take_hopeless()

    @property
    def decode_margin(self) -> float:
        """Return what the mean of steps without prompts rarely exceeds, by the expected one."""
        return self._slack.decode_margin

    @property
    def oldest_age(self) -> float:
        """Of the prompts that are here; inf where there is none."""
        return next((each.age for each in self._node_requests.in_stage(Stage.QUEUED, Stage.READING)), math.inf)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of prompts still to be computed, as far as one can tell before a prompt starts."""
        return sum(
            each.num_to_compute if each.lease is not None else each.num_to_compute - self._num_held(each)
            for each in self._node_requests.in_stage(Stage.QUEUED, Stage.READING)
        )

    def _num_held(self, node_request: NodeRequest) -> int:
        return self._leases.num_held_tokens(node_request, num_cacheable(node_request))

    def _begin(self, node_request: NodeRequest) -> None:
        self._node_requests.enter(node_request, Stage.READING)
        node_request.has_looked = False
        self.count(node_request)

    def count(self, node_request: NodeRequest) -> None:
        """Counts a prompt that has got its blocks; once, however often it begins."""
        if not node_request.has_begun:
            node_request.has_begun = True
            self.num_prompt_tokens += node_request.num_given
            self.num_cached_tokens += self._leases.num_cached_tokens(node_request)


def num_cacheable(node_request: NodeRequest) -> int:
    """Leading tokens of a prompt that need not be computed if they are there. Where a token is sampled in the end, the
    last one is in any case: its logits choose it. So are those whose logits are yet to score the next one, and all of
    which the mean is wanted."""
    request = node_request.request
    if request.pooling is not None and request.pooling.kind == MEAN:
        return 0
    if request.is_scored:
        return len(request.scores)
    if node_request.hands_over:
        return node_request.num_given - (not node_request.has_first_token)
    return len(request.token_ids) - 1
