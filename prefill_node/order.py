"""Which prompt is read first, where some have a limit on their first token, or another priority. No I/O, no clock.

Of those with a limit, as many as can be in time come first, the most urgent one before the others: where one would be
late, the longest so far steps back (Moore and Hodgson: no order has more in time). In time is who would be even if
steps took as long as they rarely do (serving_core/margin.py). Nobody steps back for a less
important one: as many of the most important ones are in time as ever can be, then as many of the next as there is time
for beside those, and so on. Behind them come, by priority and of equal ones the oldest first, those without a limit and
those that would be late.

These have a floor: of all that is read before the oldest of them it earns a share, and when that is as much as it
lacks, it comes before all, whatever its priority. So nobody waits for ever, and few that come at once keep their order.

Without limits and priorities the oldest comes first.
"""

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from operator import le
from typing import Final, NamedTuple

from serving_core.costs import StepCosts
from serving_core.node_requests import NodeRequest
from serving_core.requests import Request, Work

FLOOR: Final = 0.05  # of the prompt tokens that are computed, for those that others are read before


class Pace(NamedTuple):
    """What a node's steps are: each takes bare_s without prompts and computes at most num_tokens of them, and rarely
    takes longer than `factor` times what is expected."""

    bare_s: float
    num_tokens: int
    factor: float


class Order:
    """Puts the prompts of one node in order: `of`, then `took` what the step takes of them."""

    def __init__(self, costs: StepCosts, num_held: Callable[[NodeRequest], int] = lambda _: 0) -> None:
        """`num_held` tells how many leading tokens the pool holds of a prompt that has no blocks yet."""
        self._costs, self._num_held = costs, num_held
        self._hopeless: list[NodeRequest] = []  # of the last order, those to refuse: they cannot be in time any more
        self._num_owed = 0.0  # tokens, to the oldest of those that others are read before; at most what it lacks
        self._oldest: Request | None = None
        self._first: frozenset[Request] = frozenset()  # that are read before it

    def of(self, prompts: list[NodeRequest], now: float, pace: Callable[[], Pace]) -> list[NodeRequest]:
        """These prompts, which come oldest first, in the order in which they are to be read, without those that
        `take_hopeless` gives. `pace` is asked where any has a limit."""
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
        """Return, once, the prompts that the last order has left out: they cannot be in time, and are to be refused."""
        hopeless, self._hopeless = self._hopeless, []
        return hopeless

    def took(self, works: Sequence[Work]) -> None:
        """What the planned step computes of prompts."""
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
        """Return the seconds that a prompt takes with what the pool holds of it, which is long to look for."""
        num_held = self._num_held(prompt) if prompt.lease is None else prompt.num_computed
        num_left = max(1, prompt.num_computed + prompt.num_to_compute - num_held)
        return self._costs.weights.of_prompt(num_held, num_left, most_tokens, bare_s)


def timely(seconds: Sequence[float], dues_s: Sequence[float], priorities: Sequence[int] = ()) -> list[int]:
    """Of jobs that take so long and are due so much later, the places of the most that can be done in time one after
    the other, in the order of doing. Of those that are due at once the first comes first. With `priorities` they are
    the most of the lowest value, then the most of the next beside those, and so on."""
    by_due = sorted(range(len(dues_s)), key=dues_s.__getitem__)
    if all(map(le, accumulate([seconds[index] for index in by_due]), [dues_s[index] for index in by_due])):
        return by_due
    priorities = priorities or [0] * len(dues_s)
    chosen: set[int] = set()
    for priority in sorted(set(priorities)):
        passed_s, longest = 0.0, list[tuple[float, int]]()
        for index in by_due:
            if index not in chosen and priorities[index] != priority:
                continue
            passed_s += seconds[index]
            if index not in chosen:
                heappush(longest, (-seconds[index], -index))
            while longest and passed_s > dues_s[index]:
                passed_s += heappop(longest)[0]
        chosen.update(-index for _, index in longest)
    return [index for index in by_due if index in chosen]


def _is_refusable(prompt: NodeRequest) -> bool:
    """Whether less than half of it is computed, nothing of it comes from elsewhere and no token has been told, so that
    it is refused when it would be late."""
    due, num_tokens = prompt.due, prompt.num_computed + prompt.num_to_compute
    is_new = 2 * prompt.num_computed < num_tokens and not prompt.request.num_output_tokens
    is_here = prompt.offer is None and not prompt.is_loading
    return due is not None and due.refuses_late and is_new and is_here and not prompt.in_step


def due_s(prompt: NodeRequest) -> float:
    """Of the token that it is read for."""
    return math.inf if prompt.due is None else prompt.due.token_s(prompt.request.num_output_tokens)
