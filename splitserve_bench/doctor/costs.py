"""Fit what prompts and KV transfers cost on one machine to measured times."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from splitserve_bench.simulate.profile import Grid, TransferProfile

DEGREES: Final = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The seconds of a prompt of n tokens: base_s + token_s n + pair_s n²."""

    base_s: float
    token_s: float
    pair_s: float

    def prefill_s(self, num_tokens: int) -> float:
        """Return the prefill time in seconds of a prompt of `num_tokens` tokens."""
        return self.base_s + self.token_s * num_tokens + self.pair_s * num_tokens**2


@dataclass(frozen=True, slots=True)
class WholeCost:
    """What one node costs that has the cores of both."""

    prefill: PrefillCost
    decode: Grid  # seconds of a step, by answers and tokens in each cache


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """What two nodes of one machine cost, and one node in their place, None where that was not measured."""

    prefill: PrefillCost
    decode: Grid
    kv_transfer: TransferProfile
    token_bytes: int  # of KV
    whole: WholeCost | None = None

    def transfer_s(self, prompt_tokens: int) -> float:
        """Return the time in seconds of the KV transfer of a prompt of `prompt_tokens` tokens."""
        return self.kv_transfer.transfer_s(prompt_tokens * self.token_bytes)


def fit_prefill(points: Sequence[tuple[int, float]]) -> PrefillCost:
    """Return the prefill cost closest to these pairs of prompt tokens and seconds, by least relative squares.

    No part of it is below 0. At least one pair is needed.
    """
    lengths, seconds = np.array(points, dtype=float).T
    candidates = []
    for count in (1, 2, 3):
        for degrees in itertools.combinations(DEGREES, count):
            columns = np.stack([lengths**degree / seconds for degree in degrees], axis=1)
            found = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)[0]
            if (found >= 0).all():
                error = float(np.square(columns @ found - 1).sum())
                candidates.append((error, dict(zip(degrees, map(float, found), strict=True))))
    _, best = min(candidates, key=lambda candidate: (round(candidate[0], 12), len(candidate[1])))
    return PrefillCost(*(best.get(degree, 0.0) for degree in DEGREES))


def fit_transfers(points: Sequence[tuple[int, float]]) -> TransferProfile:
    """Return latency and bandwidth of transfers from pairs of bytes and seconds, of which at least two are needed.

    The bandwidth is that between the smallest and the largest; the latency is what the smallest takes beyond that.
    """
    (few_bytes, few_s), (many_bytes, many_s) = min(points), max(points)
    byte_s = max((many_s - few_s) / (many_bytes - few_bytes), 0.0) or many_s / many_bytes
    return TransferProfile(max(0.0, few_s - few_bytes * byte_s), 1 / byte_s)
