"""The reshard plan: which KV heads go from which prefill rank to which decode rank.

Each node splits the KV heads over its ranks by `head_range`:
- heads >= ranks: a partition into runs of equal length, or of lengths that differ by one where the ranks do not
  divide the heads;
- heads < ranks: one head on each rank, every head on one or more neighbouring ranks.
So any two sizes can be paired. Only sizes below 1 are refused.
"""

from dataclasses import dataclass

from kv_transfer.errors import TransferError
from serving_core.sharding import head_range


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """One copy for every block and layer. Both ranges are of equal length and count from the rank's own first head."""

    source_rank: int
    destination_rank: int
    source_heads: range
    destination_heads: range


def plan_copies(prefill_tp: int, decode_tp: int, num_kv_heads: int) -> list[HeadCopy]:
    """The copies that give every decode rank each of its heads exactly once, as few and as long as can be, by decode
    rank. There is at most one for each pair of ranks. Raises TransferError for sizes below 1.

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


def describe(prefill_tp: int, decode_tp: int, num_kv_heads: int) -> list[str]:
    """The plan in words, a line for each fact: what every rank holds, every lane with its share of the bytes that are
    sent, and how many these are. Raises TransferError for sizes below 1."""
    copies = plan_copies(prefill_tp, decode_tp, num_kv_heads)
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


def _within(start: int, stop: int, heads: range) -> range:
    return range(start - heads.start, stop - heads.start)
