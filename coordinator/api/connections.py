"""Limit the connections of each port, choose the connections to close, and count those that are closed."""

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from serving_core.errors import SettingsError
from serving_core.figures import Figure, counter
from serving_core.net.backoff import Reminder

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=Hashable)

IPV6_SITE_BITS = 64  # the smallest network that a provider assigns to one customer; counts as one peer


class Connections(Generic[C]):
    """Track connections by peer, and the idle connections in the order in which they became idle."""

    def __init__(self, most: int, most_per_peer: int) -> None:
        self._most = most
        self._most_per_peer = most_per_peer
        self._peers: dict[C, str] = {}
        self._num_of: dict[str, int] = {}
        self._idle: dict[C, None] = {}  # oldest first
        self._idle_of: dict[str, dict[C, None]] = {}  # idle connections by peer

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[C]:
        return iter(self._peers)

    def add(self, connection: C, peer: str) -> C | None:
        """Add a new connection as idle, and return the connection to close in exchange, or None when there is room.

        `peer` is the address of the client (`peer_of`). If the peer now has more than `most_per_peer`, its longest idle
        connection is chosen; else, with more than `most` in all, the longest idle of all peers; this is the new
        connection when no other is idle. The returned connection is no longer tracked.
        """
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
        """Mark a connection as idle. Has no effect on an idle or unknown connection."""
        if (peer := self._peers.get(connection)) is not None:
            self._idle.setdefault(connection)
            self._idle_of.setdefault(peer, {}).setdefault(connection)

    def set_busy(self, connection: C) -> None:
        """Mark a connection as busy, so that `add` does not choose it.

        Has no effect on a busy or unknown connection.
        """
        if connection in self._idle:
            del self._idle[connection]
            peer = self._peers[connection]
            del self._idle_of[peer][connection]
            if not self._idle_of[peer]:
                del self._idle_of[peer]

    def remove(self, connection: C) -> None:
        """Remove a connection. Has no effect on an unknown connection."""
        self.set_busy(connection)
        if (peer := self._peers.pop(connection, None)) is not None:
            self._num_of[peer] -= 1
            if not self._num_of[peer]:
                del self._num_of[peer]


def peer_of(host: str) -> str:
    """Return the peer that an address belongs to: the IPv4 address itself, or the /64 network of an IPv6 address.

    An IPv4 address within IPv6 (::ffff:1.2.3.4) counts as that IPv4 address. A `host` that is no IP address is returned
    unchanged.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_SITE_BITS), strict=False))


# Caps of the coordinator's ports, so that no port takes the descriptors that another port needs.

# Descriptors for the files of the process itself, and for refused connections that are not closed yet.
RESERVE: Final = 256
FLEET_SHARE: Final = 8  # one in FLEET_SHARE of the other connections is for nodes
MAX_FLEET: Final = 1024
LEAST_DESCRIPTORS: Final = 512
GUARDED: Final = 3  # descriptors of one connection through a guard (api/guard.py)
SPARE: Final = 16  # connections of the HTTP port that requests may not use, so that /health is reachable


@dataclass(frozen=True, slots=True)
class Caps:
    """Hold the largest number of simultaneous connections of each port."""

    public: int  # gRPC clients
    http: int
    per_peer: int  # from one address, at the gRPC or the HTTP port
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
    """Return the largest numbers of connections per port that fit into `num_descriptors` open files.

    `useful` is the number of client connections to aim for, unless `wanted` sets one (0: unset). `wanted_per_peer`
    limits those of one address (0: half of all). With `guards_clients` or `guards_nodes` a guard stands before the
    clients' gRPC port or the nodes' port and takes GUARDED descriptors a connection. Raises SettingsError when
    `num_descriptors` is below LEAST_DESCRIPTORS, or `wanted` does not fit.
    """
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


# Connections that ports close to protect other clients.

REMIND_S: Final = 60.0  # at least, between two log lines for one reason
GRPC, HTTP, FLEET = "grpc", "http", "fleet"
PORTS: Final = (GRPC, HTTP, FLEET)
CROWDED: Final = "crowded"  # the port had reached its limit of connections
MALFORMED: Final = "malformed"  # not HTTP/2, or beyond the limits of a head
OVER_ALLOWANCE: Final = "over_allowance"  # no key, and the allowance of the address was used up
SLOW: Final = "slow"  # a frame, head or request was not completed in time
UNREAD: Final = "unread"  # the client did not read what it was sent
REASONS: Final = (CROWDED, MALFORMED, OVER_ALLOWANCE, SLOW, UNREAD)


class Sheds:
    """Count closed connections by port and reason."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[str, str]]()

    def count(self, port: str, reason: str, number: int = 1) -> None:
        """Add `number` closed connections of a port (one of PORTS) for a reason (one of REASONS)."""
        self._counts[port, reason] += number

    def taken(self) -> Counter[tuple[str, str]]:
        """Return the counts by (port, reason) since the last call, and reset them."""
        counts, self._counts = self._counts, Counter()
        return counts

    def figures(self) -> Iterator[Figure]:
        """Yield the one counter for /metrics, with a value for every port and reason."""
        known = [(port, reason) for port in PORTS for reason in REASONS]
        values = [({"port": port, "reason": reason}, self._counts[port, reason]) for port, reason in known]
        help = "Connections that were closed before their end, so that they take nothing from others."
        yield counter("connections_shed", help, values)


class PortSheds:
    """Count the closed connections of one port, and log each reason at once and then ever more rarely."""

    def __init__(self, sheds: Sheds, port: str, sentence: str) -> None:
        """Create the counter. `sentence` is the log message, with one `%s` for the reason."""
        self._sheds = sheds
        self._port = port
        self._sentence = sentence
        self._reminder = Reminder(first_pause_s=REMIND_S)

    def count(self, reason: str, sentence: str = "") -> None:
        """Count one closed connection for a reason (one of REASONS), and log the first of each reason at once.

        A reason is logged again after pauses that double, from REMIND_S. A given `sentence` replaces the port's log
        message.
        """
        self._sheds.count(self._port, reason)
        if self._reminder.is_due(reason, time.monotonic()):
            logger.warning(sentence or self._sentence % reason)
