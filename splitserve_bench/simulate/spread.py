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
    """Quantiles of what something takes, as multiples of what a profile says of it: factors[i] is the one below which
    shares[i] of all are. Both ascend."""

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

    @property
    def mean(self) -> float:
        """Of all factors."""
        return fmean(equal_shares(self))


NO_SPREAD: Final = Spread()


@lru_cache(MOST_SPREADS)
def equal_shares(spread: Spread) -> tuple[float, ...]:
    """NUM_FACTORS factors, each as likely as the others; or a single one where all are alike."""
    if len(set(spread.factors)) == 1:
        return spread.factors[:1]
    return tuple(spread.at((index + 0.5) / NUM_FACTORS) for index in range(NUM_FACTORS))
