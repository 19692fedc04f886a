"""Read weights of AWQ checkpoints (gemm): numbers and zeros of 4 bits, packed along the outputs."""

from typing import Final

import torch

from engine.model.checkpoint import INTEGERS, Checkpoint, Part, whole_tensor
from engine.quantization.grouped_weight import GroupedWeight
from serving_core.errors import ModelError
from serving_core.model_files.stored_quantization import WHOLE, StoredQuantization
from serving_core.model_files.stored_tensors import FLOATS
from serving_core.sharding import Extent, whole

PER_WORD: Final = 8
# Bits 4 * i and up of a word hold output _OUTPUT_OF[i] of its eight.
_OUTPUT_OF: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_SHIFTS: Final = tuple(4 * _OUTPUT_OF.index(output) for output in range(PER_WORD))


def parts(stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int) -> list[Part]:
    """Return the tensors of a module with these total sizes. Raises ModelError for sizes that the format cannot
    hold.
    """
    if outputs % PER_WORD:
        raise ModelError(f"{module} has {outputs} outputs; AWQ packs {PER_WORD} of them together")
    num_groups = 1 if stored.group_size == WHOLE else -(-inputs // stored.group_size)
    return [
        whole_tensor(f"{module}.qweight", (inputs, outputs // PER_WORD), INTEGERS),
        whole_tensor(f"{module}.qzeros", (num_groups, outputs // PER_WORD), INTEGERS),
        whole_tensor(f"{module}.scales", (num_groups, outputs), FLOATS),
    ]


def read(
    stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
) -> GroupedWeight:
    """Return the part of a module's weights within the held outputs and inputs.

    The caller has checked that the module's tensors match those of `parts` of this file.
    """
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
