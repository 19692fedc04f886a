"""Schedule prefill: which tokens of which prompt the next step computes. No I/O, no clock.

A step takes tokens of prompts until its token budget is spent, so a long prompt is computed in chunks and several short
prompts share a step. Beside sequences with a TPOT limit, time is a budget too (prefill_node/chunk_budget.py). A prompt
starts only when the pool has blocks for all of it, so every started prompt can finish.

A prompt starts with the leading blocks that are in the prefix cache and computes the rest. It does not start beside a
prompt that computes the same beginning, but after that prompt. It always computes its last token if a token is sampled
from the logits or if the hidden state is the prompt's embedding. It computes all tokens if the prompt is scored or a
mean is pooled. It publishes its own full blocks step by step.

The order is oldest first without deadlines and priorities. Of the prompts with a deadline, as many as can be in time
come first, earliest deadline first. If a prompt would be late, the longest prompt chosen up to there steps back
(Moore-Hodgson algorithm: no order has more jobs in time). A prompt counts as in time if it would be even with step
times at their upper margin (serving_core/slo.py). No prompt steps back for a prompt of lower priority: the number in
time is maximized for the highest priority, then for the next priority in the remaining time, and so on. Behind them
come the prompts without a deadline and the prompts that would be late, by priority, then by age.

Those last prompts have a floor: their oldest prompt earns a share of all tokens computed before it. When the share
reaches the tokens that the prompt lacks, the prompt comes first, whatever its priority. So no prompt starves, and short
bursts keep their order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from prefill_node.chunk_budget import ChunkBudget, StepPace, due_s
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.node.costs import StepCosts
from serving_core.node.leases import Leases
from serving_core.node.requests import NodeRequest, NodeRequests, RequestEvent, RequestState, fit_all
from serving_core.requests import MEAN, Request, Work
from serving_core.slo import timely

MAX_SCORED_TOKENS: Final = 256  # in one step: the logits of all of them are in memory at once
SHARED: Final = 1 / 8  # of a step's tokens: a prompt does not wait for fewer shared tokens
MAX_PASSED: Final = 64  # prompts that a step passes over to share tokens; bounds the comparisons


@dataclass(slots=True)
class _Step:
    """Hold the planned step with its chunks."""

    budget: int  # prompt tokens that are left
    least_shared: int  # shared tokens for which a prompt waits behind another prompt
    num_scorable: int = MAX_SCORED_TOKENS  # scored tokens that are left
    num_passable: int = MAX_PASSED  # prompts
    held_up_from: float = math.inf  # requests with a higher age number do not start
    works: list[Work] = field(default_factory=list)


class PrefillScheduler:
    """Schedules the prompts of one node."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        costs: StepCosts,
        *,
        max_num_queued: int,
        fit: Callable[[NodeRequest, int], int] = fit_all,
    ) -> None:
        """Create the scheduler.

        `fit(request, num_tokens)` returns for a request with distributed KV how many of the tokens have blocks.
        """
        self._fit = fit
        self._node_requests = node_requests
        self._leases = leases
        self.chunk_budget, self._order = ChunkBudget(costs), PromptOrder(costs, self._num_held)
        self._max_num_queued = max_num_queued
        self.num_prompt_tokens = 0  # of all started prompts
        self.num_cached_tokens = 0  # of `num_prompt_tokens`, taken from the prefix cache

    def check(self, num_tokens: int, *, may_grow_out: bool = False) -> None:
        """Raise RequestError if the queue is full or a prompt of `num_tokens` can never fit into the pool.

        With `may_grow_out` the prompt may exceed the pool, as with distributed KV.
        """
        num_blocks = self._leases.blocks_for(num_tokens)
        if num_blocks > self._leases.num_blocks and not may_grow_out:
            raise RequestError(
                reasons.PROMPT_TOO_LONG,
                f"the prompt needs {num_blocks} KV blocks, the prefill node has {self._leases.num_blocks}",
            )
        if self._node_requests.count(RequestState.WAITING) >= self._max_num_queued:
            raise RequestError(reasons.QUEUE_FULL, f"the prefill queue holds its {self._max_num_queued} requests")

    def plan(
        self,
        budget: int,
        may_start: Callable[[NodeRequest], bool],
        start: Callable[[NodeRequest], bool],
        running: Sequence[NodeRequest],
        now: float,
    ) -> list[Work]:
        """Return the chunks of prompts in the next step, at most `budget` tokens in total.

        The sequences in `running`, which get a token in the step, limit its time. `may_start` tells whether a waiting
        prompt may start; if not, it is passed over. `start` allocates the blocks of a prompt and returns whether there
        were enough; if not, younger prompts without blocks wait too. The caller must call `chunk_budget.record_step`
        when the step is done.
        """
        prompts = [
            each
            for each in self._node_requests.in_state(RequestState.WAITING, RequestState.PREFILLING)
            if not each.is_ending
        ]
        self.chunk_budget.begin(running, prompts, now)
        step = _Step(budget, least_shared=max(self._leases.block_size, int(budget * SHARED)))
        for node_request in self._order.of(prompts, now, lambda: self.chunk_budget.pace(budget)):
            if step.budget == 0 or step.num_passable == 0:
                break
            if node_request.state is RequestState.PREFILLING or self._starts(node_request, step, may_start, start):
                self._add_chunk(node_request, step)
        self._order.record_plan(step.works)
        return step.works

    def _starts(
        self,
        node_request: NodeRequest,
        step: _Step,
        may_start: Callable[[NodeRequest], bool],
        start: Callable[[NodeRequest], bool],
    ) -> bool:
        """Return whether a queued prompt starts in this step."""
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
        """Add the tokens of a prompt for which the step has budget and time; if time is short, close the step."""
        is_scored = node_request.request.is_scored
        num_asked = min(step.budget, node_request.num_to_checkpoint, step.num_scorable if is_scored else step.budget)
        if node_request.distributed is not None and (num_asked := self._fit(node_request, num_asked)) == 0:
            return
        num_tokens = self.chunk_budget.afford(node_request, num_asked) if num_asked else 0
        step.num_scorable -= num_tokens * is_scored
        if num_tokens:
            step.works.append(node_request.work(num_tokens))
        step.budget = step.budget - num_tokens if num_tokens == num_asked else 0

    def start(self, node_request: NodeRequest, *, num_spare: int) -> bool:
        """Allocate the blocks of a whole prompt if that leaves `num_spare` blocks free; return whether it did."""
        return self._leases.take(
            node_request,
            self.tokens_to_hold(node_request),
            num_cacheable=num_cacheable(node_request),
            num_spare=num_spare,
        )

    def num_needed(self, node_request: NodeRequest) -> int:
        """Return how many free blocks the start of a prompt would take."""
        return self._leases.num_needed(
            node_request, self.tokens_to_hold(node_request), num_cacheable=num_cacheable(node_request)
        )

    def tokens_to_hold(self, node_request: NodeRequest) -> int:
        """Return for how many tokens a prompt gets blocks at its start.

        A new prompt that is decoded on this node includes its first output token. A request with distributed KV gets
        further blocks as it proceeds.
        """
        if node_request.distributed is not None:
            return 1
        return (
            node_request.num_given
            if node_request.only_prefills
            else len(node_request.request.token_ids) + (not node_request.has_first_token)
        )

    def _is_computed(self, node_request: NodeRequest, step: _Step) -> bool:
        """Return whether the planned step computes enough tokens that this prompt shares with another prompt."""
        least = step.least_shared
        return any(
            work.num_tokens >= least
            and self._shares(node_request, self._node_requests.of(work.request), work.start, work.start + least)
            for work in step.works
        )

    def _shares(self, node_request: NodeRequest, other: NodeRequest, start: int, end: int) -> bool:
        """Return whether a prompt will find the tokens of `other` up to `end` and lacks the tokens from `start` on."""
        tokens, others = node_request.request.token_ids, other.request.token_ids
        return (
            end <= num_cacheable(node_request)
            and tokens[start:end] == others[start:end]  # most prompts already differ at the first token
            and tokens[:start] == others[:start]
            and self._leases.may_share(node_request, other)
            and self._num_held(node_request) <= start
        )

    def take_hopeless(self) -> Sequence[NodeRequest]:
        """Return the prompts that the last plan left out since they cannot meet their deadline, and forget them.

        The caller must refuse them.
        """
        return self._order.take_hopeless()

    @property
    def oldest_age(self) -> float:
        """Return the age number of the oldest waiting or prefilling prompt on the node; inf if there is none."""
        return next(
            (each.age for each in self._node_requests.in_state(RequestState.WAITING, RequestState.PREFILLING)), math.inf
        )

    @property
    def num_waiting_tokens(self) -> int:
        """Return how many prompt tokens are still to be computed, less those in the prefix cache."""
        return sum(
            each.num_to_compute if each.lease is not None else each.num_to_compute - self._num_held(each)
            for each in self._node_requests.in_state(RequestState.WAITING, RequestState.PREFILLING)
        )

    def _num_held(self, node_request: NodeRequest) -> int:
        return self._leases.num_held_tokens(node_request, num_cacheable(node_request))

    def _begin(self, node_request: NodeRequest) -> None:
        self._node_requests.apply(node_request, RequestEvent.STARTED)
        self.count(node_request)

    def count(self, node_request: NodeRequest) -> None:
        """Add a prompt that has its blocks to num_prompt_tokens and num_cached_tokens, once for each request."""
        if not node_request.is_counted:
            node_request.is_counted = True
            self.num_prompt_tokens += node_request.num_given
            self.num_cached_tokens += self._leases.num_cached_tokens(node_request)


