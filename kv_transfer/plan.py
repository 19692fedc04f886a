"""Plan the reshard: which KV heads of which layers go from which sender rank to which receiver rank.

A rank holds some heads in some neighboring layers. A node splits the layers over its pipeline stages with `share_of`,
into runs whose lengths differ by at most one. It splits the KV heads over the ranks of each stage with `head_range`:

- heads >= ranks: a partition into runs whose lengths differ by at most one;
- heads < ranks: one head on each rank, every head on one or more neighboring ranks.

Every pair of grids can be planned. Only sizes below 1, and more stages than layers, are refused.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from kv_transfer.results import TransferError
from serving_core.sharding import head_range, share_of

MAX_KNOWN_PLANS: Final = 64  # pairs of grids; a fleet has few


class Grid(NamedTuple):
    """The ranks of a node: `pp` pipeline stages of `tp` ranks each, numbered stage by stage."""

    tp: int  # ranks of each stage
    pp: int = 1  # pipeline stages

    def __str__(self) -> str:
        return f"{self.tp} ranks" if self.pp == 1 else f"{self.pp} stages of {self.tp} ranks"


@dataclass(frozen=True, slots=True)
class Holding:
    """The layers and KV heads that one rank holds, both counted over the whole model."""

    layers: range
    heads: range


@dataclass(frozen=True, slots=True)
class KVCopy:
    """A copy from one rank to another, which is made for every block and every layer in `layers`.

    Both head ranges have the same length, and each is counted from the first head of its own rank.
    """

    source_rank: int
    destination_rank: int
    layers: range
    source_heads: range
    destination_heads: range


def plan_copies(sources: Sequence[Holding], destinations: Sequence[Holding]) -> list[KVCopy]:
    """Return the copies that give every destination each of its heads in each of its layers exactly once.

    A rank's number is its place in `sources` or `destinations`. The list is ordered by destination, with as few and as
    long copies as possible. If the sources form a grid of pipeline stages and head shares, there is at most one copy
    for each pair of ranks. If several sources hold a head, the destinations are spread over these sources. Raises
    TransferError if no source holds a wanted head.
    """
    num_wanted: Counter[tuple[int, int]] = Counter()  # destinations that have asked for a head, by (first layer, head)
    copies = []
    for rank, wanted in enumerate(destinations):
        for layers, holders in _stages(sources, wanted.layers):
            first = wanted.heads.start
            while first < wanted.heads.stop:
                source = _holder(sources, holders, layers.start, first, num_wanted[layers.start, first])
                num_wanted[layers.start, first] += 1
                held = sources[source].heads
                stop = min(wanted.heads.stop, held.stop)
                heads = _within(first, stop, held), _within(first, stop, wanted.heads)
                copies.append(KVCopy(source, rank, layers, *heads))
                first = stop
    return copies


@lru_cache(maxsize=MAX_KNOWN_PLANS)
def plan_nodes(prefill: Grid, decode: Grid, num_kv_heads: int, layers: range) -> tuple[KVCopy, ...]:
    """Return the copies from a prefill node to a decode node, given the grids of their ranks.

    Both hold num_kv_heads heads in `layers`. A plan is worked out once for each pair of grids, not for each transfer.
    Raises TransferError for sizes below 1 and for more stages than layers.
    """
    return tuple(plan_copies(*(holdings(grid, num_kv_heads, layers) for grid in (prefill, decode))))


def holdings(grid: Grid, num_kv_heads: int, layers: range) -> list[Holding]:
    """Return which of `layers` and of num_kv_heads heads each rank of the grid holds, in rank order.

    Raises TransferError for sizes below 1 and for more stages than layers.
    """
    shares = _shares(grid.tp, num_kv_heads)
    if not 1 <= grid.pp <= len(layers):
        raise TransferError(f"{len(layers)} layers cannot be split over {grid.pp} stages")
    stages = [share_of(len(layers), stage, grid.pp) for stage in range(grid.pp)]
    return [Holding(layers[stage.start : stage.stop], heads) for stage in stages for heads in shares]


def _shares(tp_size: int, num_kv_heads: int) -> list[range]:
    if tp_size < 1 or num_kv_heads < 1:
        raise TransferError(f"{num_kv_heads} KV heads cannot be split over {tp_size} ranks: both must be at least 1")
    return [head_range(rank, tp_size, num_kv_heads) for rank in range(tp_size)]


def _stages(sources: Sequence[Holding], layers: range) -> Iterator[tuple[range, list[int]]]:
    """Yield the parts of `layers`, cut where the layers of a source end, with the ranks that hold each part."""
    first = layers.start
    while first < layers.stop:
        holders = [rank for rank, held in enumerate(sources) if first in held.layers]
        stop = min([layers.stop, *(sources[rank].layers.stop for rank in holders)])
        yield range(first, stop), holders
        first = stop


def _holder(sources: Sequence[Holding], holders: Sequence[int], layer: int, head: int, number: int) -> int:
    """Return a rank among `holders` that holds this head; consecutive `number` values take turns."""
    able = [rank for rank in holders if head in sources[rank].heads]
    if not able:
        raise TransferError(f"no prefill rank holds head {head} of layer {layer}")
    return able[number % len(able)]


def _within(start: int, stop: int, heads: range) -> range:
    return range(start - heads.start, stop - heads.start)
