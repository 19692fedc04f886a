"""Sample tokens from many rows of logits at once: temperature, min_p, top_k, top_p and the random choice, with torch.

Masses are integers, whose sums are equal in any order: so a token depends neither on other rows nor on the number of
threads.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import torch

LIKELIEST_MASS: Final = 2.0**40  # mass of the likeliest token; a whole vocabulary of them is below 2^63
CACHED_WEIGHTS: Final = 2**16  # computed at a time, on a CPU
DEVICE_WEIGHTS: Final = 2**23  # and on a device, where each takes some 40 bytes meanwhile
DIGIT_BITS: Final = 10  # three digits are the 30 bits of the float32 numbers from 0 to 1

T = TypeVar("T")


class RowSampling(NamedTuple):
    """How one token is sampled from the row number `row` of logits.

    The weight of a token is e^((logit - highest) / temperature). A token stays if its weight is at least min_p, at
    least the top_k-th largest, and in the nucleus of the remaining tokens: the likeliest that hold top_p of the mass.
    Tokens that tie with the last one that stays, stay too.
    """

    row: int
    number: float  # in [0, 1): selects the first token at which the cumulative weight exceeds this fraction
    temperature: float
    min_p: float = 0.0
    top_p: float = 1.0  # off
    top_k: int = 0  # off, as is any number of at least all tokens


def sample_rows(logits: torch.Tensor, highest: torch.Tensor, samplings: Sequence[RowSampling]) -> torch.Tensor:
    """Sample a token for each of `samplings` from its row of logits [S, vocab_size]; int64 [len(samplings)].

    `highest` [S], float32, holds the maximum of each row.
    """
    pieces = _pieces(logits, samplings)
    return torch.cat(
        [_sample_piece(*_chosen(logits, highest, [sampling.row for sampling in piece]), piece) for piece in pieces]
    )


def log_totals(logits: torch.Tensor, highest: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the logarithm of the sum of e^logit of each row that `rows` numbers, float64 [len(rows)].

    `highest` [S], float32, holds the maximum of each row of logits; a row without a finite maximum gets NaN.
    """
    return torch.cat([_log_totals(*_chosen(logits, highest, piece)) for piece in _pieces(logits, rows)])


