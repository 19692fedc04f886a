"""Represent weights as quantized checkpoints store them, and convert them to matrices to compute with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.quantization.quantized_linear import QuantizedMatrix
from engine.quantization.weight_quantization import INPUTS_MULTIPLE, QuantizedWeight


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Weights with weight[n, k] = scales[groups[k], n] * (numbers[n, k] - zeros[groups[k], n]), in any order of the
    groups.
    """

    numbers: torch.Tensor  # [N, K] uint8, below 2 ** bits
    groups: torch.Tensor  # [K] int64
    scales: torch.Tensor  # [G, N] float32
    zeros: torch.Tensor  # [G, N] uint8
    bits: int

    def dense(self) -> torch.Tensor:
        """Return the weights [N, K], float32."""
        zeros, scales = self.zeros[self.groups].t(), self.scales[self.groups].t()
        return self.numbers.float().sub_(zeros).mul_(scales)


def join(parts: Sequence[GroupedWeight]) -> GroupedWeight | None:
    """Stack weights of the same inputs along the outputs; None if their groups differ."""
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
    """Return the weight as a matrix to compute with, or None.

    None if the groups are not runs of a multiple of 16 inputs, as with an act-order checkpoint of which a rank holds
    some inputs.
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
