"""How sure a share is when its misses come in clusters. Pure.

A queue that has grown delays many requests, not one: misses follow each other. A run of such requests says no more
than a smaller number of independent ones: their number divided by the design effect, 1 + 2 x the sum of the
autocorrelations. The sum is Geyer's initial positive sequence: lags in pairs, as long as a pair's sum is positive.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import NormalDist, fmean, stdev
from typing import Final

CONFIDENCE: Final = 0.95
Z: Final = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

SAME: Final = 1e-9  # no difference of shares but one of rounding


def effective_size(series: Sequence[int]) -> float:
    """How many independent requests say as much about the mean as these, in the order of sending: 1 for a good one and
    0 for another, or the differences of two contenders. At least 2 of 2 or more; all of them when they are all alike,
    as nothing tells how they cluster."""
    num = len(series)
    if num < 3 or len(set(series)) == 1:
        return float(num)
    product_at = _products_of(series)
    variance = product_at(0)
    total = -variance
    for lag in range(0, num - 1, 2):
        pair = product_at(lag) + product_at(lag + 1)
        if pair <= 0:
            break
        total += 2 * pair
    return num / min(max(1.0, total / variance), num / 2)


def _products_of(series: Sequence[int]) -> Callable[[int], int]:
    """Of a series of -1, 0 and 1 less its mean with itself, so many places later; times the square of its length, so
    that they are whole numbers and signs are exact. The series are bits, which count many places at once."""
    num, total = len(series), sum(series)
    sums = [0, *accumulate(series)]
    ones, minus_ones = (int("".join("01"[each == value] for each in series), 2) for value in (1, -1))

    def product_at(lag: int) -> int:
        alike = (ones & ones >> lag).bit_count() + (minus_ones & minus_ones >> lag).bit_count()
        unlike = (ones & minus_ones >> lag).bit_count() + (minus_ones & ones >> lag).bit_count()
        ends = sums[num - lag] + total - sums[lag]
        return num * num * (alike - unlike) - num * total * ends + (num - lag) * total * total

    return product_at


def interval(share: float, size: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that was found in so many independent requests; (0, 1) of none. The share is
    always in it."""
    if size == 0:
        return 0.0, 1.0
    spread = Z * Z / size
    half = Z * math.sqrt(share * (1 - share) / size + spread / (4 * size))
    middle = share + spread / 2
    return min(share, max(0.0, (middle - half) / (1 + spread))), max(share, min(1.0, (middle + half) / (1 + spread)))


def paired_interval(share_one: float, share_other: float, size: float) -> tuple[float, float]:
    """95 % interval of the difference of two shares that were found in the same so many independent requests, of which
    these shares were good with the one alone and with the other alone; (-1, 1) of none. share_one - share_other is
    always in it.

    That of Bonett and Price (2012), "Adjusted Wald confidence interval for a difference of binomial proportions based
    on paired data", J. Educ. Behav. Stat. 37: Wald's for paired data after one more request of either kind was added.
    What is the same with both says nothing about the difference, as in McNemar's test.
    """
    if size == 0:
        return -1.0, 1.0
    difference = share_one - share_other
    one, other = ((share * size + 1) / (size + 2) for share in (share_one, share_other))
    half = Z * math.sqrt((one + other - (one - other) ** 2) / (size + 2))
    return min(difference, max(-1.0, one - other - half)), max(difference, min(1.0, one - other + half))


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean of which these are independent samples, differences of shares. Their own mean is always
    in it. None where nothing tells how far samples are apart: of less than two, and of those that are all alike."""
    if len(values) < 2 or max(values) - min(values) < SAME:
        return None
    half = student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return max(-1.0, fmean(values) - half), min(1.0, fmean(values) + half)


def student(degrees: int) -> float:
    """Half the width of the 95 % interval of Student's t, whose degrees of freedom are at least 1, to 0.2 %: exact for
    one and two, else by the expansion about the normal quantile (Abramowitz and Stegun, 26.7.5)."""
    if degrees == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if degrees == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return Z + math.fsum(term / degrees**power for power, term in enumerate(terms, 1))
