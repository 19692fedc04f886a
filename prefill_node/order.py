"""Which prompt is read first, where some have a limit on their first token. No I/O, no clock.

Of those with a limit, as many as can be in time come first, the most urgent one before the others: where one would be
late, the longest so far steps back (Moore and Hodgson: no order has more in time). Behind them come, oldest first,
those without a limit and those that would be late. These have a floor: of all that the first ones get they earn a
share, and while they have something in hand, the oldest of them comes before all. So nobody waits for ever.

Without limits the oldest comes first.
"""

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from serving_core.costs import StepCosts
from serving_core.requests import Request, Work
from serving_core.residents import Resident

FLOOR: Final = 0.05  # of the prompt tokens that are computed, for those that have stepped back


class Order:
    """Puts the prompts of one node in order: `of`, then `took` what the step takes of them."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._num_owed = 0.0  # tokens, to those that have stepped back
        self._advanced: Request | None = None  # that comes first for it
        self._first: frozenset[Request] = frozenset()  # that others have stepped back for

    def of(self, prompts: list[Resident], now: float) -> list[Resident]:
        """These prompts, which come oldest first, in the order in which they are to be read."""
        self._advanced, self._first = None, frozenset()
        limited = [(each, due_s) for each in prompts if (due_s := _due_s(each)) < math.inf]
        if not limited:
            return prompts
        seconds = [self._costs.chunk_s(each.num_computed, each.num_to_compute, is_first=True) for each, _ in limited]
        found = timely(seconds, [due_s - now for _, due_s in limited])
        first = [limited[index][0] for index in found]
        chosen = set(first)
        back = [each for each in prompts if each not in chosen]
        if not (first and back):
            return first + back
        self._first = frozenset(each.request for each in first)
        if self._num_owed <= 0:
            return first + back
        self._advanced = back[0].request
        return [back[0], *first, *back[1:]]

    def took(self, works: Sequence[Work]) -> None:
        """What the planned step computes of prompts."""
        for work in works:
            if work.request is self._advanced:
                self._num_owed -= work.num_tokens
            elif work.request in self._first:
                self._num_owed += FLOOR * work.num_tokens


def timely(seconds: Sequence[float], dues_s: Sequence[float]) -> list[int]:
    """Of jobs that take so long and are due so much later, the places of the most that can be done in time one after
    the other, in the order of doing. Of those that are due at once the first comes first."""
    passed_s, longest = 0.0, list[tuple[float, int]]()
    for index in sorted(range(len(dues_s)), key=lambda index: dues_s[index]):
        passed_s += seconds[index]
        heappush(longest, (-seconds[index], -index))
        if passed_s > dues_s[index]:
            passed_s += heappop(longest)[0]
    return sorted((-index for _, index in longest), key=lambda index: (dues_s[index], index))


def _due_s(prompt: Resident) -> float:
    """Of the token that it is read for."""
    return math.inf if prompt.due is None else prompt.due.token_s(prompt.request.num_output_tokens)
