"""What every node tells of itself: who it is, and how busy."""

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import psutil

from engine.blocks import BlockAllocator
from engine.prefix import hint_of
from engine.stepper import Stepper
from protos import fleet_pb2, inference_pb2
from protos.convert import PROTOCOL_VERSION
from protos.ranks import Followers

MAX_HINTS: Final = 2**16  # in one message


def new_incarnation() -> str:
    """The name of one life of a node process."""
    return secrets.token_hex(16)


def node_info(
    name: str, role: str, incarnation: str, fingerprint: Mapping[str, str], engine: Mapping[str, str]
) -> inference_pb2.NodeInfo:
    """`fingerprint` must be equal on all nodes of a fleet; `engine` describes what may differ."""
    return inference_pb2.NodeInfo(
        name=name,
        role=role,
        incarnation=incarnation,
        fingerprint={"protocol_version": PROTOCOL_VERSION, **fingerprint},
        engine=engine,
    )


def node_load(
    name: str, role: str, stepper: Stepper[Any, Any], allocator: BlockAllocator, *, draining: bool
) -> inference_pb2.NodeLoad:
    """The parts of a load report that do not depend on the role; the queue lengths are the caller's to fill in."""
    return inference_pb2.NodeLoad(
        name=name,
        role=role,
        state="draining" if draining else "ready",
        num_blocks=allocator.num_blocks,
        num_blocks_free=allocator.num_free,
        num_blocks_cached=allocator.num_cached,
        num_steps=stepper.num_steps,
        step_s=stepper.step_s,
        rss_bytes=psutil.Process().memory_info().rss,
    )


class Rank(Protocol):
    """Which rank this process is: RankGroup of engine/parallel.py."""

    @property
    def rank(self) -> int: ...


class RankEngine(Protocol):
    """An engine's account of its memory: Engine of engine/engine.py."""

    @property
    def group(self) -> Rank: ...
    @property
    def kv_pool_bytes(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...


def rank_load(engine: RankEngine) -> inference_pb2.RankLoad:
    """The memory that this process takes."""
    return inference_pb2.RankLoad(
        rank=engine.group.rank,
        rss_bytes=psutil.Process().memory_info().rss,
        kv_pool_bytes=engine.kv_pool_bytes,
        weight_bytes=engine.weight_bytes,
    )


def rank_loads(engine: RankEngine, followers: Followers) -> list[inference_pb2.RankLoad]:
    """The memory of every rank of the node, by rank."""
    return [rank_load(engine), *(followers.loads[rank] for rank in sorted(followers.loads))]


class CacheReport:
    """Tells the coordinator which full blocks the node holds, as changes."""

    def __init__(self, allocator: BlockAllocator, send: Callable[..., None]) -> None:
        self._allocator = allocator
        self._send = send
        self._is_known = False  # whether the coordinator knows what was told before

    def forget(self) -> None:
        """The coordinator is another one, or has lost sight of this node: it knows nothing."""
        self._is_known = False

    def tell(self) -> None:
        """Sends what has changed, or everything to one who knows nothing."""
        stored, removed = self._allocator.take_changes() if self._is_known else (self._allocator.take_names(), [])
        self._is_known = True
        for change in _changes("removed", removed) + _changes("stored", stored):
            self._send(cache_changed=change)


def _changes(kind: str, names: list[bytes]) -> list[fleet_pb2.CacheChanged]:
    parts = (names[first : first + MAX_HINTS] for first in range(0, len(names), MAX_HINTS))
    return [fleet_pb2.CacheChanged(**{kind: map(hint_of, part)}) for part in parts]
