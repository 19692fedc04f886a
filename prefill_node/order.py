"""Order prompts by TTFT deadline and priority. No I/O, no clock.

Of the prompts with a deadline, as many as can be in time come first, earliest deadline first. If a prompt would be
late, the longest prompt chosen up to there steps back (Moore-Hodgson algorithm: no order has more jobs in time). A
prompt counts as in time if it would be even with step times at their upper margin (serving_core/slo.py). No prompt
steps back for a prompt of lower priority: the number in time is maximized for the highest priority, then for the next
priority in the remaining time, and so on. Behind them come the prompts without a deadline and the prompts that would be
late, by priority, then by age.

Those last prompts have a floor: their oldest prompt earns a share of all tokens computed before it. When the share
reaches the tokens that the prompt lacks, the prompt comes first, whatever its priority. So no prompt starves, and short
bursts keep their order.

Without deadlines and priorities the order is oldest first.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from serving_core.node.costs import StepCosts
from serving_core.node.requests import NodeRequest
from serving_core.requests import Request, Work
from serving_core.slo import timely

FLOOR: Final = 0.05  # share of computed prompt tokens that the oldest overtaken prompt earns


class Pace(NamedTuple):
    """Describe the steps of a node.

    A step takes `bare_s` seconds without prompts, computes at most `num_tokens` prompt tokens, and rarely takes longer
    than `factor` times the expected time.
    """

    bare_s: float
    num_tokens: int
    factor: float


class Order:
    """Order the prompts of one node: call `of`, then `took` with the planned chunks."""

    def __init__(self, costs: StepCosts, num_held: Callable[[NodeRequest], int] = lambda _: 0) -> None:
        """Create the order.

        `num_held` returns how many leading tokens the pool holds of a prompt that has no blocks yet.
        """
        self._costs, self._num_held = costs, num_held
        self._hopeless: list[NodeRequest] = []  # prompts of the last order that are refused: they cannot be in time
        self._num_owed = 0.0  # tokens earned by the oldest overtaken prompt; at most the tokens it lacks
        self._oldest: Request | None = None
        self._first: frozenset[Request] = frozenset()  # prompts that come before `_oldest`

    def of(self, prompts: list[NodeRequest], now: float, pace: Callable[[], Pace]) -> list[NodeRequest]:
        """Return these prompts, given oldest first, in the order in which they are computed.

        The prompts that `take_hopeless` returns are left out. `pace` is called only if a prompt has a deadline.
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
        """Return, once, the prompts that the last order left out; they cannot be in time and must be refused."""
        hopeless, self._hopeless = self._hopeless, []
        return hopeless

    def took(self, works: Sequence[Work]) -> None:
        """Record which prompt tokens the planned step computes."""
        for work in works:
            if work.request is self._oldest:
                self._num_owed = max(0.0, self._num_owed - work.num_tokens)
            elif work.request in self._first:
                self._num_owed += FLOOR * work.num_tokens

    def _timely(self, prompts: list[NodeRequest], now: float, pace: Callable[[], Pace]) -> list[NodeRequest]:
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


def due_s(prompt: NodeRequest) -> float:
    """Return the deadline of the token that the prompt is computed for; inf without a deadline."""
    return math.inf if prompt.due is None else prompt.due.token_s(prompt.request.num_output_tokens)
