"""Quantize weights to small integers: weight[output, input] = scale * (number - zero), with a scale and a zero for each
output and group of inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from serving_core.settings import GROUP_SIZE_4_BIT

INPUTS_MULTIPLE: Final = 16  # of which every group size is a multiple
_TILE_ELEMENTS: Final = 2**20  # converted to float32 at a time


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Quantized weights of N outputs and K inputs, with a scale and a zero for each output and group of inputs.

    The inputs are padded to whole groups; the padding's content does not matter.
    """

    numbers: torch.Tensor  # [N, G * group_size] uint8, below 2 ** bits
    scales: torch.Tensor  # [N, G] float32
    zeros: torch.Tensor  # [N, G] uint8
    num_inputs: int
    bits: int  # 4 or 8

    @property
    def group_size(self) -> int:
        return self.numbers.shape[1] // self.scales.shape[1]

    def dense(self) -> torch.Tensor:
        """Return the dequantized weights [N, K], float32."""
        grouped = self.numbers.view(-1, self.scales.shape[1], self.group_size).float()
        grouped.sub_(self.zeros.unsqueeze(2)).mul_(self.scales.unsqueeze(2))
        dense: torch.Tensor = grouped.flatten(1)[:, : self.num_inputs]
        return dense


class Packed(NamedTuple):
    """Weights [num_outputs, num_inputs] as native/linear.h packs them.

    They are in V vectors of outputs and G groups of inputs.
    """

    weights: torch.Tensor  # [V, words of an output, outputs of a vector, 4] uint8
    scales: torch.Tensor  # [V, G, outputs of a vector] float32
    zeros: torch.Tensor  # [V, G, outputs of a vector] uint8
    bias: torch.Tensor | None  # [num_outputs] float32
    bits: int  # 4 or 8
    group_size: int
    num_inputs: int
    num_outputs: int

    def words(self) -> torch.Tensor:
        """Return the weights as 32-bit words: a view [V, words of an output, outputs of a vector], int32."""
        return self.weights.view(torch.int32).squeeze(-1)


def quantize(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Round a weight [N, K] to the nearest weight of 4 or 8 bits.

    8 bits have one scale for each output and zero 128, 4 bits a scale and a zero for each GROUP_SIZE_4_BIT inputs.
    """
    num_inputs = weight.shape[1]
    group_size = GROUP_SIZE_4_BIT if bits == 4 else -(-num_inputs // INPUTS_MULTIPLE) * INPUTS_MULTIPLE
    padded = functional.pad(weight.float(), (0, -num_inputs % group_size))
    grouped = padded.view(len(weight), -1, group_size)
    numbers, scales, zeros = _symmetric(grouped) if bits == 8 else _asymmetric(grouped)
    return QuantizedWeight(numbers.flatten(1), scales, zeros, num_inputs, bits)


def quantize_tiles(weight: torch.Tensor, bits: int) -> Iterator[tuple[int, QuantizedWeight]]:
    """Yield a weight [N, K], quantized to 4 or 8 bits, in tiles of outputs; each with the number of its first output.

    All tiles but the last have a multiple of 16 outputs.
    """
    rows = max(1, _TILE_ELEMENTS // max(1, weight.shape[1]) // 16) * 16
    for first in range(0, weight.shape[0], rows):
        yield first, quantize(weight[first : first + rows], bits)


def _symmetric(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = grouped.abs().amax(2).div_(127)
    numbers = grouped.div(_divisors(scales).unsqueeze(2)).round_().clamp_(-127, 127).add_(128)
    return numbers.to(torch.uint8), scales, torch.full_like(scales, 128, dtype=torch.uint8)


def _asymmetric(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    least, most = grouped.amin(2).clamp_max_(0), grouped.amax(2).clamp_min_(0)
    scales = (most - least).div_(15)
    divisors = _divisors(scales)
    zeros = least.neg_().div_(divisors).round_()
    numbers = grouped.div(divisors.unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, 15)
    return numbers.to(torch.uint8), scales, zeros.to(torch.uint8)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    return scales.masked_fill(scales == 0, 1.0)
