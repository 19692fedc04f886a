"""How many connections each port may have, and which of them it keeps. Pure."""

import ipaddress
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from serving_core.errors import SettingsError

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


# How many connections each port of the coordinator may have, so that none of them takes what the others need.

# Descriptors for what the process opens itself, and for connections that are turned away but not yet closed.
RESERVE: Final = 256
FLEET_SHARE: Final = 8  # one in so many of the others is for nodes
MAX_FLEET: Final = 1024
LEAST_DESCRIPTORS: Final = 512
GUARDED: Final = 3  # descriptors of one connection that goes through a guard (api/guard.py)
SPARE: Final = 16  # connections at the HTTP port that calls may not take: somebody asks for /health


@dataclass(frozen=True, slots=True)
class Caps:
    """Most connections at a time."""

    public: int  # of gRPC clients
    http: int
    per_peer: int  # of one address, at either of these
    fleet: int


def connection_caps(
    num_descriptors: int,
    *,
    useful: int,
    wanted: int,
    wanted_per_peer: int,
    guards_clients: bool = False,
    guards_nodes: bool = False,
) -> Caps:
    """The caps within so many descriptors: as many for clients as are useful, unless a number is wanted (0: none is).
    Guards stand before ports whose calls take a secret. Raises SettingsError when that is not possible."""
    if num_descriptors < LEAST_DESCRIPTORS:
        raise SettingsError(
            f"the limit of {num_descriptors} open files (ulimit -n) is too low: at least {LEAST_DESCRIPTORS} are needed"
        )
    room = num_descriptors - RESERVE
    per_client, per_node = (GUARDED if guards else 1 for guards in (guards_clients, guards_nodes))
    fleet = min(MAX_FLEET, room // FLEET_SHARE // per_node)
    most = (room - fleet * per_node) // (per_client + 1)
    if wanted and not SPARE < wanted <= most:
        raise SettingsError(
            f"max_connections ({wanted}) must be above {SPARE}, which are kept for health checks, and at most {most}, "
            f"within the limit of {num_descriptors} open files"
        )
    clients = wanted or min(useful, most)
    return Caps(clients, clients, min(wanted_per_peer or clients // 2, clients), fleet)
