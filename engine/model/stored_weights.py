"""Read weights as quantized checkpoints store them, and convert them to matrices to compute with.

Each format of integers has a reader; engine/model/stored_floats.py reads the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from engine.model.checkpoint import INTEGERS, Checkpoint, Part, whole_tensor
from engine.quantization.quantized_linear import QuantizedMatrix
from engine.quantization.weight_quantization import INPUTS_MULTIPLE, QuantizedWeight
from serving_core.errors import ModelError
from serving_core.model_files.stored_quantization import WHOLE, StoredQuantization
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


def matrix_sizes(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """Return the numbers of rows and columns of a stored matrix. Raises ModelError if the tensor is no matrix."""
    shape, _ = checkpoint.describe(name)
    if len(shape) != 2:
        raise ModelError(f"{name} has shape {list(shape)}; it must be a matrix")
    return shape[0], shape[1]


class StoredFormat(Protocol):
    """Names the tensors that store the weights of one format of quantized checkpoints."""

    numbers: tuple[str, ...]  # the names that the tensor of a weight's numbers may have

    def sizes(self, stored: StoredQuantization, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of a module whose weight is stored in this format.

        `module` is its name in `checkpoint`, and `stored` the checkpoint's quantization. Raises ModelError if a tensor
        that tells the sizes is damaged.
        """

    def parts(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int
    ) -> list[Part]:
        """Return the tensors that store a module's weight, of `outputs` x `inputs` numbers over all ranks.

        `module` is its name in the checkpoint. Raises ModelError for sizes that the format cannot hold.
        """


class Reader(StoredFormat, Protocol):
    """Reads the weights of one format of quantized checkpoints."""

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

    numbers: tuple[str, ...] = ("qweight",)

    def sizes(self, stored: StoredQuantization, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        inputs, words = matrix_sizes(checkpoint, f"{module}.qweight")
        return words * PER_WORD, inputs

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
WIDE_INTEGERS: Final = (*INTEGERS, "I64")


class GptqReader:
    """Reads GPTQ checkpoints: numbers packed along the inputs, zeros along the outputs."""

    numbers: tuple[str, ...] = ("qweight",)

    def sizes(self, stored: StoredQuantization, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        words, outputs = matrix_sizes(checkpoint, f"{module}.qweight")
        return outputs, words * WORD_BITS // stored.bits

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
    stored: StoredQuantization,
    checkpoint: Checkpoint,
    module: str,
    num_inputs: int,
    num_groups: int,
    kind: str = "g_idx",
) -> torch.Tensor:
    name = f"{module}.{kind}"
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
    return Extent(-(-extent.total // per_word), held)


def _within(extent: Extent, per_word: int) -> slice:
    """Return the position of the run among the numbers of its words."""
    first = extent.held.start % per_word
    return slice(first, first + len(extent.held))


class CompressedReader:
    """Reads integer weights of compressed-tensors checkpoints.

    The numbers are signed: bytes (`weight`), or packed along the inputs with 2 ** (bits - 1) added (`weight_packed`).
    Zeros are bytes, or packed along the outputs in the same way.
    """

    numbers: tuple[str, ...] = ("weight_packed", "weight")

    def sizes(self, stored: StoredQuantization, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        if f"{module}.weight" in checkpoint.names():
            return matrix_sizes(checkpoint, f"{module}.weight")
        outputs, inputs = checkpoint.read_all(whole_tensor(f"{module}.weight_shape", (2,), WIDE_INTEGERS)).tolist()
        return outputs, inputs

    def parts(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int
    ) -> list[Part]:
        per_word, names = WORD_BITS // stored.bits, checkpoint.names()
        if stored.group_size != WHOLE and inputs % stored.group_size:
            raise ModelError(f"{module} has {inputs} inputs; groups of {stored.group_size} do not divide them")
        num_groups = 1 if stored.group_size == WHOLE else inputs // stored.group_size
        wanted = [whole_tensor(f"{module}.weight_scale", (outputs, num_groups), FLOATS)]
        if stored.bits == 8 and f"{module}.weight" in names:
            wanted.append(whole_tensor(f"{module}.weight", (outputs, inputs), ("I8",)))
        else:
            wanted.append(whole_tensor(f"{module}.weight_packed", (outputs, -(-inputs // per_word)), INTEGERS))
            wanted.append(whole_tensor(f"{module}.weight_shape", (2,), WIDE_INTEGERS))
        if (name := f"{module}.weight_zero_point") in names:
            is_packed = checkpoint.describe(name)[1] in INTEGERS
            rows = -(-outputs // per_word) if is_packed else outputs
            wanted.append(whole_tensor(name, (rows, num_groups), (*INTEGERS, "I8")))
        if (name := f"{module}.weight_g_idx") in names:
            wanted.append(whole_tensor(name, (inputs,), INTEGERS))
        return wanted

    def read(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
    ) -> GroupedWeight:
        scales_name, offset = f"{module}.weight_scale", 2 ** (stored.bits - 1)
        num_groups = checkpoint.describe(scales_name)[0][1]
        if stored.bits == 8 and f"{module}.weight" in checkpoint.names():
            numbers = checkpoint.read_all(Part(f"{module}.weight", (outputs, inputs)))
            numbers = numbers.to(torch.int16).add_(offset).to(torch.uint8)
        else:
            per_word = WORD_BITS // stored.bits
            packed = checkpoint.read_all(Part(f"{module}.weight_packed", (outputs, _words(inputs, per_word))))
            numbers = _unpack(packed, stored.bits).flatten(1)[:, _within(inputs, per_word)].contiguous()
        scales = checkpoint.read_all(Part(scales_name, (outputs, whole(num_groups)))).float().t().contiguous()
        zeros = self._zeros(stored, checkpoint, f"{module}.weight_zero_point", outputs, num_groups)
        groups = _groups(stored, checkpoint, module, inputs.total, num_groups, "weight_g_idx")
        return GroupedWeight(
            numbers,
            groups[inputs.held.start : inputs.held.stop],
            scales,
            torch.full_like(scales, offset, dtype=torch.uint8) if zeros is None else zeros,
            stored.bits,
        )

    def _zeros(
        self, stored: StoredQuantization, checkpoint: Checkpoint, name: str, outputs: Extent, num_groups: int
    ) -> torch.Tensor | None:
        """Return the zeros [G, N] of a module; None where all are in the middle."""
        if name not in checkpoint.names():
            return None
        if checkpoint.describe(name)[1] not in INTEGERS:
            zeros = checkpoint.read_all(Part(name, (outputs, whole(num_groups))))
            return zeros.t().to(torch.int16).add(2 ** (stored.bits - 1)).to(torch.uint8)
        per_word = WORD_BITS // stored.bits
        packed = checkpoint.read_all(Part(name, (_words(outputs, per_word), whole(num_groups))))
        unpacked = _unpack(packed.t().contiguous(), stored.bits).flatten(1)
        return unpacked[:, _within(outputs, per_word)].contiguous()


READERS: Final[dict[str, Reader]] = {
    "gptq": GptqReader(),
    "awq": AwqReader(),
    "w4a16": CompressedReader(),
    "w8a16": CompressedReader(),
    "w8a8": CompressedReader(),
}
