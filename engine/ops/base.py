"""Define the ops of a decoder between its matrix products, and compute them with torch.

Shapes: T tokens, E hidden size, H heads, K key heads, D head size, I neurons, S rows of logits, N experts, C experts
chosen by each token.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.nn import functional

from engine.cache.kv_pool import PagedKVPool
from engine.ops.rope import Rotation, rotate
from engine.ops.topk_topp import RowSampling, log_totals, sample_rows
from serving_core.model_files.differences import GELU_TANH, SILU


class Norm(NamedTuple):
    """A root mean square norm, computed in float32."""

    weight: torch.Tensor  # [E], of the rows' dtype or float32
    eps: float
    delta_scale: float = 1.0  # factor of a delta that is added before the norm
    centers: bool = False  # subtract the mean first


class HeadNorms(NamedTuple):
    """The norms of single queries and keys before rotation; weights [D]."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float


class KVSlots(NamedTuple):
    """The places of a step's keys and values in one layer of the KV pool."""

    pool: PagedKVPool
    layer: int
    slots: torch.Tensor  # [T] int64


class Routing(NamedTuple):
    """T * C rows, sorted by expert and then by token."""

    tokens: torch.Tensor  # [T * C] int64: token of each row
    starts: torch.Tensor  # [N + 1] int32: rows starts[n] up to starts[n + 1] are for expert n
    places: torch.Tensor  # [T, C] int64: a token's rows, the likeliest expert's first
    weights: torch.Tensor  # [T, C] float32: weights of these rows


class Shared(NamedTuple):
    """The output of the shared expert, and its gate's logits."""

    outputs: torch.Tensor  # [T, E]
    logits: torch.Tensor  # [T, 1]


Likeliest: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The largest number (float32) and its first index (int64) of each of S rows of logits. NaN counts as the largest."""


class Logits(NamedTuple):
    """The logits [S, vocab_size] of the wanted rows of a step, or an embedder's hidden states."""

    rows: torch.Tensor
    likeliest: Likeliest | None = None  # if already known


