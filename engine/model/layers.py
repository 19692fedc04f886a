"""The building blocks of the decoder. Parameters carry the names of the Hugging Face checkpoint.

A parameter may hold a part of its tensors: one rank's. `sources` of a layer says which.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from engine.invariant import Rows, Tiling
from engine.model.residual import Residual
from engine.model.steps import Steps
from engine.native.linear import DenseMatrix
from engine.native.linear import best_variant as best_dense_variant
from engine.parallel import RankGroup
from engine.quantization.quantized_linear import QuantizedMatrix, quantized_matrix
from serving_core.settings import HEAD_BITS
from serving_core.sharding import Extent, Shard, whole


class Source(NamedTuple):
    """A tensor of the checkpoint, and which part of each of its dimensions a parameter takes.

    `name` is that of the module in the checkpoint, beside the module that holds the parameter; empty for itself.
    """

    name: str
    extents: tuple[Extent, ...]


def below_each_other(extents: Iterable[Extent]) -> list[Extent]:
    """The same runs in one dimension that has all of these, one behind the other."""
    parts = list(extents)
    starts = [0, *itertools.accumulate(part.total for part in parts)]
    return [
        Extent(starts[-1], range(start + part.held.start, start + part.held.stop))
        for start, part in zip(starts, parts, strict=False)
    ]


class Layer(nn.Module):
    """A module with parameters of its own."""

    def sources(self, parameter: str) -> Sequence[Source]:
        """What fills a parameter, one below the other. Here: one tensor of its own name and shape."""
        return [Source("", tuple(map(whole, getattr(self, parameter).shape)))]

    def pack(self, bits: int | None) -> None:
        """To be called once the parameters are filled: brings weights into the form in which they are fast, with
        `bits` in 4 or 8 bits, and lets go what is no longer needed. Here: nothing."""

    def make_invariant(self, tiling: Tiling) -> None:
        """To be called after `pack`: from then on the bits of a row's outputs depend on that row alone. Here they do
        so anyway."""

    @property
    def is_invariant(self) -> bool:
        """Whether they do; to be asked after `pack`."""
        return True

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it computes with, but for what is packed for a CPU; to be asked after `pack`."""
        return list(self.parameters(recurse=False))

    @property
    def num_bytes(self) -> int:
        """Memory that the filled layer takes."""
        return sum(parameter.nbytes for parameter in self.parameters(recurse=False))


class OneDNNMatrix:
    """bfloat16 weights on a CPU in oneDNN's own layout, in which small batches are twice as fast as with plain ones."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._bias = bias
        self.num_bytes: Final = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return projected


def _packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DenseMatrix | OneDNNMatrix | None:
    """Weights on a CPU in the form that is fastest there; None where that is their own."""
    if weight.device.type != "cpu":
        return None
    if best_dense_variant(weight.dtype) is not None:
        return DenseMatrix(weight, bias)
    return OneDNNMatrix(weight, bias) if weight.dtype == torch.bfloat16 and _HAS_ONEDNN else None


Packed: TypeAlias = DenseMatrix | OneDNNMatrix | QuantizedMatrix  # what takes the place of a plain weight
WITH_ROWS: Final = (DenseMatrix, QuantizedMatrix)  # of these, what weights can be read from again

_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-untyped-call]


def _is_native(matrix: object) -> bool:
    """Whether the bits of a row's outputs depend on that row alone already."""
    return isinstance(matrix, DenseMatrix) or (isinstance(matrix, QuantizedMatrix) and matrix.variant != "portable")


