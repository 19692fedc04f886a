"""How far the seconds of equal steps spread. Pure."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Final

NUM_FACTORS: Final = 1024  # that a spread is cut into
MOST_SPREADS: Final = 64  # whose factors are kept


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of what a step takes, as shares of what is typical: factors[i] is the one below which shares[i] of all
    steps are. Both ascend. A single factor is no spread."""

    shares: tuple[float, ...] = (0.5,)
    factors: tuple[float, ...] = (1.0,)

    def at(self, share: float) -> float:
        """The factor below which so many are: straight between the quantiles, and beyond the outer ones as at these."""
        right = bisect_right(self.shares, share)
        if right in (0, len(self.shares)):
            return self.factors[max(0, right - 1)]
        left = right - 1
        part = (share - self.shares[left]) / (self.shares[right] - self.shares[left])
        return self.factors[left] + part * (self.factors[right] - self.factors[left])


NO_SPREAD: Final = Spread()


@lru_cache(MOST_SPREADS)
def equal_shares(spread: Spread) -> tuple[float, ...]:
    """NUM_FACTORS factors, each as likely as the others, with a mean of 1: a spread makes no node slower or faster."""
    factors = [spread.at((index + 0.5) / NUM_FACTORS) for index in range(NUM_FACTORS)]
    mean = fmean(factors)
    return tuple(factor / mean for factor in factors)
