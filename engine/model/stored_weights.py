"""Read weights as quantized checkpoints store them, and convert them to matrices to compute with.

Each format has a reader. A weight of 8-bit floats is read as plain floats.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from engine.model.checkpoint import INTEGERS, Checkpoint, Part, Span, whole_tensor
from engine.quantization.quantized_linear import QuantizedMatrix
from engine.quantization.weight_quantization import INPUTS_MULTIPLE, QuantizedWeight
from serving_core.errors import ModelError
from serving_core.model_files.stored_quantization import FP8, FP8_SCALES, WHOLE, StoredQuantization
from serving_core.model_files.stored_tensors import FLOATS
from serving_core.sharding import Extent, whole


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Quantized weights: weight[n, k] = scales[groups[k], n] * (numbers[n, k] - zeros[groups[k], n]).

    The groups may be in any order.
    """

    numbers: torch.Tensor  # [N, K] uint8, below 2 ** bits
    groups: torch.Tensor  # [K] int64
    scales: torch.Tensor  # [G, N] float32
    zeros: torch.Tensor  # [G, N] uint8
    bits: int

    def dense(self) -> torch.Tensor:
        """Return the dequantized weights [N, K], float32."""
        zeros, scales = self.zeros[self.groups].t(), self.scales[self.groups].t()
        return self.numbers.float().sub_(zeros).mul_(scales)


def join(parts: Sequence[GroupedWeight]) -> GroupedWeight | None:
    """Stack weights of the same inputs (`parts`) along the outputs; return None if their groups of inputs differ."""
    first = parts[0]
    if not all(torch.equal(part.groups, first.groups) for part in parts):
        return None
    return GroupedWeight(
        torch.cat([part.numbers for part in parts]),
        first.groups,
        torch.cat([part.scales for part in parts], 1),
        torch.cat([part.zeros for part in parts], 1),
        first.bits,
    )


