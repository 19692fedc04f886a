"""What each rank of a node holds of a model. Torch-free.

A rank holds a run of KV heads, the query heads that read them, and equal runs (or runs that differ by one) of the
feed-forward's neurons and of the vocabulary. Where there are fewer KV heads than ranks, neighbouring ranks hold the
same one and divide its query heads. No size has to divide another.
"""

from dataclasses import dataclass

from serving_core.errors import SettingsError
from serving_core.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Extent:
    """One dimension of a tensor: its whole length, and the run of it that a rank holds."""

    total: int
    held: range

    @property
    def is_whole(self) -> bool:
        return len(self.held) == self.total

    def times(self, width: int) -> "Extent":
        """The dimension in which each place is `width` places wide, such as a head in a projection."""
        return Extent(self.total * width, range(self.held.start * width, self.held.stop * width))


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model."""

    rank: int
    query_heads: Extent
    kv_heads: Extent
    neurons: Extent  # of the feed-forward layers
    vocabulary: Extent


def whole(total: int) -> Extent:
    """A dimension that is not divided."""
    return Extent(total, range(total))


def shard_of(config: ModelConfig, rank: int, tp_size: int) -> Shard:
    """What this rank of tp_size holds. Raises ValueError for a tp_size below 1."""
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    return Shard(
        rank,
        query_heads=Extent(num_heads, query_head_range(rank, tp_size, num_heads, num_kv_heads)),
        kv_heads=Extent(num_kv_heads, head_range(rank, tp_size, num_kv_heads)),
        neurons=Extent(config.intermediate_size, share_of(config.intermediate_size, rank, tp_size)),
        vocabulary=Extent(config.vocab_size, share_of(config.vocab_size, rank, tp_size)),
    )


def check_tp_size(config: ModelConfig, tp_size: int) -> None:
    """Raises SettingsError unless every rank gets a share of everything that is divided."""
    limits = {
        "attention heads": config.num_heads,
        "feed-forward neurons": config.intermediate_size,
        "tokens in its vocabulary": config.vocab_size,
    }
    for what, limit in limits.items():
        if tp_size > limit:
            raise SettingsError(f"the model has {limit} {what}, which cannot be divided over {tp_size} ranks")


def share_of(total: int, rank: int, size: int) -> range:
    """Run number `rank` of `size` runs that partition range(total) and whose lengths differ by one at most."""
    return range(rank * total // size, (rank + 1) * total // size)


def head_range(rank: int, tp_size: int, num_kv_heads: int) -> range:
    """The KV heads, counted over the whole model, that one rank of tp_size holds.

    With heads >= ranks the ranks partition the heads; with fewer, each rank holds one head, and every head is on
    one or more neighbouring ranks. Raises ValueError for sizes below 1.
    """
    if tp_size < 1 or num_kv_heads < 1:
        raise ValueError(f"{num_kv_heads} KV heads cannot be split over {tp_size} ranks: both must be at least 1")
    start, stop = rank * num_kv_heads // tp_size, (rank + 1) * num_kv_heads // tp_size
    return range(start, max(start + 1, stop))


def query_head_range(rank: int, tp_size: int, num_heads: int, num_kv_heads: int) -> range:
    """The query heads that one rank of tp_size computes: each is on one rank, which holds its KV head.

    num_heads is a multiple of num_kv_heads. With num_heads >= tp_size no rank goes without.
    """
    kv_heads = head_range(rank, tp_size, num_kv_heads)
    group_size = num_heads // num_kv_heads
    first = kv_heads.start * group_size
    if num_kv_heads >= tp_size:
        return range(first, first + len(kv_heads) * group_size)
    first_holder = -(-kv_heads.start * tp_size // num_kv_heads)
    end_of_holders = -(-kv_heads.stop * tp_size // num_kv_heads)
    share = share_of(group_size, rank - first_holder, end_of_holders - first_holder)
    return range(first + share.start, first + share.stop)


def most_kv_heads(tp_size: int, num_kv_heads: int) -> int:
    """KV heads of the rank that holds the most."""
    return -(-num_kv_heads // tp_size)
