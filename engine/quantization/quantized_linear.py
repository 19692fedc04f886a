"""Multiply by quantized weights: with native kernels on a CPU, with Triton kernels on CUDA, else by dequantizing some
weights at a time.
"""

import ctypes
import functools
import logging
import math
from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch.nn import functional

from engine.native.huge_memory import weight_memory
from engine.native.linear_library import ELEMENTS, Matrix, best_variant, linear_library
from engine.native.program import NativeProgram, threads
from engine.quantization.weight_quantization import Packed, QuantizedWeight, quantize_tiles
from engine.trial import why_not_triton

logger = logging.getLogger(__name__)

OUTPUTS: Final = 16  # of a vector of weights, as in native/linear.h
DEPTH: Final = 4  # inputs of a vector
MOST_INPUTS: Final = 2**16  # with 8-bit inputs
_TILE_ELEMENTS: Final = 2**20  # weights dequantized at a time
_DEVICE_TILE_ELEMENTS: Final = 2**25  # on devices, where each call costs more than its arithmetic
_TRIED_OUTPUTS, _TRIED_INPUTS = 96, 1040  # enough for several programs
_TRIED_GROUPS: Final = (32, 128)  # inputs of each: fewer than a program takes at a time, and as many
_TRIED_ROWS: Final = (1, 40, 300)  # covers each kernel
_TOLERANCE: Final = 0.05  # of the largest output: 16-bit products of two kernels; a wrong one is off by about 1

_Product: TypeAlias = Callable[[torch.Tensor, Packed], torch.Tensor]
"""Multiplies rows whose inputs are in the packed weights' order."""