def matrix_of(weight: GroupedWeight, device: torch.device) -> QuantizedMatrix | None:
    """Return the weight on `device` as a matrix to compute with; None if kernels cannot compute with its groups.

    That is so if the groups are not runs of a multiple of 16 inputs, as with an act-order checkpoint of which a rank
    holds some inputs.
    """
    num_outputs, num_inputs = weight.numbers.shape
    order = torch.argsort(weight.groups, stable=True)
    groups, numbers = weight.groups[order], weight.numbers[:, order]
    group_size = math.gcd(*(torch.nonzero(groups.diff()).flatten() + 1).tolist())
    if group_size == 0:
        group_size = -(-num_inputs // INPUTS_MULTIPLE) * INPUTS_MULTIPLE
    if group_size % INPUTS_MULTIPLE:
        return None
    padding = -num_inputs % group_size
    chosen = groups[::group_size]
    quantized = QuantizedWeight(
        torch.nn.functional.pad(numbers, (0, padding)),
        weight.scales[chosen].t().contiguous(),
        weight.zeros[chosen].t().contiguous(),
        num_inputs,
        weight.bits,
    )
    matrix = QuantizedMatrix(num_outputs, num_inputs, weight.bits, group_size, device)
    matrix.put(0, quantized)
    if not torch.equal(order, torch.arange(num_inputs)):
        matrix.columns = order.to(device)
    return matrix


class Reader(Protocol):
    """Reads the weights of one format of quantized checkpoints."""

    def parts(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int
    ) -> list[Part]:
        """Return the tensors that store a module's weight, of `outputs` x `inputs` numbers over all ranks.

        `module` is its name in the checkpoint. Raises ModelError for sizes that the format cannot hold.
        """

    def read(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
    ) -> GroupedWeight:
        """Read the part of a module's weight within the held outputs and inputs.

        `stored` is the checkpoint's quantization. The caller has checked that the module's tensors match `parts`.
        Raises ModelError for numbers that are invalid.
        """


PER_WORD: Final = 8  # numbers of AWQ
# Bits 4 * i and up of a word hold output _OUTPUT_OF[i] of its eight.
_OUTPUT_OF: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_SHIFTS: Final = tuple(4 * _OUTPUT_OF.index(output) for output in range(PER_WORD))


class AwqReader:
    """Reads AWQ checkpoints (gemm): numbers and zeros of 4 bits, packed along the outputs."""

    def parts(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int
    ) -> list[Part]:
        if outputs % PER_WORD:
            raise ModelError(f"{module} has {outputs} outputs; AWQ packs {PER_WORD} of them together")
        num_groups = 1 if stored.group_size == WHOLE else -(-inputs // stored.group_size)
        return [
            whole_tensor(f"{module}.qweight", (inputs, outputs // PER_WORD), INTEGERS),
            whole_tensor(f"{module}.qzeros", (num_groups, outputs // PER_WORD), INTEGERS),
            whole_tensor(f"{module}.scales", (num_groups, outputs), FLOATS),
        ]

    def read(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
    ) -> GroupedWeight:
        num_groups = checkpoint.describe(f"{module}.scales")[0][0]
        group_size = inputs.total if stored.group_size == WHOLE else stored.group_size
        return GroupedWeight(
            _read_packed(checkpoint, f"{module}.qweight", inputs, outputs).t().contiguous(),
            torch.arange(inputs.held.start, inputs.held.stop) // group_size,
            checkpoint.read_all(Part(f"{module}.scales", (whole(num_groups), outputs))).float(),
            _read_packed(checkpoint, f"{module}.qzeros", whole(num_groups), outputs),
            stored.bits,
        )


def _read_packed(checkpoint: Checkpoint, name: str, rows: Extent, outputs: Extent) -> torch.Tensor:
    """Return [rows held, outputs held] uint8."""
    first_word, end_word = outputs.held.start // PER_WORD, -(-outputs.held.stop // PER_WORD)
    words = Extent(outputs.total // PER_WORD, range(first_word, end_word))
    packed = checkpoint.read_all(Part(name, (rows, words)))
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32)
    numbers = (packed.unsqueeze(2) >> shifts).bitwise_and_(15).to(torch.uint8).flatten(1)
    first = outputs.held.start - first_word * PER_WORD
    return numbers[:, first : first + len(outputs.held)]


WORD_BITS: Final = 32


class GptqReader:
    """Reads GPTQ checkpoints: numbers packed along the inputs, zeros along the outputs."""

    def parts(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int
    ) -> list[Part]:
        per_word = WORD_BITS // stored.bits
        if inputs % per_word or outputs % per_word:
            raise ModelError(f"{module} is {outputs} x {inputs}; GPTQ packs {per_word} of {stored.bits} bits together")
        num_groups = 1 if stored.group_size == WHOLE else -(-inputs // stored.group_size)
        wanted = [
            whole_tensor(f"{module}.qweight", (inputs // per_word, outputs), INTEGERS),
            whole_tensor(f"{module}.qzeros", (num_groups, outputs // per_word), INTEGERS),
            whole_tensor(f"{module}.scales", (num_groups, outputs), FLOATS),
        ]
        if f"{module}.g_idx" in checkpoint.names():
            wanted.append(whole_tensor(f"{module}.g_idx", (inputs,), INTEGERS))
        return wanted

    def read(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
    ) -> GroupedWeight:
        per_word = WORD_BITS // stored.bits
        words = _words(inputs, per_word)
        packed = checkpoint.read_all(Part(f"{module}.qweight", (words, outputs)))
        numbers = _unpack(packed, stored.bits).permute(0, 2, 1).flatten(0, 1)  # [inputs of whole words, N]
        numbers = numbers[_within(inputs, per_word)].t().contiguous()

        num_groups = checkpoint.describe(f"{module}.scales")[0][0]
        packed = checkpoint.read_all(Part(f"{module}.qzeros", (whole(num_groups), _words(outputs, per_word))))
        zeros = _unpack(packed, stored.bits).flatten(1)[:, _within(outputs, per_word)]
        if stored.zeros_start_at_one:
            zeros = (zeros + 1).bitwise_and_(2**stored.bits - 1)
        scales = checkpoint.read_all(Part(f"{module}.scales", (whole(num_groups), outputs))).float()
        groups = _groups(stored, checkpoint, module, inputs.total, num_groups)[inputs.held.start : inputs.held.stop]
        return GroupedWeight(numbers, groups, scales, zeros, stored.bits)


def _groups(
    stored: StoredQuantization, checkpoint: Checkpoint, module: str, num_inputs: int, num_groups: int
) -> torch.Tensor:
    name = f"{module}.g_idx"
    if name not in checkpoint.names():
        return torch.arange(num_inputs) // (num_inputs if stored.group_size == WHOLE else stored.group_size)
    groups = checkpoint.read_all(Part(name, (whole(num_inputs),))).long()
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise ModelError(f"{name} names groups outside 0 to {num_groups - 1}")
    return groups


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack [A, B] int32 -> [A, B, numbers in a word] uint8, the lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (packed.unsqueeze(2) >> shifts).bitwise_and_(2**bits - 1).to(torch.uint8)


def _words(extent: Extent, per_word: int) -> Extent:
    """Return the words that hold a run of numbers."""
    held = range(extent.held.start // per_word, -(-extent.held.stop // per_word))
    return Extent(extent.total // per_word, held)


def _within(extent: Extent, per_word: int) -> slice:
    """Return the position of the run among the numbers of its words."""
    first = extent.held.start % per_word
    return slice(first, first + len(extent.held))


ZERO: Final = 128  # of W8A8


class W8A8Reader:
    """Reads compressed-tensors checkpoints with 8-bit weights and activations.

    Weights are signed bytes, with one scale for each output.
    """

    def parts(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int
    ) -> list[Part]:
        return [
            whole_tensor(f"{module}.weight", (outputs, inputs), ("I8",)),
            whole_tensor(f"{module}.weight_scale", (outputs, 1), FLOATS),
        ]

    def read(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
    ) -> GroupedWeight:
        numbers = checkpoint.read_all(Part(f"{module}.weight", (outputs, inputs)))
        scales = checkpoint.read_all(Part(f"{module}.weight_scale", (outputs, whole(1)))).float()
        return GroupedWeight(
            numbers.to(torch.int16).add_(ZERO).to(torch.uint8),
            torch.zeros(len(inputs.held), dtype=torch.int64),
            scales.t().contiguous(),
            torch.full((1, len(outputs.held)), ZERO, dtype=torch.uint8),
            stored.bits,
        )


READERS: Final[dict[str, Reader]] = {"gptq": GptqReader(), "awq": AwqReader(), "w8a8": W8A8Reader()}


SCALES: Final = FP8_SCALES[:2]  # the names of a weight's factor; activations stay unquantized


class Fp8Checkpoint(Checkpoint):
    """A checkpoint some of whose weights are stored as 8-bit floats, which `read` returns as float32."""

    def __init__(self, checkpoint: Checkpoint, stored: StoredQuantization) -> None:
        self._checkpoint = checkpoint
        self._block = stored.block

    def names(self) -> set[str]:
        return {name for name in self._checkpoint.names() if name.rpartition(".")[2] not in FP8_SCALES}

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        shape, dtype = self._checkpoint.describe(name)
        return shape, "F32" if dtype == FP8 else dtype

    def check(self, part: Part) -> None:
        """Raise ModelError unless the tensor has the shape and one of the dtypes of `part`.

        A weight of 8-bit floats must also have scales of a matching shape.
        """
        super().check(part)
        shape, dtype = self._checkpoint.describe(part.name)
        if dtype != FP8:
            return
        name = self._scale_name(part.name)
        scale_shape, scale_dtype = self._checkpoint.describe(name)
        wanted = self._scale_shapes(shape)
        if scale_shape not in wanted or scale_dtype not in FLOATS:
            raise ModelError(f"{name} is {scale_dtype} {list(scale_shape)}; it must be floats {list(wanted[0])}")

    def read(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        if self._checkpoint.describe(part.name)[1] != FP8:
            yield from self._checkpoint.read(part)
            return
        outputs, inputs = part.extents
        scales = self._scales(part.name)
        for row, tensor in self._checkpoint.read(part):
            first = outputs.held.start + row
            yield row, tensor.float().mul_(self._scales_of(scales, range(first, first + len(tensor)), inputs))

    def spans(self, part: Part) -> Iterator[Span]:
        return self._checkpoint.spans(part)

    def _scale_name(self, weight: str) -> str:
        module = weight.removesuffix(".weight")
        for suffix in SCALES:
            if f"{module}.{suffix}" in self._checkpoint.names():
                return f"{module}.{suffix}"
        raise ModelError(f"the weights lack {module}.{SCALES[0]}")

    def _scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes that the scales of a weight may have."""
        if self._block is None:
            return [(shape[0], 1), (shape[0],), (), (1,), (1, 1)]
        return [tuple(-(-size // step) for size, step in zip(shape, self._block, strict=True))]

    def _scales(self, weight: str) -> torch.Tensor:
        """Return the scales, two-dimensional float32."""
        name = self._scale_name(weight)
        extents = tuple(map(whole, self._checkpoint.describe(name)[0]))
        scales = self._checkpoint.read_all(Part(name, extents)).float()
        return scales if scales.dim() == 2 else scales.reshape(-1, 1)

    def _scales_of(self, scales: torch.Tensor, rows: range, inputs: Extent) -> torch.Tensor:
        """Return the factors of these rows of the held inputs."""
        if self._block is None:
            return scales if len(scales) == 1 else scales[rows.start : rows.stop]
        of_rows, of_columns = (
            torch.arange(held.start, held.stop) // step
            for held, step in zip((rows, inputs.held), self._block, strict=True)
        )
        return scales[of_rows][:, of_columns]
