"""What nodes of one machine take from each other: a step goes at one rate beside others, at another one alone."""

from typing import Protocol

from splitserve_bench.simulate.costs import Costs


class Neighbour(Protocol):
    """A node, as its machine knows it."""

    costs: Costs  # beside another one at work

    def pace_changed(self) -> None:
        """To be told while a step of its own runs: another one has begun to work beside it, or rests."""
        ...


class Machine:
    """Nodes that share one. Those at work are counted, not weighed: that is what was measured."""

    def __init__(self, alone: Costs) -> None:
        """`alone`: of each node while no other one works."""
        self._alone = alone
        self._at_work: dict[Neighbour, None] = {}

    def costs(self, node: Neighbour) -> Costs:
        """Of this node's steps, as the others are now."""
        has_company = len(self._at_work) > (node in self._at_work)
        return node.costs if has_company else self._alone

    def works(self, node: Neighbour) -> None:
        """A step of it begins, after another one or a rest."""
        if node not in self._at_work:
            self._at_work[node] = None
            self._tell(node)

    def rests(self, node: Neighbour) -> None:
        """No step of it runs any more."""
        if node in self._at_work:
            del self._at_work[node]
            self._tell(node)

    def _tell(self, changed: Neighbour) -> None:
        for node in self._at_work:
            if node is not changed:
                node.pace_changed()


class Progress:
    """How far a step is whose rate may change. Pure."""

    def __init__(self, now: float, seconds: float) -> None:
        """One that begins now and takes so long."""
        self._since_s, self._left, self._seconds = now, 1.0, seconds

    @property
    def ends_s(self) -> float:
        """When, if it goes on like this."""
        return self._since_s + self._left * self._seconds

    def go_on(self, now: float, seconds: float) -> None:
        """From now on a whole step would take so long. What is over stays over."""
        if seconds != self._seconds and now < self.ends_s:
            self._left -= (now - self._since_s) / self._seconds
            self._since_s, self._seconds = now, seconds
