"""Define the building blocks of the decoder. Parameters have the names of the Hugging Face checkpoint.

A parameter may hold one rank's part of its tensors; a layer's `sources` tell which part.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from engine.native.linear import DenseMatrix
from engine.native.linear import best_variant as best_dense_variant
from engine.ops.base import Norm, Ops
from engine.ops.tiled import Rows, Tiling
from engine.parallel import RankGroup, Residual
from engine.quantization.quantized_linear import QuantizedMatrix, quantized_matrix
from serving_core.settings import HEAD_BITS
from serving_core.sharding import Extent, Shard, whole


class Source(NamedTuple):
    """A tensor of the checkpoint, and the part of each of its dimensions that a parameter takes.

    `name` is the module's name in the checkpoint, relative to the module that holds the parameter; empty for that
    module itself.
    """

    name: str
    extents: tuple[Extent, ...]


def below_each_other(extents: Iterable[Extent]) -> list[Extent]:
    """Concatenate dimensions: return, for each extent, its held run within one dimension that holds all in order."""
    parts = list(extents)
    starts = [0, *itertools.accumulate(part.total for part in parts)]
    return [
        Extent(starts[-1], range(start + part.held.start, start + part.held.stop))
        for start, part in zip(starts, parts, strict=False)
    ]


class Layer(nn.Module):
    """A module with parameters of its own, which a checkpoint fills."""

    def sources(self, parameter: str) -> Sequence[Source]:
        """Return the checkpoint tensors that are stacked to fill a parameter of this name.

        By default one tensor of the parameter's own name and shape.
        """
        return [Source("", tuple(map(whole, getattr(self, parameter).shape)))]

    def pack(self, bits: int | None) -> None:
        """Convert the filled weights to their fastest form, and free the originals.

        `bits`: 4 or 8 quantizes them; None does not. By default nothing is done.
        """

    def make_batch_invariant(self, tiling: Tiling) -> None:
        """Make the bits of a row's outputs depend on that row alone, by computing in tiles from `tiling`.

        Call after `pack`. By default they already do.
        """

    @property
    def is_batch_invariant(self) -> bool:
        """Return whether the bits of a row's outputs depend on that row alone. Call after `pack`."""
        return True

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that the layer computes with, without those packed for a CPU. Call after `pack`."""
        return list(self.parameters(recurse=False))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights of the filled layer."""
        return sum(parameter.nbytes for parameter in self.parameters(recurse=False))


class OneDNNMatrix:
    """bfloat16 weights on a CPU in oneDNN's layout.

    With it small batches are twice as fast as with plain weights.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._bias = bias
        self.num_bytes: Final = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return projected


def _packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DenseMatrix | OneDNNMatrix | None:
    """Return weights on a CPU in their fastest form; None if that is the plain one."""
    if weight.device.type != "cpu":
        return None
    if best_dense_variant(weight.dtype) is not None:
        return DenseMatrix(weight, bias)
    return OneDNNMatrix(weight, bias) if weight.dtype == torch.bfloat16 and _HAS_ONEDNN else None


Packed: TypeAlias = DenseMatrix | OneDNNMatrix | QuantizedMatrix  # replaces a plain weight
WITH_ROWS: Final = (DenseMatrix, QuantizedMatrix)  # matrices whose weights can be read back

_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-untyped-call]


def _is_native(matrix: object) -> bool:
    """Return whether a native kernel computes the matrix, so that a row's bits depend on that row alone."""
    return isinstance(matrix, DenseMatrix) or (isinstance(matrix, QuantizedMatrix) and matrix.variant != "portable")