class Embedding(Layer):
    """One vector for each token id, of which each rank has a share of the ids. As the head too it gives logits, unless
    another stage has the head: then its vectors are what they would be here."""

    def __init__(
        self, vocabulary: Extent, size: int, group: RankGroup, is_head: bool = False, gives_logits: bool = True
    ) -> None:
        super().__init__()
        self._is_head = is_head
        self._gives_logits = is_head and gives_logits
        self._dtype = torch.get_default_dtype()
        self._matrix: Packed | None = None
        self._tiled: Rows | None = None
        # (torch's own embedding draws random values, on the meta device too, at half a second.)
        self.weight = nn.Parameter(torch.empty(len(vocabulary.held), size))
        self._vocabulary = vocabulary
        self._size = size
        self._group = group

    def sources(self, parameter: str) -> Sequence[Source]:
        return [Source("", (self._vocabulary, whole(self.weight.shape[1])))]

    def pack(self, bits: int | None) -> None:
        """A head's weights are quantized, or packed, and vectors then read from there where that can be."""
        self._dtype = self.weight.dtype
        if not self._is_head:
            return
        if bits is not None:
            self._matrix = quantized_matrix(self.weight.detach(), HEAD_BITS)
        elif self._gives_logits:
            self._matrix = _packed(self.weight)
        if isinstance(self._matrix, WITH_ROWS):
            del self.weight

    def make_invariant(self, tiling: Tiling) -> None:
        if not self.is_invariant:
            self._tiled = tiling.tiled(self._product, self._size, (type(self.matrix), len(self._vocabulary.held)))

    @property
    def is_invariant(self) -> bool:
        return not self._gives_logits or self._tiled is not None or _is_native(self.matrix)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self._matrix is None else self._matrix.num_bytes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] -> [T, size], on every rank"""
        if self._vocabulary.is_whole:
            return self._vectors(ids)
        rows = ids - self._vocabulary.held.start
        elsewhere = (rows < 0) | (rows >= len(self._vocabulary.held))
        vectors = self._vectors(rows.masked_fill_(elsewhere, 0))
        vectors.masked_fill_(elsewhere.unsqueeze(1), 0)
        self._group.all_reduce(vectors)
        return vectors

    @property
    def matrix(self) -> Packed | None:
        """What computes the logits; None: the plain weight does."""
        return self._matrix

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, size] -> [S, ids held], for a model whose head this is"""
        return self._product(x) if self._tiled is None else self._tiled(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) if self.matrix is None else self.matrix(x)

    def _vectors(self, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(self._matrix, WITH_ROWS):
            return self._matrix.rows(rows).to(self._dtype)
        return functional.embedding(rows, self.weight)


class ScaledEmbedding(Embedding):
    """Gives its vectors so many times. Its logits are as without."""

    def __init__(
        self,
        vocabulary: Extent,
        size: int,
        group: RankGroup,
        is_head: bool,
        gives_logits: bool,
        scale: float,
        rounds_scale: bool,
    ) -> None:
        super().__init__(vocabulary, size, group, is_head, gives_logits)
        self._scale = scale
        self._rounds_scale = rounds_scale

    def pack(self, bits: int | None) -> None:
        super().pack(bits)
        if self._rounds_scale:
            self._scale = torch.tensor(self._scale, dtype=self._dtype, device="cpu").item()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).mul_(self._scale)


def embedding(
    vocabulary: Extent,
    size: int,
    group: RankGroup,
    is_head: bool,
    gives_logits: bool,
    scale: float,
    rounds_scale: bool = False,
) -> Embedding:
    """One that gives its vectors `scale` times, which may be rounded to their dtype first."""
    if scale == 1:
        return Embedding(vocabulary, size, group, is_head, gives_logits)
    return ScaledEmbedding(vocabulary, size, group, is_head, gives_logits, scale, rounds_scale)


class RMSNorm(Layer):
    """Root mean square norm over the last dimension, computed in float32 (arXiv 1910.07467)."""

    centers = False

    def __init__(self, size: int, eps: float, delta_scale: float = 1.0, gain: float = 1.0, offset: float = 0.0) -> None:
        """`delta_scale`: how many times a delta is added first; `gain`: how many times the result is given; `offset`:
        what is added to the weights, which are float32 then."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps: Final = eps
        self.delta_scale: Final = delta_scale
        self._gain = gain
        self._offset = offset

    def pack(self, bits: int | None) -> None:
        """The gain and the offset go into the weights."""
        if self._offset:
            self.weight.data = self.weight.data.float() + self._offset
        self.weight.data.mul_(self._gain)

    def forward(self, x: torch.Tensor, steps: Steps, delta: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, size] -> [T, size], of x and the delta; x becomes their sum in place"""
        return steps.norm(x, self.weight, self.eps, delta, self.delta_scale, self.centers)

    def add_to(self, x: torch.Tensor, delta: torch.Tensor, steps: Steps) -> None:
        """Adds the norm of delta [T, size] to x [T, size]."""
        steps.norm_onto(x, delta, self.weight, self.eps)


class LayerNorm(RMSNorm):
    """The same of what the mean was taken away from (arXiv 1607.06450), without a bias."""

    centers = True


class Deltas(Protocol):
    """What adapters add to some rows of a batch."""

    def add(self, projection: "Linear", x: torch.Tensor, projected: torch.Tensor) -> None:
        """Adds to `projected`, in place, what they add to the projection of x."""


