"""When the requests of an open-loop load are sent, whatever the server does."""

import math
from itertools import accumulate
from random import Random

from splitserve_bench.errors import BenchError


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
    if not burstiness > 0:
        raise BenchError(f"burstiness must be above 0, not {burstiness:g}")
    if math.isinf(rate_per_s):
        return [0.0] * num_requests
    gaps = [
        1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / burstiness) for _ in range(num_requests)
    ]
    passed = list(accumulate(gaps))
    if not passed or passed[-1] == 0:  # nothing to scale: a burstiness near 0 makes gaps too small for a float
        return passed
    last_s = num_requests / rate_per_s
    return [last_s * (each / passed[-1]) for each in passed]
