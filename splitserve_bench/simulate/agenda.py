"""A clock that jumps from one thing that happens to the next."""

import heapq
import itertools
from collections.abc import Callable

from splitserve_bench.errors import BenchError

Action = Callable[[], None]


class Agenda:
    """What is to happen when. Of what is due at one moment, first comes what was planned first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, moment_s: float, action: Action) -> None:
        """Plans an action; what is late already is due now."""
        heapq.heappush(self._due, (moment_s if moment_s > self.now else self.now, next(self._order), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Lets things happen until `is_over`, which is asked after each. Raises BenchError when nothing is left."""
        due = self._due
        while not is_over():
            if not due:
                raise BenchError(f"nothing happens any more, {self.now:.3f} s after the start")
            self.now, _, action = heapq.heappop(due)
            action()
