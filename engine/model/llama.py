"""The decoder of the Llama family: Llama, Mistral, Qwen2 and Qwen3.

Shapes: T tokens of a batch, S wanted rows, E hidden size, H heads, K key heads, D head size. H and K are those of
this rank; of what several ranks compute in part, two sums over them a layer make the whole.
Every module's parameters carry the names of the Hugging Face checkpoint, less the leading "model.".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from engine.attention.paged import Attention
from engine.forward_batch import ForwardBatch
from engine.invariant import Rotary, TiledRotary, Tiling, are_invariant, invariant_steps
from engine.model.layers import Embedding, Layer, Linear, Packed, RMSNorm, RowParallel, SwiGLU
from engine.model.rope import RotaryEmbedding, Rotation
from engine.model.steps import HeadNorms, Steps
from engine.native.steps import choose_steps
from engine.parallel import RankGroup
from serving_core.model_config import ModelConfig
from serving_core.requests import OnLayer
from serving_core.sharding import Shard, share_of, whole

# Every report interrupts a core that computes: after each layer they cost a tenth of a prefill, every eighth 3 %.
LAYERS_PER_REPORT: Final = 8


@dataclass(frozen=True, slots=True)
class Pass:
    """What all layers need to know of one pass through the decoder."""

    batch: ForwardBatch
    rotation: Rotation
    attention: Attention
    plans: dict[int | None, Any]  # of `attention`, for each window
    steps: Steps


class SelfAttention(nn.Module):
    """Projections, rotation, the write into the pool and the attention over it."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, group: RankGroup) -> None:
        super().__init__()
        self.layer: Final = layer
        self.window: Final = config.sliding_windows[layer]
        self._head_dim = config.head_dim
        queries, keys = shard.query_heads.times(config.head_dim), shard.kv_heads.times(config.head_dim)
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv_proj = Linear(whole(config.hidden_size), parts, config.qkv_bias)
        self.o_proj = RowParallel(queries, "o_proj", config.hidden_size, config.o_bias, shard, group)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms of single heads, in models that have them."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """x [T, E] -> [T, E]"""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self._head_dim)  # [T, H + 2 K, D]
        attention = now.attention
        queries = now.steps.place(heads, now.rotation, attention.pool, self.layer, now.batch.slots, self.head_norms)
        attended = attention.attend(queries, self.layer, now.plans[self.window])
        projected: torch.Tensor = self.o_proj(attended.flatten(1))
        return projected


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual around."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, group: RankGroup) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer, shard, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, shard, config.mlp_bias, group)

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None, now: Pass) -> torch.Tensor:
        """Changes x [T, E] in place. What it gives, like `delta` of the layer before, is still to be added to x: the
        next norm does that as it reads x."""
        delta = self.self_attn(self.input_layernorm(x, now.steps, delta), now)
        return self.mlp(self.post_attention_layernorm(x, now.steps, delta), now.steps)  # type: ignore[no-any-return]


class LlamaDecoder(nn.Module):
    """One rank's part of a model. To be built on the meta device and filled by engine.model.weights."""

    def __init__(self, config: ModelConfig, device: torch.device, shard: Shard, group: RankGroup) -> None:
        """`device` is where it will compute, `shard` the part of the group's rank."""
        super().__init__()
        self._group = group
        self._vocabulary_widths = [len(share_of(config.vocab_size, rank, group.size)) for rank in range(group.size)]
        self.windows: Final = frozenset(config.sliding_windows)
        self.steps = choose_steps(device)
        self.rotary: Rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        tied = config.tie_word_embeddings
        self.embed_tokens = Embedding(shard.vocabulary, config.hidden_size, group, is_head=tied)
        self.lm_head = None if tied else Linear(whole(config.hidden_size), {"lm_head": shard.vocabulary}, bias=False)
        layers = (DecoderLayer(config, layer, shard, group) for layer in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def make_invariant(self, dtype: torch.dtype, device: torch.device) -> None:
        """To be called once filled: from then on the bits of a row depend on no other, if its attention's do not
        either."""
        tiling = Tiling(device, dtype)
        for module in self.modules():
            if isinstance(module, Layer):
                module.make_invariant(tiling)
        self.steps = invariant_steps(self.steps, dtype)
        self.rotary = TiledRotary(self.rotary, device)

    @property
    def is_invariant(self) -> bool:
        """Whether the bits of a row depend on no other, if its attention's do not either."""
        layers = (module for module in self.modules() if isinstance(module, Layer))
        return are_invariant(self.steps, self.norm.weight.dtype) and all(layer.is_invariant for layer in layers)

    @property
    def is_whole(self) -> bool:
        """Whether no other rank has a part of the model."""
        return self._group.size == 1

    @property
    def head(self) -> Packed | None:
        """What computes the logits; None: a plain weight does."""
        return self.embed_tokens.matrix if self.lm_head is None else self.lm_head.matrix

    @property
    def some_layers(self) -> list[DecoderLayer]:
        """One of each window and the last, in their order."""
        layers: list[DecoderLayer] = list(self.layers)  # type: ignore[arg-type]
        first = {layer.self_attn.window: place for place, layer in reversed(list(enumerate(layers)))}
        return [layers[place] for place in sorted({*first.values(), len(layers) - 1})]

    def forward(
        self,
        batch: ForwardBatch,
        attention: Attention,
        on_layer: OnLayer | None = None,
        layers: Sequence[DecoderLayer] | None = None,
    ) -> torch.Tensor | None:
        """Writes the batch's keys and values into the pool. Gives the logits [S, vocab_size] of the wanted rows on
        rank 0, None on the others. Goes through all layers, unless some are given to try things out."""
        x = self.embed_tokens(batch.token_ids)
        delta = None
        now = Pass(
            batch,
            self.rotary.tables(batch.positions, x.dtype),
            attention,
            {window: attention.plan(batch, window) for window in self.windows},
            self.steps,
        )
        for num_done, layer in enumerate(layers or self.layers, 1):
            delta = layer(x, delta, now)
            if on_layer is not None and (num_done % LAYERS_PER_REPORT == 0 or num_done == len(self.layers)):
                on_layer(num_done)
        assert delta is not None, "a decoder without layers"
        wanted = batch.logit_rows
        x = self.norm(x.index_select(0, wanted), self.steps, delta.index_select(0, wanted))
        logits = self.embed_tokens.logits(x) if self.lm_head is None else self.lm_head(x)
        return self._group.gather_columns(logits, self._vocabulary_widths)