class QuantizedMatrix:
    """Weights [num_outputs, num_inputs] of 4 or 8 bits, packed as native/linear.h describes, on any device.

    The native kernels round each row of inputs to 16 bits (or 8, see `round_inputs`) relative to its largest value, and
    then add exactly, so that a row's outputs depend on that row alone.
    """

    def __init__(
        self,
        num_outputs: int,
        num_inputs: int,
        bits: int,
        group_size: int,
        device: torch.device,
        variant: str | None = None,
    ) -> None:
        """Allocate an empty matrix, to be filled with `put`.

        group_size is the number of inputs that share a scale. `variant` is one of linear_library.VARIANTS that this CPU
        supports, or "portable"; None takes the best.
        """
        num_vectors, num_groups = -(-num_outputs // OUTPUTS), -(-num_inputs // group_size)
        self.num_outputs, self.num_inputs, self.bits = num_outputs, num_inputs, bits
        self.group_size = group_size  # inputs that share a scale
        self.input_bits = 16  # to which the kernels round inputs
        self._rows_packed = 8 // bits  # vectors of weights that share a packed one
        depth = DEPTH * self._rows_packed
        shape = (num_vectors, num_groups * group_size // depth, OUTPUTS, DEPTH)
        self._weights = _zeros(shape, device)
        self._scales = torch.zeros((num_vectors, num_groups, OUTPUTS), device=device)
        self._zeros = torch.zeros((num_vectors, num_groups, OUTPUTS), dtype=torch.uint8, device=device)
        self._bias: torch.Tensor | None = None
        self.columns: torch.Tensor | None = None  # input index of each packed one; None: in order
        if variant is None:
            variant = best_variant() if device.type == "cpu" else None
        self.variant: Final = variant or "portable"
        self._matrix = self._describe() if self.variant != "portable" else None

    @property
    def address(self) -> int:
        """Return the address of the matrix for compiled functions, valid while this object lives.

        Only if a native kernel computes it.
        """
        return self._address

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that the product reads."""
        parts = (self._weights, self._scales, self._zeros, self._bias, self.columns)
        return [tensor for tensor in parts if tensor is not None]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def put(self, first_output: int, weight: QuantizedWeight) -> None:
        """Fill in a run of outputs, from first_output on, with these quantized weights.

        first_output is a multiple of 16, and so is the number of outputs unless they are the last.
        """
        assert first_output % OUTPUTS == 0
        assert (weight.bits, weight.group_size, weight.num_inputs) == (self.bits, self.group_size, self.num_inputs)
        num_outputs = weight.numbers.shape[0]
        vectors = slice(first_output // OUTPUTS, -(-(first_output + num_outputs) // OUTPUTS))
        padding = (0, 0, 0, -num_outputs % OUTPUTS)
        numbers = functional.pad(weight.numbers, padding)
        words = numbers.view(-1, OUTPUTS, numbers.shape[1] // DEPTH, DEPTH).transpose(1, 2)
        if self.bits == 4:
            words = words[:, 0::2] | words[:, 1::2] << 4
        self._weights[vectors] = words
        for target, given in ((self._scales, weight.scales), (self._zeros, weight.zeros)):
            target[vectors] = functional.pad(given, padding).view(-1, OUTPUTS, given.shape[1]).transpose(1, 2)

    def set_bias(self, bias: torch.Tensor) -> None:
        """Set the bias [num_outputs], which is added to the outputs."""
        self._bias = bias.detach().float().contiguous()
        if self._matrix is not None:
            self._matrix.bias = self._bias.data_ptr()

    def round_inputs(self, bits: int) -> None:
        """Set to how many bits, 8 or 16, the native kernels round inputs.

        8 requires weights of 8 bits in one group with zero 128. With more than MOST_INPUTS inputs the bits stay 16,
        since the sums would overflow.
        """
        assert bits == 16 or (self.bits == 8 and self._scales.shape[1] == 1)
        self.input_bits = bits if self.num_inputs <= MOST_INPUTS else 16
        if self._matrix is not None:
            self._matrix.input_bits = self.input_bits

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the dequantized weights [T, num_inputs], float32, of the outputs whose numbers are outputs [T]."""
        vectors, places = outputs // OUTPUTS, outputs % OUTPUTS
        numbers = self._weights[vectors, :, places]
        if self.bits == 4:
            numbers = torch.stack((numbers & 15, numbers >> 4), 2)
        grouped = numbers.reshape(len(outputs), -1, self.group_size).float()
        grouped.sub_(self._zeros[vectors, :, places].unsqueeze(2))
        grouped.mul_(self._scales[vectors, :, places].unsqueeze(2))
        weights = grouped.flatten(1)[:, : self.num_inputs]
        if self.columns is None:
            return weights
        return torch.empty_like(weights).index_copy_(1, self.columns, weights)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [T, num_inputs] by the weights, add the bias, and return [T, num_outputs]."""
        on_device = on_cuda(x.device, x.dtype, self.bits) if x.is_cuda else None
        if self._matrix is None and on_device is None:
            return self.multiply_whole(x)
        if self.columns is not None:
            x = x.index_select(1, self.columns)
        if on_device is not None:
            return on_device(x, self.packed)
        return self._multiply(x) if x.dtype != torch.float16 else self._multiply(x.float()).half()

    @property
    def packed(self) -> Packed:
        """Return the packed tensors and their sizes."""
        parts = (self._weights, self._scales, self._zeros, self._bias)
        return Packed(*parts, self.bits, self.group_size, self.num_inputs, self.num_outputs)

    @property
    def is_recordable(self) -> bool:
        """Return whether `record` works: a native kernel computes the product, from inputs in their own order."""
        return self._matrix is not None and self.columns is None

    def record(self, program: NativeProgram, x: torch.Tensor, outputs: torch.Tensor) -> None:
        """Append to `program` the product of the rows of x into `outputs`.

        Both are bfloat16 or float32, and contiguous.
        """
        assert self.is_recordable
        library = linear_library()
        assert library is not None
        memory = program.scratch(library.rounded_bytes(self._address, program.most_rows))
        program.add(
            library.add,
            self._address,
            ELEMENTS["bfloat16" if x.dtype == torch.bfloat16 else "float32"],
            x.data_ptr(),
            self.num_inputs * x.itemsize,
            program.most_rows,
            outputs.data_ptr(),
            memory.data_ptr(),
        )

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        library = linear_library()
        assert library is not None
        outputs = x.new_empty((x.shape[0], self.num_outputs))
        failed = library.multiply(
            self._address,
            *threads(),
            ELEMENTS["bfloat16" if x.dtype == torch.bfloat16 else "float32"],
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            x.shape[0],
            outputs.data_ptr(),
        )
        if failed:
            raise MemoryError(f"no memory for {x.shape[0]} rows of {self.num_inputs} inputs")
        return outputs

    def multiply_whole(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [T, num_inputs] by the weights, add the bias, and return [T, num_outputs], with torch.

        Some weights are dequantized at a time.
        """
        num_elements = _TILE_ELEMENTS if x.device.type == "cpu" else _DEVICE_TILE_ELEMENTS
        step = max(1, num_elements // self.num_inputs)
        outputs = x.new_empty((x.shape[0], self.num_outputs))
        for first in range(0, self.num_outputs, step):
            tile = torch.arange(first, min(first + step, self.num_outputs), device=x.device)
            outputs[:, tile] = functional.linear(x, self.rows(tile).to(x.dtype))
        return outputs if self._bias is None else outputs.add_(self._bias.to(x.dtype))

    def _describe(self) -> Matrix:
        library = linear_library()
        kernel = None if library is None else library.kernel(self.variant)
        if kernel is None:
            raise ValueError(f"there is no {self.variant} kernel for quantized weights here")
        matrix = Matrix(
            num_inputs=self.num_inputs,
            num_outputs=self.num_outputs,
            padded_inputs=self._scales.shape[1] * self.group_size,
            group_size=self.group_size,
            weight_bits=self.bits,
            input_bits=self.input_bits,
            weights=self._weights.data_ptr(),
            scales=self._scales.data_ptr(),
            zeros=self._zeros.data_ptr(),
            kernel=kernel,
        )
        self._address = ctypes.addressof(matrix)
        return matrix


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return zero bytes, in huge pages on a CPU."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    return weight_memory().empty(math.prod(shape)).view(shape).zero_()


def quantized_matrix(weight: torch.Tensor, bits: int, variant: str | None = None) -> QuantizedMatrix:
    """Return the weight [num_outputs, num_inputs] quantized to 4 or 8 bits, as a matrix to compute with.

    `variant` names the native kernel that computes; "portable": torch; None: the best.
    """
    matrix: QuantizedMatrix | None = None
    for first, tile in quantize_tiles(weight, bits):
        if matrix is None:
            num_outputs, num_inputs = weight.shape
            matrix = QuantizedMatrix(num_outputs, num_inputs, bits, tile.group_size, weight.device, variant)
        matrix.put(first, tile)
    assert matrix is not None, "a weight without outputs"
    return matrix


@functools.cache
def on_cuda(device: torch.device, dtype: torch.dtype, bits: int) -> _Product | None:
    """Return Triton's product for rows of `dtype` and weights of `bits` bits on this device, or None.

    It is None, and the reason logged, if a trial shows that the product does not work or does not agree with torch.
    Call for the first time outside a CUDA graph capture.
    """

    def trial() -> float:
        return _largest_difference(_triton_product(), device, dtype, bits)

    if why := why_not_triton(trial, _TOLERANCE):
        logger.warning("products with weights of %d bits are not by kernels of Triton, and slower: %s", bits, why)
        return None
    return _triton_product()


def _triton_product() -> _Product:
    from engine.quantization.triton_linear import linear

    return linear


@torch.inference_mode()
def _largest_difference(product: _Product, device: torch.device, dtype: torch.dtype, bits: int) -> float:
    """Return the largest difference from torch, over the largest output, on random values."""
    generator = torch.Generator().manual_seed(0)
    differences = []
    for group_size in _TRIED_GROUPS:
        matrix = _random_matrix(bits, group_size, device, generator)
        for num_rows in _TRIED_ROWS:
            x = torch.randn(num_rows, _TRIED_INPUTS, generator=generator, device="cpu").to(device, dtype)
            expected = matrix.multiply_whole(x)
            differences.append((product(x, matrix.packed) - expected).abs().max() / expected.abs().max())
    return float(torch.stack(differences).max())


def _random_matrix(bits: int, group_size: int, device: torch.device, generator: torch.Generator) -> QuantizedMatrix:
    num_groups = -(-_TRIED_INPUTS // group_size)

    def numbers(*shape: int) -> torch.Tensor:
        drawn = torch.randint(2**bits, shape, generator=generator, dtype=torch.uint8, device="cpu")
        return drawn.to(device)

    scales = torch.rand(_TRIED_OUTPUTS, num_groups, generator=generator, device="cpu").to(device) / 2**bits
    zeros = numbers(_TRIED_OUTPUTS, num_groups)
    weight = QuantizedWeight(numbers(_TRIED_OUTPUTS, num_groups * group_size), scales, zeros, _TRIED_INPUTS, bits)
    matrix = QuantizedMatrix(_TRIED_OUTPUTS, _TRIED_INPUTS, bits, group_size, device)
    matrix.put(0, weight)
    return matrix