def _pieces(logits: torch.Tensor, rows: Sequence[T]) -> list[Sequence[T]]:
    """Split `rows` into pieces that are computed at once."""
    most = CACHED_WEIGHTS if logits.device.type == "cpu" else DEVICE_WEIGHTS
    together = max(1, most // logits.shape[1])
    return [rows[first : first + together] for first in range(0, len(rows), together)]


def _chosen(logits: torch.Tensor, highest: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows in float32, and their maxima in a column."""
    if [*rows] != [*range(len(logits))]:
        chosen = _on(logits.device, torch.tensor(rows))
        logits, highest = logits[chosen], highest[chosen]
    return logits.float(), highest[:, None]


def _log_totals(logits: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    whole = _masses(logits.sub(highest).exp_()).sum(-1).double() / LIKELIEST_MASS
    total = highest[:, 0].double() + whole.log()
    return torch.where(highest[:, 0].isfinite(), total, torch.nan)


def _sample_piece(logits: torch.Tensor, highest: torch.Tensor, samplings: Sequence[RowSampling]) -> torch.Tensor:
    device, num_columns = logits.device, logits.shape[1]
    columns = torch.tensor([sampling[1:5] for sampling in samplings], dtype=torch.float64).T[:, :, None]
    numbers, temperatures, min_p, top_p = _on(device, columns)
    weights = logits.sub(highest).div_(temperatures.float()).exp_()
    if any(sampling.min_p > 0 for sampling in samplings):
        weights.mul_(weights >= min_p.float())
    top_k = [sampling.top_k if 0 < sampling.top_k < num_columns else 0 for sampling in samplings]
    has_nucleus = [sampling.top_p < 1 for sampling in samplings]
    if any(top_k) or any(has_nucleus):
        weights.mul_(weights >= _least_weights(weights, top_k, top_p, has_nucleus))
    masses = _masses(weights).cumsum_(-1)
    whole = masses[:, -1:]
    passed = torch.minimum((numbers * whole).long(), whole - 1)  # in case the product is rounded up to the total
    return torch.searchsorted(masses, passed, right=True).squeeze(1).clamp_(max=num_columns - 1)


def _on(device: torch.device, values: torch.Tensor) -> torch.Tensor:
    return values.to(device, non_blocking=True)


def _masses(weights: torch.Tensor) -> torch.Tensor:
    return weights.mul(LIKELIEST_MASS).long()


def _least_weights(
    weights: torch.Tensor, top_k: Sequence[int], top_p: torch.Tensor, has_nucleus: Sequence[bool]
) -> torch.Tensor:
    """Return the weights [len(top_k), 1] that tokens need for top_k and the nuclei, of weights that min_p left.

    Sets weights outside top_k to 0, in place.
    """
    device, num_columns = weights.device, weights.shape[1]
    limits = [count or (num_columns if nucleus else 1) for count, nucleus in zip(top_k, has_nucleus, strict=True)]
    most = max(limits)
    if most == num_columns and device.type != "cpu":
        return _least_unsorted(weights, top_k, top_p)
    num_likeliest = _on(device, torch.tensor(limits)[:, None])
    if most == num_columns:  # on a CPU asking is cheap and sorting is not
        num_likeliest = torch.where(num_likeliest == most, _most_in_nuclei(weights, top_p), num_likeliest)
        most = int(num_likeliest.max())
    likeliest = (weights.sort(descending=True) if most == num_columns else weights.topk(most)).values
    least = likeliest.gather(1, num_likeliest - 1) * _on(device, torch.tensor(top_k)[:, None] > 0)
    if not any(has_nucleus):
        return least
    if any(top_k):
        weights.mul_(weights >= least)
    edges = torch.searchsorted(_masses(likeliest).cumsum_(-1), _needed(weights, top_p))
    return torch.where(top_p < 1, likeliest.gather(1, torch.minimum(edges, num_likeliest - 1)), least)


def _least_unsorted(weights: torch.Tensor, top_k: Sequence[int], top_p: torch.Tensor) -> torch.Tensor:
    """Compute `_least_weights` without sorting, where a nucleus may have any number of tokens."""
    least = torch.zeros_like(top_p, dtype=weights.dtype)
    if most := max(top_k):
        counts = _on(weights.device, torch.tensor(top_k)[:, None])
        least = weights.topk(most).values.gather(1, (counts - 1).clamp_(min=0)) * (counts > 0)
        weights.mul_(weights >= least)
    return torch.where(top_p < 1, least_in_nuclei(weights, _needed(weights, top_p).clamp_(min=1)), least)


def least_in_nuclei(weights: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """Return the largest numbers [R, 1] such that all weights not below have the needed mass.

    Weights [R, V], float32, are from 0 to 1; needed masses [R, 1], int64, are at least 1 and at most a row's. Positive
    floats are ordered like their bits, which are determined digit by digit, from the masses of all that share a digit.
    """
    weights = torch.where(weights <= 1, weights, 1.0)  # NaN in a row that fails anyway
    bits, masses = weights.view(torch.int32), _masses(weights)
    least = torch.zeros_like(needed)
    for shift in (2 * DIGIT_BITS, DIGIT_BITS, 0):
        digits = (bits >> shift).bitwise_and_(2**DIGIT_BITS - 1).long()
        of_digits = masses.new_zeros(len(masses), 2**DIGIT_BITS).scatter_add_(1, digits, masses)
        not_below = of_digits.flip(1).cumsum(1).flip(1)
        digit = ((not_below >= needed).sum(1, keepdim=True) - 1).clamp_(min=0)
        needed = needed - (not_below - of_digits).gather(1, digit)
        masses.mul_(digits == digit)
        least = least << DIGIT_BITS | digit
    return least.int().view(torch.float32)


def _needed(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the mass [R, 1] of a nucleus."""
    return (top_p * _masses(weights).sum(-1, keepdim=True)).ceil().long()


def _most_in_nuclei(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return an upper bound [len(top_p), 1] of a nucleus's tokens: those not below the weight at which all lower
    ones together make up the rest of the mass.
    """
    num_columns = weights.shape[1]
    cuts = (1 - top_p) * _masses(weights).sum(-1, keepdim=True) / (LIKELIEST_MASS * num_columns)
    return (weights >= cuts.float()).sum(-1, keepdim=True).clamp_(min=1)
