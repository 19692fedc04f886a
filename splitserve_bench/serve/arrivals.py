"""When the requests of an open-loop load are sent, whatever the server does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Final

from splitserve_bench.errors import BenchError

LINEAR, EXPONENTIAL = "linear", "exponential"
RAMPS: Final = (LINEAR, EXPONENTIAL)


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that changes from one request to the next, as vLLM's --ramp-up-strategy has it: by as much each time, or
    by as many times."""

    strategy: str  # one of RAMPS
    start_per_s: float
    end_per_s: float

    def gap_s(self, index: int, num_requests: int) -> float:
        """The mean gap before this request."""
        share = index / max(num_requests - 1, 1)
        if self.strategy == LINEAR:
            return 1 / (self.start_per_s + (self.end_per_s - self.start_per_s) * share)
        return 1 / (self.start_per_s * math.pow(self.end_per_s / self.start_per_s, share))


def send_times_s(num_requests: int, rate_per_s: float, burstiness: float, rng: Random) -> list[float]:
    """Seconds after the start of the load at which each request is sent, in order.

    The gaps are drawn from a gamma distribution of shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less
    sends in bursts, more evenly (the gaps' coefficient of variation is 1 / sqrt(burstiness)), and inf at equal gaps.
    As vLLM's `bench serve` does it, a gap comes before the first request too, and all are then scaled by one factor so
    that the last request is sent at exactly num_requests / rate: loads of one rate last equally long with every seed.
    An infinite rate sends everything at 0. A rate or burstiness that is not above 0 is a BenchError.
    """
    if not rate_per_s > 0:
        raise BenchError(f"the request rate must be above 0 requests/s, not {rate_per_s:g}")
    times_s = _times_s([1.0] * num_requests, num_requests / rate_per_s, burstiness, rng)
    return [0.0] * num_requests if math.isinf(rate_per_s) else times_s


def ramp_times_s(num_requests: int, ramp: Ramp, burstiness: float, rng: Random) -> list[float]:
    """The same of a rate that changes; such loads last as long as their mean gaps, with every seed."""
    means_s = [ramp.gap_s(index, num_requests) for index in range(num_requests)]
    return _times_s(means_s, math.fsum(means_s), burstiness, rng)


def _times_s(means: Sequence[float], last_s: float, burstiness: float, rng: Random) -> list[float]:
    """After gaps of these means, the last one at last_s."""
    if not burstiness > 0:
        raise BenchError(f"burstiness must be above 0, not {burstiness:g}")
    is_even = math.isinf(burstiness)
    gaps = [mean * (1.0 if is_even else rng.gammavariate(burstiness, 1 / burstiness)) for mean in means]
    passed = list(accumulate(gaps))
    if not passed or passed[-1] == 0:  # nothing to scale: a burstiness near 0 makes gaps too small for a float
        return passed
    return [last_s * (each / passed[-1]) for each in passed]
