"""Compute a mixture of experts: each token takes a few of many feed-forwards.

Every rank has a part of the neurons of each expert, as of any feed-forward. So all ranks read equal shares of whichever
experts a step needs, and one sum over the ranks completes the outputs.
"""

import ctypes
import functools
import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from engine.model.layers import Deltas, Linear
from engine.native.library import load
from engine.native.linear import ELEMENTS, DenseMatrix
from engine.native.program import threads
from engine.ops.base import Ops, Shared
from engine.parallel import Residual
from engine.quantization.quantized_linear import QuantizedMatrix
from engine.trial import tried
from serving_core.model_files.differences import Experts
from serving_core.sharding import Extent, Shard, share_of, whole

logger = logging.getLogger(__name__)


class Gate(Linear):
    """The router of a mixture of experts: whole on every rank, and never quantized."""

    def __init__(self, hidden_size: int, name: str, num_outputs: int) -> None:
        super().__init__(whole(hidden_size), {name: whole(num_outputs)}, bias=False)

    def pack(self, bits: int | None) -> None:
        super().pack(None)


class Expert(nn.Module):
    """One rank's part of an expert, a gated feed-forward; its outputs are parts of a sum over the ranks."""

    def __init__(self, hidden_size: int, neurons: Extent, projections: tuple[str, str, str]) -> None:
        super().__init__()
        gate, up, down = projections
        self.gate_up_proj = Linear(whole(hidden_size), {gate: neurons, up: neurons}, bias=False)
        self.down_proj = Linear(neurons, {down: whole(hidden_size)}, bias=False)

    def forward(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Return this rank's part of the expert's output [T, E] for x [T, E]."""
        outputs: torch.Tensor = self.down_proj(ops.gate(self.gate_up_proj(x)))
        return outputs


class GroupedLibrary:
    """The products of grouped rows in the compiled library."""

    def __init__(self, path: Path) -> None:
        """Load the file. Raises AttributeError if it has an older version."""
        library = ctypes.CDLL(str(path))
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self.dense = library.dense_multiply_groups
        self.dense.argtypes = [pointer, pointer, int32, pointer, int32, pointer, int64, pointer]
        self.linear = library.linear_multiply_groups
        self.linear.argtypes = [pointer, pointer, int32, pointer, int32, int32, pointer, int64, pointer]
        for function in (self.dense, self.linear):
            function.restype = int32


class GroupedProduct:
    """A product in which each group of rows has a matrix of its own; all matrices have one shape and kind.

    A row's outputs have the bits of a separate product of that row with its matrix.
    """

    def __init__(self, library: GroupedLibrary, matrices: Sequence[DenseMatrix | QuantizedMatrix]) -> None:
        self._library = library
        self._matrices = matrices  # keeps the matrices at these addresses alive
        self._addresses = (ctypes.c_void_p * len(matrices))(*(matrix.address for matrix in matrices))
        self._dense_dtype: Final = matrices[0].dtype if isinstance(matrices[0], DenseMatrix) else None

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether rows of this dtype can be multiplied."""
        return dtype in ELEMENTS if self._dense_dtype is None else dtype == self._dense_dtype

    def __call__(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Multiply rows x [T, num_inputs], sorted by matrix, and return the outputs [T, num_outputs].

        starts [matrices + 1], int32, holds the first row of each matrix, then T. Raises MemoryError if the kernel lacks
        memory.
        """
        first = self._matrices[0]
        assert x.is_contiguous(), "rows behind each other"
        assert (x.shape[1], starts.dtype) == (first.num_inputs, torch.int32)
        outputs = x.new_empty((x.shape[0], first.num_outputs))
        groups = (self._addresses, starts.data_ptr(), len(self._matrices))
        rows = (x.data_ptr(), x.stride(0) * x.itemsize, outputs.data_ptr())
        if self._dense_dtype is not None:
            failed = self._library.dense(*groups, *threads(), *rows)
        else:
            failed = self._library.linear(*groups, *threads(), ELEMENTS[x.dtype], *rows)
        if failed:
            raise MemoryError(f"no memory for {x.shape[0]} rows of {len(self._matrices)} matrices")
        return outputs


def grouped_product(matrices: Sequence[object]) -> GroupedProduct | None:
    """Return a GroupedProduct of these matrices, or None.

    None if kernels do not support them, or if they differ in shape or kind.
    """
    library = load(GroupedLibrary)
    dense = [matrix for matrix in matrices if isinstance(matrix, DenseMatrix)]
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix) and matrix.is_recordable]
    kinds: set[tuple[object, ...]] = {(each.dtype, each.num_inputs, each.num_outputs) for each in dense}
    kinds |= {(each.bits, each.input_bits, each.group_size, each.num_inputs, each.num_outputs) for each in quantized}
    if library is None or len(kinds) != 1 or len(dense) + len(quantized) < len(matrices):
        return None
    return GroupedProduct(library, dense or quantized)


ALIGNED_WIDTH: Final = 8  # grouped_mm requires rows of a multiple of 16 bytes
TOLERANCE: Final = 0.05  # of the largest output of a trial in bfloat16; a wrong one is off by about 1


class StackedProduct:
    """A GroupedProduct by torch's grouped_mm, which reads where groups start on the device: the host does not wait."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        """Move the weights of the layers, which must be plain and of one shape, into one tensor."""
        stacked = torch.stack([layer.weight.detach() for layer in layers])
        for layer, weight in zip(layers, stacked, strict=True):
            layer.weight = nn.Parameter(weight, requires_grad=False)
        self._layers = layers
        self._weights = stacked.transpose(1, 2)  # [matrices, num_inputs, num_outputs]

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether rows of this dtype are multiplied as the layers do it."""
        return dtype == self._weights.dtype and all(layer.is_plain for layer in self._layers)

    def __call__(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Multiply rows x [T, num_inputs], sorted by matrix, and return the outputs [T, num_outputs].

        starts [matrices + 1], int32, holds the first row of each matrix, then T.
        """
        return functional.grouped_mm(x, self._weights, offs=starts[1:])


def stacked_product(layers: Sequence[Linear]) -> StackedProduct | None:
    """Return a StackedProduct of these layers, or None: on a CPU, if torch does not support them, or without success in
    a trial on their device, whose reason is logged.
    """
    if not all(layer.is_plain for layer in layers):
        return None
    weight = layers[0].weight
    is_aligned = not any(size % ALIGNED_WIDTH for size in weight.shape)
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or not is_aligned:
        return None
    return StackedProduct(layers) if _multiplies_groups(weight.device) else None


@functools.cache
def _multiplies_groups(device: torch.device) -> bool:
    """Return whether grouped_mm works on the device and agrees with single products; if not, log the reason."""
    difference, why = tried(functools.partial(_difference_of_groups, device))
    if difference is not None and not difference <= TOLERANCE:  # also for NaN
        why = f"they are off by {difference:f}"
    if why:
        logger.warning("experts are computed one after the other, and steps have no CUDA graphs: %s", why)
    return not why


@torch.inference_mode()
def _difference_of_groups(device: torch.device) -> float:
    layers = [Linear(whole(64), {"": whole(48)}, bias=False) for _ in range(3)]
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    for layer in layers:
        layer.weight = nn.Parameter(random(48, 64), requires_grad=False)
    rows, starts = random(24, 64), (0, 5, 5, 24)
    expected = torch.cat([layer(rows[first:end]) for layer, (first, end) in zip(layers, pairwise(starts), strict=True)])
    outputs = StackedProduct(layers)(rows, torch.tensor(starts, dtype=torch.int32).to(device))
    return float((outputs - expected).abs().max() / expected.abs().max())


Product: TypeAlias = GroupedProduct | StackedProduct


class MixtureOfExperts(nn.Module):
    """A mixture of experts, which a layer has instead of a feed-forward."""

    def __init__(self, hidden_size: int, experts: Experts, shard: Shard, tp_size: int) -> None:
        super().__init__()

        def neurons(total: int) -> Extent:
            return Extent(total, share_of(total, shard.rank, tp_size))

        self._num_chosen: Final = experts.num_chosen
        self._is_normalized: Final = experts.is_normalized
        self.gate = Gate(hidden_size, "gate", experts.num_experts)
        own = neurons(experts.intermediate_size)
        each = (Expert(hidden_size, own, experts.projections) for _ in range(experts.num_experts))
        self.experts = nn.ModuleList(each)
        self.shared_expert: Expert | None = None
        if experts.shared_size:
            self.shared_expert = Expert(hidden_size, neurons(experts.shared_size), experts.projections)
            self.shared_expert_gate = Gate(hidden_size, "shared_expert_gate", 1)

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of all loaded experts' weights on this rank, without the shared expert."""
        return sum(layer.num_bytes for layer in self.experts.modules() if isinstance(layer, Linear))

    def stack(self) -> None:
        """On CUDA, move the filled and packed weights of all experts into one tensor for each projection, if their
        products can then be computed at once. Needs memory for these weights a second time.
        """
        experts: list[Expert] = list(self.experts)  # type: ignore[arg-type]
        gate_up = stacked_product([each.gate_up_proj for each in experts])
        down = stacked_product([each.down_proj for each in experts])
        if gate_up is not None and down is not None:
            self._products = gate_up, down
            torch.cuda.empty_cache()  # the single weights lay in pieces too small for the next layer's

    def awaits_routing(self, dtype: torch.dtype) -> bool:
        """Return whether the host reads which experts the tokens chose, so that no CUDA graph can hold a step of this
        dtype.
        """
        return not all(isinstance(each, StackedProduct) and each.takes(dtype) for each in self._products)

    def forward(self, x: torch.Tensor, ops: Ops, residual: Residual, deltas: Deltas | None = None) -> torch.Tensor:
        """Return the experts' output for x [T, E]: this rank's rows of the residual stream, summed over the ranks.

        Reads only the weights of experts that some token takes. `deltas` holds none for this module: adapters of
        experts are refused.
        """
        routing = ops.route(self.gate(x), self._num_chosen, self._is_normalized)
        rows = self._outputs(x.index_select(0, routing.tokens), routing.starts, ops)
        shared = None
        if self.shared_expert is not None:
            shared = Shared(self.shared_expert(x, ops), self.shared_expert_gate(x))
        return residual.summed(ops.mix(rows, routing, shared))

    def _outputs(self, rows: torch.Tensor, starts: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Return the experts' outputs for rows sorted by expert."""
        gate_up, down = self._products
        if gate_up is not None and down is not None and gate_up.takes(rows.dtype) and down.takes(rows.dtype):
            return down(ops.gate(gate_up(rows, starts)), starts)
        outputs = torch.empty_like(rows)
        for expert, (first, end) in zip(self.experts, pairwise(starts.tolist()), strict=True):
            if first < end:
                outputs[first:end] = expert(rows[first:end], ops)
        return outputs

    @functools.cached_property
    def _products(self) -> tuple[Product | None, Product | None]:
        """Return the products of all experts at once, where kernels support that. Call after the weights are loaded,
        and after `stack`, which sets them on CUDA.
        """
        experts: list[Expert] = list(self.experts)  # type: ignore[arg-type]
        gate_ups, downs = zip(*((each.gate_up_proj.matrix, each.down_proj.matrix) for each in experts), strict=True)
        return grouped_product(gate_ups), grouped_product(downs)
