"""Compute rotary position embeddings (RoFormer, arXiv 2104.09864), in float32 and in transformers' order."""

import math
from typing import TypeAlias

import torch
from torch.nn import functional

from serving_core.model_files.rope import DefaultRope, FactorRope, LinearRope, Llama3Rope, Rope, YarnRope

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # the result of RotaryEmbedding.tables


class RotaryEmbedding:
    """Cosines and sines of positions, computed in every step, without a table of max_position_embeddings rows."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device, rotary_dim: int | None = None) -> None:
        """Prepare the frequencies. With heads in the order of `head_order`, only rotary_dim elements rotate; the other
        pairs have angle 0.
        """
        turning = inverse_frequencies(rope, head_dim if rotary_dim is None else rotary_dim)
        self._inverse_frequencies = functional.pad(turning, (0, head_dim // 2 - len(turning))).to(device)
        self._factor = rope.attention_factor if isinstance(rope, YarnRope) else 1.0

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Return the cosines and sines, each [T, 1, head_dim] in `dtype`, of positions [T].

        The first half of the sines is negated, as `rotate` needs.
        """
        angles = positions.unsqueeze(-1).float() * self._inverse_frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return torch.cat((cos, cos), -1).unsqueeze(1).to(dtype), torch.cat((-sin, sin), -1).unsqueeze(1).to(dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Return heads [T, H, head_dim] rotated by the angles whose cosines and signed sines are given.

    Both come from `RotaryEmbedding.tables`. The elements of a pair are half a head apart.
    """
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), signed_sin)


def head_order(head_dim: int, rotary_dim: int, are_neighbours: bool) -> list[int]:
    """Return the element order of a head that puts pairs half a head apart, and rotated pairs first.

    The first rotary_dim elements are rotated. `are_neighbours`: the elements of a pair are adjacent, else half of
    rotary_dim apart. Queries and keys in one order have unchanged products.
    """
    turning, still = range(rotary_dim), range(rotary_dim, head_dim)
    half, rest = rotary_dim // 2, len(still) // 2
    firsts, seconds = (turning[::2], turning[1::2]) if are_neighbours else (turning[:half], turning[half:])
    return [*firsts, *still[:rest], *seconds, *still[rest:]]


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the radians per position of each pair of elements under this kind of rotary embedding (`rope`).

    They are [head_dim / 2] float32 in host memory, rounded exactly as in transformers: at position 100,000 one unit in
    the last place is a thousandth of a radian.
    """
    pair_periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    match rope:
        case DefaultRope():
            return 1.0 / pair_periods
        case LinearRope():
            return 1.0 / pair_periods / rope.factor
        case YarnRope():
            return _yarn(rope, pair_periods, head_dim)
        case Llama3Rope():
            return _llama3(rope, 1.0 / pair_periods)
        case FactorRope():
            return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32, device="cpu") * pair_periods)


def _yarn(rope: YarnRope, pair_periods: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Scale frequencies as YaRN: fast pairs keep theirs, slow ones are interpolated, with a linear ramp between
    (section 3.2).
    """

    def pair_with(num_turns: float) -> float:
        """Return the pair, as a real number, that turns num_turns times within the original context."""
        period = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return (head_dim * math.log(period)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * pair_periods) * (1 - kept) + 1.0 / pair_periods * kept


def _llama3(rope: Llama3Rope, frequencies: torch.Tensor) -> torch.Tensor:
    """Scale frequencies as Llama 3.1: pairs that turn at least high_freq_factor times within the original context stay,
    those that turn at most low_freq_factor times are slowed by `factor`, with a linear transition between.
    """
    num_turns = rope.original_max_position_embeddings / (2 * math.pi / frequencies)
    kept = ((num_turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies
