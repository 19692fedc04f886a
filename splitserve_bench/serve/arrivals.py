"""Decide when the requests of an open-loop load are sent, whatever the server does.

They come at one rate, or in stages.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Final

from serving_core.errors import SettingsError
from splitserve_bench.errors import BenchError

MAX_STAGED_REQUESTS: Final = 100_000
MAX_STAGED_S: Final = 86_400.0
_STAGE: Final = re.compile(r"(\d+(?:\.\d+)?)x(\d+(?:\.\d+)?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a load with one request rate: `times` the rate that all stages are multiples of."""

    times: float
    rate_per_s: float
    start_s: float
    seconds: float

    @property
    def end_s(self) -> float:
        """Return the second after the start of the load at which the stage ends."""
        return self.start_s + self.seconds

    @property
    def num_requests(self) -> int:
        """Return the number of requests of the stage: its rate times its seconds, rounded."""
        return round(self.rate_per_s * self.seconds)


def send_times_s(num_requests: int, rate_per_s: float, burstiness: float, rng: Random) -> list[float]:
    """Return when each request is sent, in order, in seconds after the start of the load.

    The gaps are drawn from a gamma distribution of shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less
    sends in bursts, more evenly (the gaps' coefficient of variation is 1 / sqrt(burstiness)), and inf at equal gaps. As
    vLLM's `bench serve` does it, a gap comes before the first request too, and all are then scaled by one factor so
    that the last request is sent at exactly num_requests / rate: loads of one rate last equally long with every seed.
    An infinite rate sends everything at 0. Raises BenchError for a rate or burstiness that is not above 0.
    """
    if not rate_per_s > 0:
        raise BenchError(f"the request rate must be above 0 requests/s, not {rate_per_s:g}")
    if not burstiness > 0:
        raise BenchError(f"burstiness must be above 0, not {burstiness:g}")
    if math.isinf(rate_per_s):
        return [0.0] * num_requests
    is_even = math.isinf(burstiness)
    passed = list(
        accumulate(1.0 if is_even else rng.gammavariate(burstiness, 1 / burstiness) for _ in range(num_requests))
    )
    if not passed or passed[-1] == 0:  # nothing to scale: a burstiness near 0 makes gaps too small for a float
        return passed
    last_s = num_requests / rate_per_s
    return [last_s * (each / passed[-1]) for each in passed]


def stage_times_s(stages: Sequence[Stage], burstiness: float, seed: int) -> list[float]:
    """Return when the requests of all stages are sent, in seconds after the start of the load.

    Those of each stage come at random moments within it, drawn by `seed`; the gaps at its start and end are drawn too.
    Raises BenchError for a burstiness that is not above 0.
    """
    all_s: list[float] = []
    for number, stage in enumerate(stages):
        if stage.num_requests:
            rng = Random(f"{seed} stage {number}")
            *times_s, end_s = send_times_s(stage.num_requests + 1, stage.rate_per_s, burstiness, rng)
            all_s += [stage.start_s + stage.seconds * (each / end_s) for each in times_s]
    return all_s


def parse_stages(text: str) -> tuple[tuple[float, float], ...]:
    """Return the multiple and the seconds of each stage from words such as `0.8x20,3x60`.

    Raises SettingsError for a word of another form, stages without requests, and more than MAX_STAGED_S seconds in all.
    """
    pairs = []
    for word in text.replace(",", " ").split():
        match = _STAGE.fullmatch(word)
        if match is None or not float(match[2]) > 0:
            raise SettingsError(f"--stages {word}: a stage is TIMESxSECONDS, such as 3x60")
        pairs.append((float(match[1]), float(match[2])))
    seconds = sum(seconds for _, seconds in pairs)
    if not any(times for times, _ in pairs) or seconds > MAX_STAGED_S:
        raise SettingsError(
            f"--stages {text!r}: stages have some requests, in at most {MAX_STAGED_S:g} s, not {seconds:g} s"
        )
    return tuple(pairs)


def stages_of(text: str, base_per_s: float) -> tuple[Stage, ...]:
    """Return the stages of such words one after the other, at multiples of `base_per_s` requests/s.

    Raises SettingsError for a word of another form, more than MAX_STAGED_S seconds, and unless they have 1 to
    MAX_STAGED_REQUESTS requests.
    """
    pairs = parse_stages(text)
    starts_s = accumulate((seconds for _, seconds in pairs), initial=0.0)
    stages = tuple(
        Stage(times, times * base_per_s, start_s, seconds)
        for (times, seconds), start_s in zip(pairs, starts_s, strict=False)
    )
    num_requests = sum(stage.num_requests for stage in stages)
    if not 0 < num_requests <= MAX_STAGED_REQUESTS:
        raise SettingsError(
            f"--stages {text} of {base_per_s:.4g} requests/s are {num_requests} requests: 1 to {MAX_STAGED_REQUESTS} "
            "can be sent"
        )
    return stages
