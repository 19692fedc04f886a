"""Which connections a port keeps: so many in all, and of one peer. Pure."""

import ipaddress
from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

IPV6_SITE_BITS = 64  # what one customer of a provider has at least: its addresses count as one peer


class Connections(Generic[C]):
    """Connections by peer, and which of them are idle, the one that has been so for longest first."""

    def __init__(self, most: int, most_per_peer: int) -> None:
        self._most = most
        self._most_per_peer = most_per_peer
        self._peers: dict[C, str] = {}
        self._num_of: dict[str, int] = {}
        self._idle: dict[C, None] = {}  # in order
        self._idle_of: dict[str, dict[C, None]] = {}  # the same, by peer

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, connection: C, peer: str) -> C | None:
        """Takes a new connection, which is idle. The one to be closed for it, if any, is forgotten already: the one
        idle for longest, of the same peer where that has too many; the new one itself where no other is idle."""
        self._peers[connection] = peer
        self._num_of[peer] = self._num_of.get(peer, 0) + 1
        self.set_idle(connection)
        if self._num_of[peer] > self._most_per_peer:
            closed = next(iter(self._idle_of[peer]))
        elif len(self) > self._most:
            closed = next(iter(self._idle))
        else:
            return None
        self.remove(closed)
        return closed

    def set_idle(self, connection: C) -> None:
        """It has nothing to do from now on, unless it had nothing before, or is forgotten."""
        if (peer := self._peers.get(connection)) is not None:
            self._idle.setdefault(connection)
            self._idle_of.setdefault(peer, {}).setdefault(connection)

    def set_busy(self, connection: C) -> None:
        """It must not be closed."""
        if connection in self._idle:
            del self._idle[connection]
            peer = self._peers[connection]
            del self._idle_of[peer][connection]
            if not self._idle_of[peer]:
                del self._idle_of[peer]

    def remove(self, connection: C) -> None:
        """Forgets it, unless that was done before."""
        self.set_busy(connection)
        if (peer := self._peers.pop(connection, None)) is not None:
            self._num_of[peer] -= 1
            if not self._num_of[peer]:
                del self._num_of[peer]


def peer_of(host: str) -> str:
    """Whom an address belongs to: of IPv6, a whole network does."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_SITE_BITS), strict=False))
