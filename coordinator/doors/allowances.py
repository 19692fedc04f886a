"""How much strangers may send: by peer, what it has left of an allowance that fills again. Pure: times come in."""

from typing import Final

MAX_PEERS: Final = 4096  # remembered, those that have sent something last


class Allowances:
    """Of each peer, as much as may come at once, and as much more each second."""

    def __init__(self, most: float, per_s: float) -> None:
        self._most = most
        self._per_s = per_s
        self._left: dict[str, tuple[float, float]] = {}  # what a peer had at which time; who sent last is last

    def take(self, peer: str, amount: float, now: float) -> bool:
        """Return whether the peer has this much, which is taken then, and else nothing."""
        left, then = self._left.pop(peer, (self._most, now))
        left = min(self._most, left + self._per_s * (now - then))
        has_enough = left >= amount
        self._left[peer] = left - amount if has_enough else left, now
        if len(self._left) > MAX_PEERS:
            del self._left[next(iter(self._left))]
        return has_enough
