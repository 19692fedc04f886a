"""How many connections each port of the coordinator may have, so that none of them takes what the others need. Pure."""

from dataclasses import dataclass
from typing import Final

from serving_core.errors import SettingsError

# Descriptors for what the process opens itself, and for connections that are turned away but not yet closed.
RESERVE: Final = 256
FLEET_SHARE: Final = 8  # one in so many of the others is for nodes
MAX_FLEET: Final = 1024
LEAST_DESCRIPTORS: Final = 512
GUARDED: Final = 3  # descriptors of one connection that goes through a guard (doors/guard.py)
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
