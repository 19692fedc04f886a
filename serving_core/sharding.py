"""Define which part of a model each rank of a node holds. Torch-free.

The ranks of a node are numbered stage by stage. Each stage holds a run of layers; the first stage also holds the
embedding and the last one the head. Within a stage a rank holds a run of KV heads, their query heads, and runs of the
feed-forward's neurons and of the vocabulary. Runs are equal or differ by one; no size has to divide another. With fewer
KV heads than ranks, neighboring ranks hold the same KV head and divide its query heads.
"""

from dataclasses import dataclass
from typing import Final

from serving_core.errors import SettingsError
from serving_core.layout import KVLayout
from serving_core.model_files.config import ModelConfig

MOST_RANKS: Final = 64  # per node


@dataclass(frozen=True, slots=True)
class Extent:
    """One dimension of a tensor: its total length, and the run of it that a rank holds."""

    total: int
    held: range

    @property
    def is_whole(self) -> bool:
        return len(self.held) == self.total

    def times(self, width: int) -> "Extent":
        """Return the dimension with each element replaced by `width` elements, as a head is in a projection."""
        return Extent(self.total * width, range(self.held.start * width, self.held.stop * width))


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model."""

    rank: int  # within its stage
    query_heads: Extent
    kv_heads: Extent
    neurons: Extent  # of the feed-forward layers
    vocabulary: Extent
    layers: Extent  # the layers of its stage

    @property
    def is_first(self) -> bool:
        """Return whether its stage holds the embedding."""
        return self.layers.held.start == 0

    @property
    def is_last(self) -> bool:
        """Return whether its stage holds the head."""
        return self.layers.held.stop == self.layers.total


def whole(total: int) -> Extent:
    """Return the extent of an undivided dimension of this length."""
    return Extent(total, range(total))


def shard_of(config: ModelConfig, rank: int, tp_size: int, pp_size: int = 1) -> Shard:
    """Return the part of a model that a rank holds on a node of `pp_size` stages of `tp_size` ranks each.

    `rank` is numbered over the node. Raises ValueError for sizes below 1.
    """
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    layers = Extent(config.num_layers, stage_layers(rank, tp_size, pp_size, config.num_layers))
    rank %= tp_size
    return Shard(
        rank,
        query_heads=Extent(num_heads, query_head_range(rank, tp_size, num_heads, num_kv_heads)),
        kv_heads=Extent(num_kv_heads, head_range(rank, tp_size, num_kv_heads)),
        neurons=Extent(config.intermediate_size, share_of(config.intermediate_size, rank, tp_size)),
        vocabulary=Extent(config.vocab_size, share_of(config.vocab_size, rank, tp_size)),
        layers=layers,
    )


def is_first_holder(shard: Shard, tp_size: int) -> bool:
    """Return whether no earlier rank of the stage holds the same KV heads as this shard."""
    held = shard.kv_heads
    return shard.rank == 0 or head_range(shard.rank - 1, tp_size, held.total) != held.held


def ranks_text(tp_size: int, pp_size: int) -> str:
    """Return the flags that set a node's number of ranks, with their values, as the beginning of a sentence."""
    text = f"--tensor-parallel-size is {tp_size}"
    return text if pp_size == 1 else f"{text}, --pipeline-parallel-size is {pp_size}"


def check_num_ranks(tp_size: int, pp_size: int) -> None:
    """Raise SettingsError if a node would have more than MOST_RANKS ranks."""
    if tp_size * pp_size > MOST_RANKS:
        raise SettingsError(f"{ranks_text(tp_size, pp_size)}, and {MOST_RANKS} ranks are the most")


def check_tp_size(config: ModelConfig, tp_size: int) -> None:
    """Raise SettingsError unless each of `tp_size` ranks gets an attention head and a share of every divided matrix.

    One head of a model that transformers computes may stand for none, as in a model of recurrent layers alone.
    """
    limits = {
        "attention heads": tp_size if config.is_transformers and config.num_heads == 1 else config.num_heads,
        "feed-forward neurons": config.intermediate_size,
        "tokens in its vocabulary": config.vocab_size,
    }
    if config.experts is not None:
        limits["neurons in an expert"] = config.experts.intermediate_size
        limits["neurons in a shared expert"] = config.experts.shared_size or tp_size
    for what, limit in limits.items():
        if tp_size > limit:
            raise SettingsError(f"the model has {limit} {what}, which cannot be divided over {tp_size} ranks")


def check_pp_size(config: ModelConfig, pp_size: int) -> None:
    """Raise SettingsError unless each of `pp_size` stages gets at least one layer."""
    if pp_size > config.num_layers:
        raise SettingsError(f"the model has {config.num_layers} layers, which cannot be divided over {pp_size} stages")


def stage_layers(rank: int, tp_size: int, pp_size: int, num_layers: int) -> range:
    """Return the layers, numbered over the whole model, of the stage of a rank.

    `rank` is numbered over the node. Raises ValueError for sizes below 1.
    """
    if tp_size < 1 or pp_size < 1:
        raise ValueError(f"{pp_size} stages of {tp_size} ranks: both must be at least 1")
    return share_of(num_layers, rank // tp_size, pp_size)


def rank_layout(layout: KVLayout, rank: int, tp_size: int, pp_size: int) -> KVLayout:
    """Return a rank's part of a whole model's KV layout; `rank` is numbered over the node.

    Each of the `pp_size` stages must have at least one layer. Raises ValueError for sizes below 1.
    """
    layers = stage_layers(rank, tp_size, pp_size, layout.num_layers)
    heads = head_range(rank % tp_size, tp_size, layout.num_kv_heads)
    return layout.with_layers(layout.layers[layers.start : layers.stop]).with_heads(len(heads))


def share_of(total: int, rank: int, size: int) -> range:
    """Return run number `rank` of `size` runs that partition range(total) and whose lengths differ by at most one."""
    return range(rank * total // size, (rank + 1) * total // size)


def head_range(rank: int, tp_size: int, num_kv_heads: int) -> range:
    """Return the KV heads, numbered over the whole model, that one rank of `tp_size` holds.

    With heads >= ranks the ranks partition the heads; with fewer heads, each rank holds one head, and every head is on
    one or more neighboring ranks. Raises ValueError for sizes below 1.
    """
    if tp_size < 1 or num_kv_heads < 1:
        raise ValueError(f"{num_kv_heads} KV heads cannot be split over {tp_size} ranks: both must be at least 1")
    start, stop = rank * num_kv_heads // tp_size, (rank + 1) * num_kv_heads // tp_size
    return range(start, max(start + 1, stop))


def query_head_range(rank: int, tp_size: int, num_heads: int, num_kv_heads: int) -> range:
    """Return the query heads that one rank of `tp_size` computes. Each is on one rank, which holds its KV head.

    `num_heads` is a multiple of `num_kv_heads`. With num_heads >= tp_size every rank has a query head. Raises
    ValueError for sizes below 1.
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
    """Return the number of KV heads of the rank that holds the most."""
    return -(-num_kv_heads // tp_size)