class Linear(Layer):
    """Projections of one input, computed as one; `parts` are their names in the checkpoint and their outputs.

    With a part of the inputs or outputs it computes that part alone. Of a sum over ranks only one may add the bias.
    """

    def __init__(
        self,
        inputs: Extent,
        parts: Mapping[str, Extent],
        bias: bool,
        adds_bias: bool = True,
        stored_as: str | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        """`stored_as`: the one name under which the checkpoint holds all parts, one below the other. `rows`: which of
        the outputs that are held each output is; None: they keep their order."""
        super().__init__()
        self.inputs: Final = inputs
        self.parts: Final = parts
        self.rows: Final = rows
        self._stored_as = stored_as
        self._adds_bias = bias and adds_bias
        self._is_head = "lm_head" in parts
        num_outputs = sum(len(part.held) for part in parts.values())
        self.weight = nn.Parameter(torch.empty(num_outputs, len(inputs.held)))
        self.bias = nn.Parameter(torch.empty(num_outputs if adds_bias else 0)) if bias else None
        self._matrix: Packed | None = None
        self._tiled: Rows | None = None

    def sources(self, parameter: str) -> Sequence[Source]:
        named = list(self.parts.items())
        if self._stored_as is not None:
            named = [(self._stored_as, outputs) for outputs in below_each_other(self.parts.values())]
        if parameter == "weight":
            return [Source(name, (outputs, self.inputs)) for name, outputs in named]
        held = [outputs if self._adds_bias else Extent(outputs.total, range(0)) for _, outputs in named]
        return [Source(name, (outputs,)) for (name, _), outputs in zip(named, held, strict=True)]

    @property
    def matrix(self) -> Packed | None:
        """What computes in place of the plain weight."""
        return self._matrix

    def take(self, matrix: QuantizedMatrix) -> None:
        """Takes weights that the checkpoint holds quantized in place of its own."""
        self._matrix = matrix
        del self.weight

    def round_inputs(self, bits: int) -> None:
        """To be called after `pack`: from then on kernels round inputs of quantized weights to so many bits, but
        those of a head."""
        if isinstance(self._matrix, QuantizedMatrix) and not self._is_head:
            self._matrix.round_inputs(bits)

    def pack(self, bits: int | None) -> None:
        """Puts outputs into their order; quantizes or packs the weights, and the plain ones are let go."""
        if self.rows is not None:
            for parameter in self.parameters():
                parameter.data = parameter.data[list(self.rows)]
        bias = self.bias if self._adds_bias else None
        if self._matrix is None and bits is not None:
            bits = HEAD_BITS if self._is_head else bits
            self.take(quantized_matrix(self.weight.detach(), bits))
        if isinstance(self._matrix, QuantizedMatrix):
            if bias is not None:
                self._matrix.set_bias(bias)
        elif (matrix := _packed(self.weight, bias)) is not None:
            self._matrix = matrix
            del self.weight

    def make_invariant(self, tiling: Tiling) -> None:
        if self.is_invariant:
            return
        bits = self._matrix.bits if isinstance(self._matrix, QuantizedMatrix) else None
        kind = (type(self._matrix), bits, sum(len(part.held) for part in self.parts.values()), self.bias is None)
        self._tiled = tiling.tiled(self._product, len(self.inputs.held), kind)

    @property
    def is_invariant(self) -> bool:
        return self._tiled is not None or _is_native(self._matrix)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return super().tensors + (self._matrix.tensors if isinstance(self._matrix, QuantizedMatrix) else [])

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (self._matrix.num_bytes if self._matrix is not None else 0)

    def forward(self, x: torch.Tensor, deltas: Deltas | None = None) -> torch.Tensor:
        projected = self._product(x) if self._tiled is None else self._tiled(x)
        if deltas is not None:
            deltas.add(self, x, projected)
        return projected

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._matrix is not None:
            return self._matrix(x)
        return functional.linear(x, self.weight, self.bias if self._adds_bias else None)


class RowParallel(Linear):
    """A projection of inputs of which each rank has a part; its output is a part of the sum over the ranks, as what is
    added for this rank's inputs is."""

    def __init__(self, inputs: Extent, name: str, num_outputs: int, bias: bool, shard: Shard) -> None:
        super().__init__(inputs, {name: whole(num_outputs)}, bias, adds_bias=shard.rank == 0)


class FeedForward(nn.Module):
    """With gates (arXiv 2002.05202)."""

    def __init__(
        self,
        hidden_size: int,
        shard: Shard,
        bias: bool,
        stored_as: str | None,
        activation: str,
    ) -> None:
        """`stored_as`: the one name under which the checkpoint holds gates and ups; `activation`: of the gates."""
        super().__init__()
        self.activation: Final = activation
        parts = {"gate_proj": shard.neurons, "up_proj": shard.neurons}
        self.gate_up_proj = Linear(whole(hidden_size), parts, bias, stored_as=stored_as)
        self.down_proj = RowParallel(shard.neurons, "down_proj", hidden_size, bias, shard)

    def forward(self, x: torch.Tensor, steps: Steps, residual: Residual, deltas: Deltas | None = None) -> torch.Tensor:
        """x [T, E] -> this rank's rows"""
        gated = steps.gate(self.gate_up_proj(x, deltas), self.activation)
        return residual.summed(self.down_proj(gated, deltas))
