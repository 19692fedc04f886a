"""Reads weights as compressed-tensors stores those whose activations are rounded to 8 bits as well: signed bytes, and a
scale for each output."""

from typing import Final

import torch

from engine.model.checkpoint import Checkpoint, Part, whole_tensor
from engine.quantization.grouped_weight import GroupedWeight
from serving_core.sharding import Extent, whole
from serving_core.stored_quantization import StoredQuantization
from serving_core.stored_tensors import FLOATS

ZERO: Final = 128


def parts(stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int) -> list[Part]:
    """The tensors of a module with these whole sizes."""
    return [
        whole_tensor(f"{module}.weight", (outputs, inputs), ("I8",)),
        whole_tensor(f"{module}.weight_scale", (outputs, 1), FLOATS),
    ]


def read(
    stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
) -> GroupedWeight:
    """The held part of a module, whose tensors are as `parts` wants them."""
    numbers = checkpoint.read_all(Part(f"{module}.weight", (outputs, inputs)))
    scales = checkpoint.read_all(Part(f"{module}.weight_scale", (outputs, whole(1)))).float()
    return GroupedWeight(
        numbers.to(torch.int16).add_(ZERO).to(torch.uint8),
        torch.zeros(len(inputs.held), dtype=torch.int64),
        scales.t().contiguous(),
        torch.full((1, len(outputs.held)), ZERO, dtype=torch.uint8),
        stored.bits,
    )
