"""The operations of a decoder layer between its products: an interface, and the torch backend.

Shapes: T tokens, N experts, C of them chosen by each token, E hidden size.

Shapes: T tokens, E hidden size, H heads, K key heads, D head size, I neurons, S rows of logits.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch.nn import functional

from engine.cache.kv_pool import PagedKVPool
from engine.model.draws import Draw, drawn, log_totals
from engine.model.rope import Rotation, rotate
from serving_core.differences import GELU_TANH, SILU


class Routing(NamedTuple):
    """T * C rows, sorted by their expert and then by their token."""

    tokens: torch.Tensor  # [T * C] int64: of each row
    starts: torch.Tensor  # [N + 1] int32, in host memory: rows from starts[n] up to starts[n + 1] are for expert n
    places: torch.Tensor  # [T, C] int64: a token's rows, the likeliest expert's first
    weights: torch.Tensor  # [T, C] float32: and what these count


class Shared(NamedTuple):
    """What the expert that all tokens take gives, and how far its gate is open."""

    outputs: torch.Tensor  # [T, E]
    logits: torch.Tensor  # [T, 1]


class Dispatch(Protocol):
    """A token's results depend on that token alone."""

    def route(self, logits: torch.Tensor, num_chosen: int, is_normalized: bool) -> Routing:
        """Of logits [T, N] the softmax, computed in float32, then the likeliest; their weights are made to sum up to 1
        if `is_normalized`."""

    def mix(self, rows: torch.Tensor, routing: Routing, shared: Shared | None) -> torch.Tensor:
        """rows [T * C, E] -> [T, E], added up in float32"""


