"""Read weights of GPTQ checkpoints: numbers packed along the inputs, zeros along the outputs."""

from typing import Final

import torch

from engine.model.checkpoint import INTEGERS, Checkpoint, Part, whole_tensor
from engine.quantization.grouped_weight import GroupedWeight
from serving_core.errors import ModelError
from serving_core.model_files.stored_quantization import WHOLE, StoredQuantization
from serving_core.model_files.stored_tensors import FLOATS
from serving_core.sharding import Extent, whole

WORD_BITS: Final = 32


def parts(stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int) -> list[Part]:
    """Return the tensors of a module with these total sizes. Raises ModelError for sizes that the format cannot
    hold.
    """
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
    stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
) -> GroupedWeight:
    """Return the held part of a module, whose tensors match `parts`. Raises ModelError for an invalid g_idx."""
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
