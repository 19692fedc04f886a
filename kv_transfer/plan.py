"""The reshard plan: which KV heads of which layers go from which prefill rank to which decode rank.

A rank holds some heads in some neighbouring layers. Without pipeline stages all ranks hold all layers, and a node
splits the KV heads over its ranks by `head_range`:
- heads >= ranks: a partition into runs of equal length, or of lengths that differ by one where the ranks do not
  divide the heads;
- heads < ranks: one head on each rank, every head on one or more neighbouring ranks.
So any two sizes can be paired. Only sizes below 1 are refused.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kv_transfer.errors import TransferError
from serving_core.sharding import head_range

ANY_LAYER: Final = range(1)  # where all ranks hold all layers, the plan is the same in each of them


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds: these heads in these layers, both counted over the whole model."""

    layers: range
    heads: range


@dataclass(frozen=True, slots=True)
class KVCopy:
    """One copy for every block and each of these layers of the model. Both ranges of heads are of equal length and
    count from the rank's own first head."""

    source_rank: int
    destination_rank: int
    layers: range
    source_heads: range
    destination_heads: range


def plan_copies(sources: Sequence[Holding], destinations: Sequence[Holding]) -> list[KVCopy]:
    """The copies that give every destination each of its heads in each of its layers exactly once, as few and as long
    as can be, by destination. Raises TransferError when no source holds something of it.

    There is at most one for each pair of ranks where the sources form a grid of pipeline stages and shares of heads.
    Where several sources hold a head, the destinations that want it are spread over them.
    """
    num_wanted: Counter[tuple[int, int]] = Counter()  # by how many destinations so far: a head, from a layer on
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


def plan_tp(prefill_tp: int, decode_tp: int, num_kv_heads: int, layers: range = ANY_LAYER) -> list[KVCopy]:
    """The plan of two nodes whose ranks all hold these layers. Raises TransferError for sizes below 1."""
    sources, destinations = (
        [Holding(layers, heads) for heads in _shares(tp_size, num_kv_heads)] for tp_size in (prefill_tp, decode_tp)
    )
    return plan_copies(sources, destinations)


def describe(prefill_tp: int, decode_tp: int, num_kv_heads: int) -> list[str]:
    """The plan in words, a line for each fact: what every rank holds, every lane with its share of the bytes that are
    sent, and how many these are. Raises TransferError for sizes below 1."""
    copies = plan_tp(prefill_tp, decode_tp, num_kv_heads)
    num_sent = sum(len(copy.source_heads) for copy in copies)
    lanes = []
    for copy in copies:
        start = head_range(copy.source_rank, prefill_tp, num_kv_heads).start
        heads = _words(range(start + copy.source_heads.start, start + copy.source_heads.stop))
        share = f"{100 * len(copy.source_heads) / num_sent:.3g} % of the bytes sent"
        lanes.append(f"prefill rank {copy.source_rank} sends {heads} to decode rank {copy.destination_rank}: {share}")
    senders = {copy.source_rank for copy in copies}
    silent = [f"prefill rank {rank} sends nothing" for rank in range(prefill_tp) if rank not in senders]
    total = f"total sent: {num_sent / num_kv_heads:.3g} x the bytes of the unreplicated cache"
    return [
        *_holdings("prefill", prefill_tp, num_kv_heads),
        *_holdings("decode", decode_tp, num_kv_heads),
        *lanes,
        *silent,
        total,
    ]


def _holdings(role: str, tp_size: int, num_kv_heads: int) -> list[str]:
    shares = _shares(tp_size, num_kv_heads)
    lines = []
    for rank, heads in enumerate(shares):
        others = [str(other) for other, held in enumerate(shares) if other != rank and held == heads]
        replicated = f", as {_listed(others, f'{role} rank')} {'do' if others[1:] else 'does'}" if others else ""
        lines.append(f"{role} rank {rank} holds {_words(heads)} of {num_kv_heads}{replicated}")
    return lines


def _listed(items: list[str], noun: str) -> str:
    *most, last = items
    return f"{noun}s {', '.join(most)} and {last}" if most else f"{noun} {last}"


def _words(heads: range) -> str:
    return f"head {heads.start}" if len(heads) == 1 else f"heads {heads.start}-{heads.stop - 1}"


def _shares(tp_size: int, num_kv_heads: int) -> list[range]:
    if tp_size < 1 or num_kv_heads < 1:
        raise TransferError(f"{num_kv_heads} KV heads cannot be split over {tp_size} ranks: both must be at least 1")
    return [head_range(rank, tp_size, num_kv_heads) for rank in range(tp_size)]


def _stages(sources: Sequence[Holding], layers: range) -> Iterator[tuple[range, list[int]]]:
    """These layers, cut where those of a holder end; and the ranks that hold all of each part."""
    first = layers.start
    while first < layers.stop:
        holders = [rank for rank, held in enumerate(sources) if first in held.layers]
        stop = min([layers.stop, *(sources[rank].layers.stop for rank in holders)])
        yield range(first, stop), holders
        first = stop


def _holder(sources: Sequence[Holding], holders: Sequence[int], layer: int, head: int, number: int) -> int:
    """One of those that hold this head, each in turn."""
    able = [rank for rank in holders if head in sources[rank].heads]
    if not able:
        raise TransferError(f"no prefill rank holds head {head} of layer {layer}")
    return able[number % len(able)]


def _within(start: int, stop: int, heads: range) -> range:
    return range(start - heads.start, stop - heads.start)