class Ops:
    """The ops, computed with torch on any device. A backend overrides those that it computes faster.

    All tensors of a call have one dtype and one device; weights of norms may be float32 instead.
    """

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        """Return whether the bits of each result row depend on its own row alone, for rows of this dtype."""
        return False

    def norm(self, x: torch.Tensor, norm: Norm, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add delta [T, E] times `norm.delta_scale` to x [T, E] in place, if given, and return the norm of x."""
        add_scaled(x, delta, norm.delta_scale)
        return normed(x, norm)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> None:
        """Add the norm of delta [T, E] to x [T, E] in place."""
        x.add_(self.norm(delta, norm))

    def rotate_and_store(
        self, heads: torch.Tensor, rotation: Rotation, kv: KVSlots, norms: HeadNorms | None = None
    ) -> torch.Tensor:
        """Norm and rotate the queries and keys of heads [T, H + 2 K, D], and store keys and values in the KV pool.

        Without `norms` they are only rotated. Returns the queries [T, H, D]. `heads` must not be used afterwards.
        """
        num_kv_heads = kv.pool.layout.num_kv_heads
        num_heads = heads.shape[1] - 2 * num_kv_heads
        rotated, values = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if norms is not None:
            queries = self.norm(rotated[:, :num_heads], Norm(norms.query_weight, norms.eps))
            keys = self.norm(rotated[:, num_heads:], Norm(norms.key_weight, norms.eps))
            rotated = torch.cat((queries, keys), dim=1)
        rotated = self.rotate(rotated, rotation)
        kv.pool.store(kv.layer, kv.slots, rotated[:, num_heads:], values)
        return rotated[:, :num_heads]

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Return heads [T, N, D] rotated by their positions' cosines and sines, as a new tensor.

        The elements of a pair are half a head apart.
        """
        return rotate(heads, *rotation)

    def gate(self, gates_and_ups: torch.Tensor, activation: str = SILU) -> torch.Tensor:
        """Return [T, I]: the activation of the first half of the columns of gates_and_ups [T, 2 I], times the rest."""
        gates, ups = gates_and_ups.chunk(2, -1)
        return _activated(gates, activation).mul_(ups)

    def route(self, logits: torch.Tensor, num_chosen: int, is_normalized: bool) -> Routing:
        """Choose num_chosen experts for each token: the likeliest by the softmax, in float32, of its logits [T, N].

        If `is_normalized`, a token's weights sum to 1. A token's routing depends on that token alone. The host does not
        wait for a device.
        """
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(num_chosen)
        if is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        numbers = torch.arange(logits.shape[1] + 1, device=order.device)
        starts = torch.searchsorted(experts[order], numbers, out_int32=True)
        return Routing(order // num_chosen, starts, places.view_as(chosen), weights)

    def mix(self, rows: torch.Tensor, routing: Routing, shared: Shared | None) -> torch.Tensor:
        """Return each token's sum [T, E] of its C experts' rows [T * C, E] by their weights.

        The shared expert's output times the sigmoid of its logits is added, if given. Added in float32, returned in the
        dtype of `rows`. A token's sum depends on that token alone.
        """
        # Products and sums are each rounded separately, so that the result is unique.
        mixed = torch.zeros((len(routing.places), rows.shape[1]), device=rows.device)
        for places, weights in zip(routing.places.unbind(1), routing.weights.unbind(1), strict=True):
            mixed += rows.index_select(0, places).float() * weights.unsqueeze(1)
        if shared is not None:
            mixed += shared.outputs.float() * _sigmoid(shared.logits)
        return mixed.to(rows.dtype)

    def cap(self, logits: torch.Tensor, cap: float) -> None:
        """Replace each of the logits [S, vocab_size] by cap * tanh(logit / cap), in place."""
        logits.copy_(capped(logits.float(), cap))

    def likeliest(self, logits: torch.Tensor) -> Likeliest:
        """Return the maximum of each row of logits [S, vocab_size], and the token that has it."""
        highest, tokens = logits.max(dim=-1)
        return highest.float(), tokens

    def sample(self, logits: torch.Tensor, highest: torch.Tensor, samplings: Sequence[RowSampling]) -> torch.Tensor:
        """Sample a token for each of `samplings` from its row of logits [S, vocab_size]; int64 [len(samplings)].

        `highest` [S], float32, holds the maximum of each row; a row without a finite maximum gets any token. A token
        depends on its own row alone, and never has the logit -inf.
        """
        return sample_rows(logits, highest, samplings)

    def log_totals(self, logits: torch.Tensor, highest: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the logarithm of the sum of e^logit of each row that `rows` numbers, float64 [len(rows)].

        `highest` [S], float32, holds the maximum of each row of logits [S, vocab_size]. Each row is independent of the
        others. A row without a finite maximum gets NaN.
        """
        return log_totals(logits, highest, rows)


def add_scaled(x: torch.Tensor, delta: torch.Tensor | None, scale: float) -> None:
    """Add delta times `scale` to x in place; do nothing if delta is None.

    (Not with add's alpha, which is rounded to their dtype.)
    """
    if delta is not None:
        x.add_(delta if scale == 1 else delta * scale)


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the norm of x [T, E] in the dtype of x, computed in the weights' dtype if that differs."""
    weight, eps = norm.weight, norm.eps
    if weight.dtype != x.dtype:
        return normed(x.float(), norm).to(x.dtype)
    if norm.centers:
        return functional.layer_norm(x, weight.shape, weight, None, eps)
    return functional.rms_norm(x, weight.shape, weight, eps)


def capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(score / cap) of each score."""
    return (scores / cap).tanh_().mul_(cap)


def _activated(gates: torch.Tensor, activation: str) -> torch.Tensor:
    return functional.gelu(gates, approximate="tanh") if activation == GELU_TANH else functional.silu(gates)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """Return [T, 1] float32. (torch.sigmoid computes the last rows differently from the others.)"""
    return functional.pad(logits.float(), (0, 1)).softmax(-1)[:, :1]
