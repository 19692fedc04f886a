"""How sure a share is when its misses come in clusters. Pure.

A queue that has grown delays many requests, not one: misses follow each other. A run of such requests says no more
than a smaller number of independent ones: their number divided by the design effect, 1 + 2 x the sum of the
autocorrelations. The sum is Geyer's initial positive sequence: lags in pairs, as long as a pair's sum is positive.
"""

import math
from collections.abc import Sequence
from itertools import islice
from operator import mul
from statistics import NormalDist
from typing import Final

CONFIDENCE: Final = 0.95
Z: Final = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def effective_size(are_good: Sequence[bool]) -> float:
    """How many independent requests say as much about the share of good ones as these, in the order of sending. At
    least 2 of 2 or more; all of them when they are all alike, as nothing tells how they cluster."""
    num = len(are_good)
    if num < 3 or len(set(are_good)) == 1:
        return float(num)
    mean = sum(are_good) / num
    values = [is_good - mean for is_good in are_good]
    variance = _product(values, 0)
    total = -variance
    for lag in range(0, num - 1, 2):
        pair = _product(values, lag) + _product(values, lag + 1)
        if pair <= 0:
            break
        total += 2 * pair
    return num / min(max(1.0, total / variance), num / 2)


def _product(values: Sequence[float], lag: int) -> float:
    """Of the series with itself, so many places later."""
    total: float = sum(map(mul, values, islice(values, lag, None)))
    return total


def interval(share: float, size: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that was found in so many independent requests; (0, 1) of none. The share is
    always in it."""
    if size == 0:
        return 0.0, 1.0
    spread = Z * Z / size
    half = Z * math.sqrt(share * (1 - share) / size + spread / (4 * size))
    middle = share + spread / 2
    return min(share, max(0.0, (middle - half) / (1 + spread))), max(share, min(1.0, (middle + half) / (1 + spread)))