class TorchDispatch:
    """On every device."""

    def route(self, logits: torch.Tensor, num_chosen: int, is_normalized: bool) -> Routing:
        num_experts = logits.shape[1]
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(num_chosen)
        if is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        counts = experts.bincount(minlength=num_experts).cpu()
        starts = functional.pad(counts.cumsum(0), (1, 0)).int()
        return Routing(order // num_chosen, starts, places.view_as(chosen), weights)

    def mix(self, rows: torch.Tensor, routing: Routing, shared: Shared | None) -> torch.Tensor:
        # One product and one sum after the other, each rounded alone: so in one way only.
        mixed = torch.zeros((len(routing.places), rows.shape[1]), device=rows.device)
        for places, weights in zip(routing.places.unbind(1), routing.weights.unbind(1), strict=True):
            mixed += rows.index_select(0, places).float() * weights.unsqueeze(1)
        if shared is not None:
            mixed += shared.outputs.float() * _sigmoid(shared.logits)
        return mixed.to(rows.dtype)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """[T, 1] float32. (torch.sigmoid computes the last rows in another way than those before.)"""
    return functional.pad(logits.float(), (0, 1)).softmax(-1)[:, :1]


class HeadNorms(NamedTuple):
    """The norms of single queries and keys, before they are rotated; weights [D]."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float


def add_scaled(x: torch.Tensor, delta: torch.Tensor | None, scale: float) -> None:
    """Adds a delta, if there is one, so many times to x. (Not by add's alpha, which is rounded to their dtype.)"""
    if delta is not None:
        x.add_(delta if scale == 1 else delta * scale)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, centers: bool) -> torch.Tensor:
    """As `Steps.norm` without a delta."""
    if weight.dtype != x.dtype:
        return normed(x.float(), weight, eps, centers).to(x.dtype)
    if centers:
        return functional.layer_norm(x, weight.shape, weight, None, eps)
    return functional.rms_norm(x, weight.shape, weight, eps)


def capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(score / cap) of each."""
    return (scores / cap).tanh_().mul_(cap)


Likeliest: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Of each of S rows of logits the largest number, as float32, and where it is first, as int64. Not a number counts as
larger than any."""


class Steps(Protocol):
    """All tensors of a call are of one dtype and on one device; weights of norms may be float32 instead."""

    def is_invariant(self, dtype: torch.dtype) -> bool:
        """Whether the bits of a row of this dtype depend on that row alone."""

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        delta: torch.Tensor | None = None,
        delta_scale: float = 1.0,
        centers: bool = False,
    ) -> torch.Tensor:
        """x [T, E] over its root mean square, computed in float32, times weight [E]. A delta [T, E] is first added to
        x in place, so many times. A norm that centers takes the mean of x away before."""

    def norm_onto(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Adds the norm of delta [T, E] to x [T, E]."""

    def place(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        pool: PagedKVPool,
        layer: int,
        slots: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Of heads [T, H + 2 K, D], which are queries, keys and values, norms and rotates queries and keys; writes keys
        and values to the pool at slots [T]; gives the queries [T, H, D]. `heads` is of no use afterwards."""

    def gate(self, gates_and_ups: torch.Tensor, activation: str = SILU) -> torch.Tensor:
        """The activation of the first half of the columns [T, 2 I], times the second: [T, I]."""

    def cap(self, logits: torch.Tensor, cap: float) -> None:
        """Makes of each of logits [S, vocab_size] cap * tanh(logit / cap), in place."""

    def likeliest(self, logits: torch.Tensor) -> Likeliest:
        """Of logits [S, vocab_size]."""

    def draw(self, logits: torch.Tensor, highest: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """The tokens drawn, int64 [len(draws)], from rows of logits [S, vocab_size], of which `highest` [S], float32,
        has the largest numbers. Of a row where that is not finite, any token. A draw depends on its own row alone, and
        a token of -inf does not come."""

    def log_totals(self, logits: torch.Tensor, highest: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Of each of these rows the logarithm of the sum of e^logit, float64 [len(rows)]; of logits and `highest` as in
        `draw`, and as there each by itself. A row where that is not finite has not a number."""


class TorchSteps:
    """The steps on every device."""

    def is_invariant(self, dtype: torch.dtype) -> bool:
        return False

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        delta: torch.Tensor | None = None,
        delta_scale: float = 1.0,
        centers: bool = False,
    ) -> torch.Tensor:
        add_scaled(x, delta, delta_scale)
        return normed(x, weight, eps, centers)

    def norm_onto(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        x.add_(self.norm(delta, weight, eps))

    def place(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        pool: PagedKVPool,
        layer: int,
        slots: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        num_kv_heads = pool.layout.num_kv_heads
        num_heads = heads.shape[1] - 2 * num_kv_heads
        rotated, values = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if norms is not None:
            queries = self.norm(rotated[:, :num_heads], norms.query_weight, norms.eps)
            keys = self.norm(rotated[:, num_heads:], norms.key_weight, norms.eps)
            rotated = torch.cat((queries, keys), dim=1)
        rotated = self.rotate(rotated, rotation)
        pool.store(layer, slots, rotated[:, num_heads:], values)
        return rotated[:, :num_heads]

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Heads [T, N, D] turned by the tables of their positions."""
        return rotate(heads, *rotation)

    def gate(self, gates_and_ups: torch.Tensor, activation: str = SILU) -> torch.Tensor:
        gates, ups = gates_and_ups.chunk(2, -1)
        return _activated(gates, activation).mul_(ups)

    def cap(self, logits: torch.Tensor, cap: float) -> None:
        logits.copy_(capped(logits.float(), cap))

    def likeliest(self, logits: torch.Tensor) -> Likeliest:
        highest, tokens = logits.max(dim=-1)
        return highest.float(), tokens

    def draw(self, logits: torch.Tensor, highest: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        return drawn(logits, highest, draws)

    def log_totals(self, logits: torch.Tensor, highest: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return log_totals(logits, highest, rows)


def _activated(gates: torch.Tensor, activation: str) -> torch.Tensor:
    return functional.gelu(gates, approximate="tanh") if activation == GELU_TANH else functional.silu(gates)
