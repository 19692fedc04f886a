"""Define the decoder of the Llama family: Llama, Mistral, Qwen2 and Qwen3, and the variants in
serving_core.model_files.differences.

Shapes: T tokens of a batch, S wanted rows, E hidden size, H heads, K key heads, D head size. H and K are this rank's;
two sums per layer over the ranks complete the partial results. The first pipeline stage begins with the embedding, and
the last one ends with norm and head. An embedder has no head. Parameters have the names of the Hugging Face checkpoint,
less the leading "model.".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import nn

from engine.attention.paged import Attention
from engine.forward_batch import ForwardBatch
from engine.model.experts import MixtureOfExperts
from engine.model.layers import (
    Deltas,
    Embedding,
    FeedForward,
    Layer,
    LayerNorm,
    Linear,
    Packed,
    RMSNorm,
    RowParallel,
    embedding,
)
from engine.model.lora import Adapters
from engine.native.shared_sums import SharedSums
from engine.ops.backends import choose_ops
from engine.ops.base import HeadNorms, KVSlots, Ops
from engine.ops.rope import RotaryEmbedding, Rotation, head_order
from engine.ops.tiled import Rotary, TiledRotary, Tiling, batch_invariant_ops
from engine.parallel import LEADER, RankGroup, Residual, residual_of
from engine.pipeline import Pipeline
from serving_core.model_files.config import ModelConfig
from serving_core.model_files.differences import Differences
from serving_core.model_files.rope import DEFAULT_THETA, DefaultRope, Rope
from serving_core.requests import OnLayer
from serving_core.sharding import Extent, Shard, is_first_holder, share_of, whole

# Each report interrupts a computing core: after every layer, reports cost a tenth of a prefill; after every eighth, 3
# %.
LAYERS_PER_REPORT: Final = 8
_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class Pass:
    """Data common to all layers in one pass through the decoder."""

    batch: ForwardBatch
    rotations: dict[Rope | None, Rotation]  # for each rope; None for layers that do not rotate
    attention: Attention
    plans: dict[int | None, Any]  # of `attention`, for each window
    ops: Ops
    residual: Residual
    deltas: Deltas | None  # None: no row uses an adapter


class SelfAttention(nn.Module):
    """Projections, rotation, the write into the pool and the attention over it."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, group: RankGroup) -> None:
        super().__init__()
        self.layer: Final = layer
        self.window: Final = config.sliding_windows[layer]
        self.rope: Final = config.rope_of(layer)
        self._head_dim = config.head_dim
        queries, keys = shard.query_heads.times(config.head_dim), shard.kv_heads.times(config.head_dim)
        self.qkv_proj = Linear(
            whole(config.hidden_size),
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            config.qkv_bias,
            stored_as="qkv_proj" if config.differences.is_fused else None,
            rows=_ordered_rows(config, shard),
        )
        self.o_proj = RowParallel(queries, "o_proj", config.hidden_size, config.o_bias, shard)
        self.q_norm = _plain_norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = _plain_norm(config, config.head_dim) if config.qk_norm else None

    @property
    def head_norms(self) -> HeadNorms | None:
        """Return the norms of single query and key heads; None in models without them."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def project(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """Return queries, keys and values, side by side in [T, (H + 2 K) D], of x [T, E]; `now` has the adapters."""
        projected: torch.Tensor = self.qkv_proj(x, now.deltas)
        return projected

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """Store keys and values of x [T, E] in the pool, attend, and return this rank's rows of the summed output.

        `now` has what the layers of a pass share.
        """
        heads = self.project(x, now).view(x.shape[0], -1, self._head_dim)  # [T, H + 2 K, D]
        attention, rotation = now.attention, now.rotations[self.rope]
        kv = KVSlots(attention.pool, self.layer, now.batch.slots)
        queries = now.ops.rotate_and_store(heads, rotation, kv, self.head_norms)
        attended = attention.attend(queries, self.layer, now.plans[self.window])
        return now.residual.summed(self.o_proj(attended.flatten(1), now.deltas))


class NormedAttention(SelfAttention):
    """Self-attention with one norm over all queries of a token and one over all its keys, across all ranks."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, group: RankGroup) -> None:
        super().__init__(config, layer, shard, group)
        self._queries, self._keys = (heads.times(config.head_dim) for heads in (shard.query_heads, shard.kv_heads))
        self.q_norm: RMSNorm = _plain_norm(config, self._queries.total)
        self.k_norm: RMSNorm = _plain_norm(config, self._keys.total)
        self._group = group
        self._gives_keys = is_first_holder(shard, group.size)

    @property
    def head_norms(self) -> HeadNorms | None:
        return None

    def project(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        projected = super().project(x, now)
        num_queries, num_keys = len(self._queries.held), len(self._keys.held)
        queries, keys = projected[:, :num_queries], projected[:, num_queries : num_queries + num_keys]
        all_queries, all_keys = self._of_all_ranks(queries, keys)
        queries.copy_(self.q_norm(all_queries, now.ops)[:, _held(self._queries)])
        keys.copy_(self.k_norm(all_keys, now.ops)[:, _held(self._keys)])
        return projected

    def _of_all_ranks(self, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather all queries and keys on every rank. Gathering the squares alone would change the bits from those of
        one rank.
        """
        if self._group.size == 1:
            return queries, keys
        together = queries.new_zeros(len(queries), self._queries.total + self._keys.total)
        all_queries, all_keys = together[:, : self._queries.total], together[:, self._queries.total :]
        all_queries[:, _held(self._queries)] = queries
        if self._gives_keys:
            all_keys[:, _held(self._keys)] = keys
        self._group.all_reduce(together)
        return all_queries, all_keys


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm and a residual connection.

    Takes this rank's rows of x [T, E] and modifies them in place. The returned delta, like `delta` of the layer before,
    is still to be added to x; None: nothing.
    """

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, group: RankGroup) -> None:
        super().__init__()
        attention = NormedAttention if config.differences.norms_projections else SelfAttention
        self.self_attn = attention(config, layer, shard, group)
        experts = config.experts
        self._feed_forward = "mlp"  # its name in the checkpoint
        if experts is None or layer in experts.dense_layers:
            stored_as = "gate_up_proj" if config.differences.is_fused else None
            activation = config.differences.activation
            self.mlp = FeedForward(config.hidden_size, shard, config.mlp_bias, stored_as, activation)
        else:
            self._feed_forward = experts.module
            self.add_module(experts.module, MixtureOfExperts(config.hidden_size, experts, shard, group.size))

    @property
    def feed_forward(self) -> FeedForward | MixtureOfExperts:
        return self._modules[self._feed_forward]  # type: ignore[return-value]

    def fed_forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """Return the feed-forward's output for x [T, E]: this rank's rows, summed over the ranks.

        `now` has what the layers of a pass share.
        """
        outputs: torch.Tensor = self.feed_forward(x, now.ops, now.residual, now.deltas)
        return outputs


class PreNormLayer(DecoderLayer):
    """A layer with norms before attention and feed-forward; the norm adds the pending delta as it reads x."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, group: RankGroup) -> None:
        super().__init__(config, layer, shard, group)
        self.input_layernorm, self.post_attention_layernorm = _norm(config), _norm(config)

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None, now: Pass) -> torch.Tensor:
        whole = now.residual.whole
        delta = self.self_attn(whole(self.input_layernorm(x, now.ops, delta)), now)
        return self.fed_forward(whole(self.post_attention_layernorm(x, now.ops, delta)), now)


class PostNormLayer(DecoderLayer):
    """A layer with norms behind attention and feed-forward, whose results are added to x.

    Some models have norms before them as well.
    """

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, group: RankGroup) -> None:
        super().__init__(config, layer, shard, group)
        has_four = config.differences.norms_inputs
        self.input_layernorm = _plain_norm(config, config.hidden_size) if has_four else None
        self.post_attention_layernorm = _plain_norm(config, config.hidden_size)
        self.pre_feedforward_layernorm = _plain_norm(config, config.hidden_size) if has_four else None
        self.post_feedforward_layernorm = _plain_norm(config, config.hidden_size)

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None, now: Pass) -> None:
        whole = now.residual.whole
        normed = x if self.input_layernorm is None else self.input_layernorm(x, now.ops)
        self.post_attention_layernorm.add_to(x, self.self_attn(whole(normed), now), now.ops)
        normed = x if self.pre_feedforward_layernorm is None else self.pre_feedforward_layernorm(x, now.ops)
        self.post_feedforward_layernorm.add_to(x, self.fed_forward(whole(normed), now), now.ops)


class ParallelLayer(DecoderLayer):
    """A layer whose attention and feed-forward read the output of one common norm.

    The norm adds the pending delta as it reads x.
    """

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, group: RankGroup) -> None:
        super().__init__(config, layer, shard, group)
        self.input_layernorm = _norm(config)

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None, now: Pass) -> torch.Tensor:
        normed = now.residual.whole(self.input_layernorm(x, now.ops, delta))
        x.add_(self.self_attn(normed, now))
        return self.fed_forward(normed, now)


class OffloadedLayers(Protocol):
    """The layers of a model whose weights are offloaded: hooks of a layer read the next ones ahead."""

    @property
    def where(self) -> str:
        """Return in words where the offloaded weights are: on disk, or in host memory."""

    @property
    def layer_bytes(self) -> Mapping[int, int]:
        """Return the bytes of each offloaded layer, by its number in the model."""

    @property
    def num_read_bytes(self) -> int:
        """Return the bytes of weights read since the start."""

    def read_alone(self) -> tuple[int, float]:
        """Read all offloaded layers once as a measurement, between steps; return the bytes and the seconds taken."""


class LlamaDecoder(nn.Module):
    """One rank's part of a decoder of the Llama family. Build it on the meta device; engine.model.weights fills it."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        shard: Shard,
        group: RankGroup,
        pipeline: Pipeline | None = None,
        min_divided_tokens: int = 0,
    ) -> None:
        """Build the rank's part `shard`, to compute on `device`.

        Without a pipeline there is one stage. The ranks divide the residual stream of steps with prefill from
        `min_divided_tokens` tokens on; 0: never.
        """
        super().__init__()
        self._group = group
        self._pipeline = pipeline
        self._min_divided_tokens = min_divided_tokens
        self.num_divided_passes = 0  # passes with sequence parallelism
        self.reuses_prefixes = True
        self._shard = shard
        self._hidden_size = config.hidden_size
        self._leaves_delta = not config.differences.norms_outputs
        self._vocabulary_widths = [len(share_of(config.vocab_size, rank, group.size)) for rank in range(group.size)]
        self.windows: Final = frozenset(config.sliding_windows[layer] for layer in shard.layers.held)
        self.ops = choose_ops(device)
        self.embeds: Final = config.embedder is not None
        differences, tied = config.differences, config.tie_word_embeddings and not self.embeds
        self.embed_tokens: Embedding | None = None
        if shard.is_first or (shard.is_last and tied):
            scale = (differences.embedding_scale, differences.rounds_embedding_scale)
            self.embed_tokens = embedding(shard.vocabulary, config.hidden_size, group, tied, shard.is_last, *scale)
        self.lm_head: Linear | None = None
        if shard.is_last and not tied and not self.embeds:
            self.lm_head = Linear(whole(config.hidden_size), {"lm_head": shard.vocabulary}, bias=False)
        layers = {str(layer): _layer_class(differences)(config, layer, shard, group) for layer in shard.layers.held}
        self.layers = nn.ModuleDict(layers)  # by their numbers in the model
        self.own_layers: Final = list(layers.values())
        self.rotaries: dict[Rope | None, Rotary] = {
            rope: _rotary(config, device, rope) for rope in {layer.self_attn.rope for layer in self.own_layers}
        }
        self.logit_softcap: Final = differences.logit_softcap
        gain = 1.0 if self.embeds else differences.logit_scale
        self.norm = _norm(config, gain) if shard.is_last else None
        self.adapters = Adapters()
        self.offloaded: OffloadedLayers | None = None
        """The layers with offloaded weights; None: all weights are on their device."""

    def make_batch_invariant(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the decoder's layers and ops batch-invariant, given batch-invariant attention. Call once, after filling.

        `dtype` and `device` are those of the activations.
        """
        tiling = Tiling(device, dtype)
        for module in self.modules():
            if isinstance(module, Layer):
                module.make_batch_invariant(tiling)
        self.ops = batch_invariant_ops(self.ops, dtype)
        self.rotaries = {rope: TiledRotary(rotary, device) for rope, rotary in self.rotaries.items()}

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        """Return whether the bits of a row of `dtype` do not depend on other rows, if attention is batch-invariant."""
        layers = (module for module in self.modules() if isinstance(module, Layer))
        return self.ops.is_batch_invariant(dtype) and all(layer.is_batch_invariant for layer in layers)

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary size over all ranks."""
        return sum(self._vocabulary_widths)

    @property
    def is_whole(self) -> bool:
        """Return whether this rank holds the whole model."""
        return self._group.size == 1 and self._pipeline is None

    @property
    def shared_sums(self) -> SharedSums | None:
        """Return the memory through which the ranks of all layers sum; None with several stages, or without it."""
        return self._group.shared if self._pipeline is None else None

    @property
    def has_experts(self) -> bool:
        """Return whether the work of a step depends on the experts that its tokens choose."""
        return bool(self._mixtures)

    def stack_experts(self) -> None:
        """On CUDA, prepare the filled layers to compute all of their experts at once, where that works."""
        for mixture in self._mixtures:
            mixture.stack()

    def awaits_routing(self, dtype: torch.dtype) -> bool:
        """Return whether the host reads which experts the tokens chose, so that no CUDA graph can hold a step of this
        dtype.
        """
        return any(mixture.awaits_routing(dtype) for mixture in self._mixtures)

    @property
    def _mixtures(self) -> list[MixtureOfExperts]:
        return [module for module in self.modules() if isinstance(module, MixtureOfExperts)]

    @property
    def head(self) -> Packed | None:
        """Return the packed weights of the head.

        None: a plain weight computes the logits, or another stage has the head.
        """
        head = self.lm_head or self.embed_tokens
        return None if head is None else head.matrix

    @property
    def some_layers(self) -> list[DecoderLayer]:
        """Return a sample of this rank's layers for trials, in order.

        It has one layer of each window, rope and kind of feed-forward, and the last layer.
        """
        layers = self.own_layers
        kinds = [(layer.self_attn.window, layer.self_attn.rope, type(layer.feed_forward)) for layer in layers]
        first = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
        return [layers[place] for place in sorted({*first.values(), len(layers) - 1})]

    def is_elsewhere(self, name: str) -> bool:
        """Return whether the checkpoint tensor of this name belongs to another pipeline stage."""
        layers = self._shard.layers
        if found := _LAYER.match(name):
            number = int(found[1])
            return number < layers.total and number not in layers.held
        if name.startswith("model.embed_tokens."):
            return not self._shard.is_first
        return name.startswith(("model.norm.", "lm_head.")) and not self._shard.is_last

    def forward(
        self,
        batch: ForwardBatch,
        attention: Attention,
        on_layer: OnLayer | None = None,
        layers: Sequence[DecoderLayer] | None = None,
    ) -> torch.Tensor | None:
        """Compute a batch and write its keys and values into the pool of `attention`.

        Returns, on rank 0 of the last stage, the logits [S, vocab_size] of the wanted rows, or an embedder's last
        hidden states [S, E]; None on every other rank. `on_layer` is called every LAYERS_PER_REPORT layers and after
        the last one. Goes through all layers unless `layers` restricts them for a trial.
        """
        residual = residual_of(batch, self._group, self._min_divided_tokens)
        self.num_divided_passes += residual.is_divided
        x, delta = self._begin(batch, residual, attention.pool.compute_dtype)
        now = Pass(
            batch,
            {rope: rotary.tables(batch.positions, x.dtype) for rope, rotary in self.rotaries.items()},
            attention,
            {window: attention.plan(batch, window) for window in self.windows},
            self.ops,
            residual,
            self.adapters.deltas_for(batch.adapted_rows) if batch.adapted_rows else None,
        )
        for num_done, layer in enumerate(layers or self.own_layers, 1):
            delta = layer(x, delta, now)
            if on_layer is not None and (num_done % LAYERS_PER_REPORT == 0 or num_done == len(self.own_layers)):
                on_layer(num_done)
        if self.norm is None:
            self._pass_on(x, delta)
            return None
        wanted = batch.logit_rows
        delta = None if delta is None else residual.picked(delta, wanted)
        x = self.norm(residual.picked(x, wanted), self.ops, delta)
        if self.embeds:
            return x if self._group.rank == LEADER else None
        return self.gather_logits(self._head_logits(x))

    def gather_logits(self, local: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [S, vocab_size] on rank 0, given those of each rank's own token ids; None on the others."""
        return self._group.gather_columns(local, self._vocabulary_widths)

    def _begin(
        self, batch: ForwardBatch, residual: Residual, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the first layer's input: this rank's rows of the tokens' embeddings, or of the output of the stage
        before.
        """
        if self._shard.is_first:
            assert self.embed_tokens is not None
            return residual.kept(self.embed_tokens(batch.token_ids)), None
        assert self._pipeline is not None
        shape = (len(residual.own), self._hidden_size)
        x = self._pipeline.receive(*shape, dtype)
        return x, self._pipeline.receive(*shape, dtype) if self._leaves_delta else None

    def _pass_on(self, x: torch.Tensor, delta: torch.Tensor | None) -> None:
        """Send x and delta separately, since the next layer adds them in its own way."""
        assert self._pipeline is not None
        assert (delta is not None) == self._leaves_delta
        self._pipeline.send(x)
        if delta is not None:
            self._pipeline.send(delta)

    def _head_logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.lm_head is not None:
            logits: torch.Tensor = self.lm_head(x)
        else:
            assert self.embed_tokens is not None
            logits = self.embed_tokens.logits(x)
        if self.logit_softcap is not None:
            self.ops.cap(logits, self.logit_softcap)
        return logits


def _layer_class(differences: Differences) -> type[DecoderLayer]:
    if differences.norms_outputs:
        return PostNormLayer
    return ParallelLayer if differences.is_parallel else PreNormLayer


def _norm(config: ModelConfig, gain: float = 1.0) -> RMSNorm:
    """Return a norm before attention, feed-forward or head."""
    differences = config.differences
    kind = LayerNorm if differences.centers_norms else RMSNorm
    return kind(config.hidden_size, config.rms_norm_eps, differences.residual_scale, gain, differences.norm_offset)


def _plain_norm(config: ModelConfig, size: int) -> RMSNorm:
    """Return a norm of heads, or one that adds no delta."""
    return RMSNorm(size, config.rms_norm_eps, offset=config.differences.norm_offset)


def _rotary(config: ModelConfig, device: torch.device, rope: Rope | None) -> RotaryEmbedding:
    if rope is None:
        return RotaryEmbedding(DefaultRope(DEFAULT_THETA), config.head_dim, device, rotary_dim=0)
    return RotaryEmbedding(rope, config.head_dim, device, config.differences.rotary_dim)


def _ordered_rows(config: ModelConfig, shard: Shard) -> list[int] | None:
    """Return the order in which the outputs of the query, key and value projection are computed; None for the stored
    order.
    """
    head_dim, differences = config.head_dim, config.differences
    if differences.rotary_dim is None and not differences.rotates_neighbours:
        return None
    assert not config.qk_norm, "a norm of single heads is in the order of the checkpoint"
    order = head_order(head_dim, differences.rotary_dim or head_dim, differences.rotates_neighbours)
    num_keys = len(shard.kv_heads.held)
    num_ordered = len(shard.query_heads.held) + num_keys
    ordered = [head * head_dim + at for head in range(num_ordered) for at in order]
    return [*ordered, *range(len(ordered), len(ordered) + num_keys * head_dim)]


def _held(extent: Extent) -> slice:
    return slice(extent.held.start, extent.held.stop)
