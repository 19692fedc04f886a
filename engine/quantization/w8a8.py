"""Read weights of compressed-tensors checkpoints with 8-bit weights and activations: signed bytes, and a scale for each
output.
"""

from typing import Final

import torch

from engine.model.checkpoint import Checkpoint, Part, whole_tensor
from engine.quantization.grouped_weight import GroupedWeight
from serving_core.model_files.stored_quantization import StoredQuantization
from serving_core.model_files.stored_tensors import FLOATS
from serving_core.sharding import Extent, whole

ZERO: Final = 128


def parts(stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int) -> list[Part]:
    """Return the tensors of a module with these total sizes."""
    return [
        whole_tensor(f"{module}.weight", (outputs, inputs), ("I8",)),
        whole_tensor(f"{module}.weight_scale", (outputs, 1), FLOATS),
    ]


def read(
    stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
) -> GroupedWeight:
    """Return the held part of a module, whose tensors match `parts`."""
    numbers = checkpoint.read_all(Part(f"{module}.weight", (outputs, inputs)))
    scales = checkpoint.read_all(Part(f"{module}.weight_scale", (outputs, whole(1)))).float()
    return GroupedWeight(
        numbers.to(torch.int16).add_(ZERO).to(torch.uint8),
        torch.zeros(len(inputs.held), dtype=torch.int64),
        scales.t().contiguous(),
        torch.full((1, len(outputs.held)), ZERO, dtype=torch.uint8),
        stored.bits,
    )
