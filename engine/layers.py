"""The building blocks of the decoder. Parameters carry the names of the Hugging Face checkpoint.

A parameter may hold a part of its tensors: one rank's. `sources` of a layer says which.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from engine.parallel import RankGroup
from engine.sharding import Extent, Shard, whole


class Source(NamedTuple):
    """A tensor of the checkpoint, and which part of each of its dimensions a parameter takes.

    `name` is that of the module in the checkpoint, beside the module that holds the parameter; empty for itself.
    """

    name: str
    extents: tuple[Extent, ...]


class Layer(nn.Module):
    """A module with parameters of its own."""

    def sources(self, parameter: str) -> Sequence[Source]:
        """What fills a parameter, one below the other. Here: one tensor of its own name and shape."""
        return [Source("", tuple(map(whole, getattr(self, parameter).shape)))]


class Embedding(Layer):
    """One vector for each token id, of which each rank has a share of the ids."""

    def __init__(self, vocabulary: Extent, size: int, group: RankGroup) -> None:
        super().__init__()
        # (torch's own embedding draws random values, on the meta device too, at half a second.)
        self.weight = nn.Parameter(torch.empty(len(vocabulary.held), size))
        self._vocabulary = vocabulary
        self._group = group

    def sources(self, parameter: str) -> Sequence[Source]:
        return [Source("", (self._vocabulary, whole(self.weight.shape[1])))]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] -> [T, size], on every rank"""
        if self._vocabulary.is_whole:
            return functional.embedding(ids, self.weight)
        rows = ids - self._vocabulary.held.start
        elsewhere = (rows < 0) | (rows >= len(self._vocabulary.held))
        vectors = functional.embedding(rows.masked_fill_(elsewhere, 0), self.weight)
        vectors.masked_fill_(elsewhere.unsqueeze(1), 0)
        self._group.all_reduce(vectors)
        return vectors


class RMSNorm(Layer):
    """Root mean square norm over the last dimension, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._shape = (size,)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self._shape, self.weight, self._eps)


class Linear(Layer):
    """Projections of one input, computed as one; `parts` are their names in the checkpoint and their outputs.

    With a part of the inputs or outputs it computes that part alone. Of a sum over ranks only one may add the bias.
    """

    def __init__(self, inputs: Extent, parts: Mapping[str, Extent], bias: bool, adds_bias: bool = True) -> None:
        super().__init__()
        self._inputs = inputs
        self._parts = parts
        self._adds_bias = bias and adds_bias
        num_outputs = sum(len(part.held) for part in parts.values())
        self.weight = nn.Parameter(torch.empty(num_outputs, len(inputs.held)))
        self.bias = nn.Parameter(torch.empty(num_outputs if adds_bias else 0)) if bias else None
        self._packed: torch.Tensor | None = None

    def sources(self, parameter: str) -> Sequence[Source]:
        if parameter == "weight":
            return [Source(name, (outputs, self._inputs)) for name, outputs in self._parts.items()]
        held = [outputs if self._adds_bias else Extent(outputs.total, range(0)) for outputs in self._parts.values()]
        return [Source(name, (outputs,)) for name, outputs in zip(self._parts, held, strict=True)]

    def pack(self) -> None:
        """Turns loaded bfloat16 weights on a CPU into oneDNN's own layout, in which small batches are twice as fast;
        the plain weights are let go. Elsewhere it does nothing."""
        weight = self.weight
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _CAN_PACK:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
            del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self._adds_bias else None
        if self._packed is None:
            return functional.linear(x, self.weight, bias)
        projected: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return projected


_CAN_PACK: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-untyped-call]


class RowParallel(Linear):
    """A projection of inputs of which each rank has a part; its output is whole on every rank."""

    def __init__(self, inputs: Extent, name: str, num_outputs: int, bias: bool, shard: Shard, group: RankGroup) -> None:
        super().__init__(inputs, {name: whole(num_outputs)}, bias, adds_bias=shard.rank == 0)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = super().forward(x)
        self._group.all_reduce(projected)
        return projected


class SwiGLU(nn.Module):
    """Gated feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, shard: Shard, bias: bool, group: RankGroup) -> None:
        super().__init__()
        parts = {"gate_proj": shard.neurons, "up_proj": shard.neurons}
        self.gate_up_proj = Linear(whole(hidden_size), parts, bias)
        self.down_proj = RowParallel(shard.neurons, "down_proj", hidden_size, bias, shard, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        projected: torch.Tensor = self.down_proj(functional.silu(gate).mul_(up))
        return projected