class Embedding(Layer):
    """Looks up one vector for each token id; each rank has a part of the ids.

    An embedding that is also the head computes logits. If another stage has the head, the vectors are the same as here.
    """

    def __init__(
        self, vocabulary: Extent, size: int, group: RankGroup, is_head: bool = False, gives_logits: bool = True
    ) -> None:
        super().__init__()
        self._is_head = is_head
        self._gives_logits = is_head and gives_logits
        self._dtype = torch.get_default_dtype()
        self._matrix: Packed | None = None
        self._tiled: Rows | None = None
        # (torch's own embedding draws random values, on the meta device too, for half a second.)
        self.weight = nn.Parameter(torch.empty(len(vocabulary.held), size))
        self._vocabulary = vocabulary
        self._is_whole = vocabulary.is_whole
        self._size = size
        self._group = group

    def sources(self, parameter: str) -> Sequence[Source]:
        return [Source("", (self._vocabulary, whole(self.weight.shape[1])))]

    def pack(self, bits: int | None) -> None:
        """Quantize or pack the weights of a head, and read vectors from the packed form where possible.

        `bits`: None does not quantize; other values quantize to HEAD_BITS. Nothing is done if this is not a head.
        """
        self._dtype = self.weight.dtype
        if not self._is_head:
            return
        if bits is not None:
            self._matrix = quantized_matrix(self.weight.detach(), HEAD_BITS)
        elif self._gives_logits:
            self._matrix = _packed(self.weight)
        if isinstance(self._matrix, WITH_ROWS):
            del self.weight

    def make_batch_invariant(self, tiling: Tiling) -> None:
        if not self.is_batch_invariant:
            self._tiled = tiling.tiled(self._product, self._size, (type(self.matrix), len(self._vocabulary.held)))

    @property
    def is_batch_invariant(self) -> bool:
        return not self._gives_logits or self._tiled is not None or _is_native(self.matrix)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self._matrix is None else self._matrix.num_bytes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors [T, size] of token ids [T], on every rank."""
        if self._is_whole:
            return self._vectors(ids)
        rows = ids - self._vocabulary.held.start
        elsewhere = (rows < 0) | (rows >= len(self._vocabulary.held))
        vectors = self._vectors(rows.masked_fill_(elsewhere, 0))
        vectors.masked_fill_(elsewhere.unsqueeze(1), 0)
        self._group.all_reduce(vectors)
        return vectors

    @property
    def matrix(self) -> Packed | None:
        """Return the packed weights of a head; None: the plain weight computes the logits, or there are none."""
        return self._matrix

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [S, ids held] of x [S, size], for a model whose head is this embedding."""
        return self._product(x) if self._tiled is None else self._tiled(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) if self.matrix is None else self.matrix(x)

    def _vectors(self, rows: torch.Tensor) -> torch.Tensor:
        if isinstance(self._matrix, WITH_ROWS):
            return self._matrix.rows(rows).to(self._dtype)
        return functional.embedding(rows, self.weight)


class ScaledEmbedding(Embedding):
    """An embedding whose vectors, but not its logits, are scaled."""

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
    """Build the Embedding of a model, whose vectors are multiplied by `scale`.

    `vocabulary` has the token ids that this rank holds; `size` is the length of a vector. `is_head`: its weights are
    the head's too; `gives_logits`: this stage computes the logits; `rounds_scale`: the scale is rounded to the weights'
    dtype first.
    """
    if scale == 1:
        return Embedding(vocabulary, size, group, is_head, gives_logits)
    return ScaledEmbedding(vocabulary, size, group, is_head, gives_logits, scale, rounds_scale)


class RMSNorm(Layer):
    """Root mean square norm over the last dimension, computed in float32 (arXiv 1910.07467)."""

    centers = False

    def __init__(self, size: int, eps: float, delta_scale: float = 1.0, gain: float = 1.0, offset: float = 0.0) -> None:
        """Configure the norm. `delta_scale`: factor of an added delta; `gain`: factor of the result; `offset`: added to
        the weights, which are then float32.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps: Final = eps
        self.delta_scale: Final = delta_scale
        self._gain = gain
        self._offset = offset

    def pack(self, bits: int | None) -> None:
        """Fold the gain and the offset into the weights; `bits` has no effect."""
        if self._offset:
            self.weight.data = self.weight.data.float() + self._offset
        self.weight.data.mul_(self._gain)

    @property
    def spec(self) -> Norm:
        """Return the weights and numbers that the ops need of the filled norm."""
        return Norm(self.weight, self.eps, self.delta_scale, self.centers)

    def forward(self, x: torch.Tensor, ops: Ops, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add delta times delta_scale to x [T, size] in place, if given, and return the norm of x."""
        return ops.norm(x, self.spec, delta)

    def add_to(self, x: torch.Tensor, delta: torch.Tensor, ops: Ops) -> None:
        """Add the norm of delta [T, size] to x [T, size] in place."""
        ops.add_norm(x, delta, self.spec)


