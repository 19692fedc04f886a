"""The reshard plan: which KV heads go from which prefill rank to which decode rank.

Each node splits the KV heads over its ranks by `head_range`:
- heads >= ranks: a partition into runs of equal length, or of lengths that differ by one where the ranks do not
  divide the heads;
- heads < ranks: one head on each rank, every head on one or more neighbouring ranks.
So any two sizes can be paired. Only sizes below 1 are refused.
"""

from dataclasses import dataclass

from kv_transfer.errors import TransferError


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """One copy for every block and layer. Both ranges are of equal length and count from the rank's own first head."""

    source_rank: int
    destination_rank: int
    source_heads: range
    destination_heads: range


def head_range(rank: int, tp_size: int, num_kv_heads: int) -> range:
    """The KV heads, counted over the whole model, that one rank of tp_size holds."""
    if tp_size < 1 or num_kv_heads < 1:
        raise TransferError(f"{num_kv_heads} KV heads cannot be split over {tp_size} ranks: both must be at least 1")
    start = rank * num_kv_heads // tp_size
    return range(start, max(start + 1, (rank + 1) * num_kv_heads // tp_size))


def plan_copies(prefill_tp: int, decode_tp: int, num_kv_heads: int) -> list[HeadCopy]:
    """The copies that give every decode rank each of its heads exactly once, as few and as long as can be.

    Where several prefill ranks hold a head, the decode ranks that want it are spread over them.
    """
    sources = _shares(prefill_tp, num_kv_heads)
    num_wanted = [0] * num_kv_heads  # by how many decode ranks so far
    copies = []
    for rank, heads in enumerate(_shares(decode_tp, num_kv_heads)):
        first = heads.start
        while first < heads.stop:
            holders = [source for source, held in enumerate(sources) if first in held]
            source = holders[num_wanted[first] % len(holders)]
            num_wanted[first] += 1
            stop = min(heads.stop, sources[source].stop)
            copies.append(HeadCopy(source, rank, _within(first, stop, sources[source]), _within(first, stop, heads)))
            first = stop
    return copies


def _shares(tp_size: int, num_kv_heads: int) -> list[range]:
    return [head_range(rank, tp_size, num_kv_heads) for rank in range(max(1, tp_size))]  # 0 ranks raise


def _within(start: int, stop: int, heads: range) -> range:
    return range(start - heads.start, stop - heads.start)