def num_cacheable(node_request: NodeRequest) -> int:
    """Return how many leading tokens of a prompt may be taken from the prefix cache instead of being computed.

    The last token is excluded if a token is sampled from its logits. Tokens whose logits are still needed for scores
    are excluded. With mean pooling the result is 0.
    """
    request = node_request.request
    if request.pooling is not None and request.pooling.kind == MEAN:
        return 0
    if request.is_scored:
        return len(request.scores)
    if node_request.only_prefills:
        return node_request.num_given - (not node_request.has_first_token)
    return len(request.token_ids) - 1


# ---- order ----

FLOOR: Final = 0.05  # share of computed prompt tokens that the oldest overtaken prompt earns


class PromptOrder:
    """Orders the prompts of one node: call `of`, then `record_plan` with the planned chunks."""

    def __init__(self, costs: StepCosts, num_held: Callable[[NodeRequest], int] = lambda _: 0) -> None:
        """Create the order.

        `num_held` returns how many leading tokens the pool holds of a prompt that has no blocks yet.
        """
        self._costs, self._num_held = costs, num_held
        self._hopeless: list[NodeRequest] = []  # prompts of the last order that are refused: they cannot be in time
        self._num_owed = 0.0  # tokens earned by the oldest overtaken prompt; at most the tokens it lacks
        self._oldest: Request | None = None
        self._first: frozenset[Request] = frozenset()  # prompts that come before `_oldest`

    def of(self, prompts: list[NodeRequest], now: float, pace: Callable[[], StepPace]) -> list[NodeRequest]:
        """Return these prompts, given oldest first, in the order in which they are to be computed.

        First those that can meet their deadline, then the others by priority and age; the oldest of the others comes
        first of all once it has earned that. Prompts that must be refused, because they cannot be in time, are left
        out: call `take_hopeless` afterwards. `pace` is called only if a prompt has a deadline.
        """
        first = self._timely(prompts, now, pace)
        chosen = {*first, *self._hopeless}
        back = [each for each in prompts if each not in chosen]
        if not back:
            self._num_owed, self._oldest, self._first = 0.0, None, frozenset()
            return first
        ordered = first + sorted(back, key=lambda each: each.priority)
        oldest, num_lacking = back[0], back[0].num_to_compute
        place = ordered.index(oldest)
        self._num_owed = min(self._num_owed, num_lacking)
        self._oldest, self._first = oldest.request, frozenset(each.request for each in ordered[:place])
        if self._num_owed == num_lacking:
            ordered.insert(0, ordered.pop(place))
        return ordered

    def take_hopeless(self) -> list[NodeRequest]:
        """Return the prompts that the last order left out since they cannot be in time, and forget them.

        The caller must refuse them.
        """
        hopeless, self._hopeless = self._hopeless, []
        return hopeless

    def record_plan(self, works: Sequence[Work]) -> None:
        """Record the chunks of the planned step, by which the oldest overtaken prompt earns its share."""
        for work in works:
            if work.request is self._oldest:
                self._num_owed = max(0.0, self._num_owed - work.num_tokens)
            elif work.request in self._first:
                self._num_owed += FLOOR * work.num_tokens

    def _timely(self, prompts: list[NodeRequest], now: float, pace: Callable[[], StepPace]) -> list[NodeRequest]:
        self._hopeless = []
        limited = [(each, at_s) for each in prompts if (at_s := due_s(each)) < math.inf]
        if not limited:
            return []
        bare_s, most_tokens, factor = pace()
        of_prompt = self._costs.weights.of_prompt
        expected_s = [of_prompt(each.num_computed, each.num_to_compute, most_tokens, bare_s) for each, _ in limited]
        for (each, at_s), seconds in zip(limited, expected_s, strict=True):
            if _is_refusable(each) and now + seconds > at_s and now + self._least_s(each, most_tokens, bare_s) > at_s:
                self._hopeless.append(each)
        high_s = [factor * seconds for seconds in expected_s]
        found = timely(high_s, [at_s - now for _, at_s in limited], [each.priority for each, _ in limited])
        return [limited[index][0] for index in found]

    def _least_s(self, prompt: NodeRequest, most_tokens: int, bare_s: float) -> float:
        """Return the seconds that a prompt takes if its cached tokens count; looking them up is slow."""
        num_held = self._num_held(prompt) if prompt.lease is None else prompt.num_computed
        num_left = max(1, prompt.num_computed + prompt.num_to_compute - num_held)
        return self._costs.weights.of_prompt(num_held, num_left, most_tokens, bare_s)


def _is_refusable(prompt: NodeRequest) -> bool:
    """Return whether a prompt may be refused if it would be late.

    Less than half of the prompt is computed, no blocks of it come from elsewhere, and no token has been reported.
    """
    due, num_tokens = prompt.due, prompt.num_computed + prompt.num_to_compute
    is_new = 2 * prompt.num_computed < num_tokens and not prompt.request.num_output_tokens
    is_here = prompt.waiting is None or (prompt.waiting.offer is None and not prompt.waiting.is_loading)
    return due is not None and due.refuses_late and is_new and is_here and not prompt.in_step