class LayerNorm(RMSNorm):
    """Layer norm (arXiv 1607.06450) without a bias: an RMSNorm after subtracting the mean."""

    centers = True


class Deltas(Protocol):
    """The additions of LoRA adapters to some rows of a batch."""

    def add(self, projection: "Linear", x: torch.Tensor, projected: torch.Tensor) -> None:
        """Add what the adapters compute from x for this projection to `projected`, its outputs, in place."""


class Linear(Layer):
    """Projections of one input, computed as one product; `parts` gives their names in the checkpoint and their outputs.

    With a part of the inputs or outputs the layer computes only that part. Of the ranks of a sum only one may add the
    bias.
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
        """Build the projections.

        `stored_as`: the single name under which the checkpoint stacks all parts. `rows`: the held output that each
        output is; None: the stored order.
        """
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
        """Return the packed matrix that has replaced the plain weight; None: the plain weight computes."""
        return self._matrix

    def take(self, matrix: QuantizedMatrix) -> None:
        """Compute with this quantized matrix instead of `weight`, which is deleted.

        The matrix's shape is not checked.
        """
        self._matrix = matrix
        del self.weight

    @property
    def is_plain(self) -> bool:
        """Return whether the outputs are one product with the plain weight, in whatever batch, and no bias is added."""
        return self._matrix is None and self._tiled is None and self.bias is None

    def round_inputs(self, bits: int) -> None:
        """Let kernels round the inputs of quantized weights to `bits` bits; nothing for plain weights or a head.

        Call after `pack`.
        """
        if isinstance(self._matrix, QuantizedMatrix) and not self._is_head:
            self._matrix.round_inputs(bits)

    def pack(self, bits: int | None) -> None:
        """Reorder the outputs, quantize or pack the weights, and free the plain ones.

        `bits`: 4 or 8 quantizes them (a head to HEAD_BITS); None does not.
        """
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

    def make_batch_invariant(self, tiling: Tiling) -> None:
        if self.is_batch_invariant:
            return
        bits = self._matrix.bits if isinstance(self._matrix, QuantizedMatrix) else None
        kind = (type(self._matrix), bits, sum(len(part.held) for part in self.parts.values()), self.bias is None)
        self._tiled = tiling.tiled(self._product, len(self.inputs.held), kind)

    @property
    def is_batch_invariant(self) -> bool:
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
    """A projection whose inputs are divided over the ranks.

    Its output, like that of adapters, is a part of the sum over the ranks.
    """

    def __init__(self, inputs: Extent, name: str, num_outputs: int, bias: bool, shard: Shard) -> None:
        super().__init__(inputs, {name: whole(num_outputs)}, bias, adds_bias=shard.rank == 0)


class FeedForward(nn.Module):
    """A gated feed-forward (arXiv 2002.05202)."""

    def __init__(
        self,
        hidden_size: int,
        shard: Shard,
        bias: bool,
        stored_as: str | None,
        activation: str,
    ) -> None:
        """Build the layer. `stored_as`: the single name under which the checkpoint stacks gates and ups; `activation`:
        of the gates.
        """
        super().__init__()
        self.activation: Final = activation
        parts = {"gate_proj": shard.neurons, "up_proj": shard.neurons}
        self.gate_up_proj = Linear(whole(hidden_size), parts, bias, stored_as=stored_as)
        self.down_proj = RowParallel(shard.neurons, "down_proj", hidden_size, bias, shard)

    def forward(self, x: torch.Tensor, ops: Ops, residual: Residual, deltas: Deltas | None = None) -> torch.Tensor:
        """Return the feed-forward's output for x [T, E]: this rank's rows of the residual stream.

        They are summed over the ranks. `deltas` adds the adapters' outputs.
        """
        gated = ops.gate(self.gate_up_proj(x, deltas), self.activation)
        return residual.summed(self.down_proj(gated, deltas))
