"""A load whose request rate changes from stage to stage. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Final

from serving_core.errors import SettingsError
from splitserve_bench.serve.arrivals import send_times_s

MOST_REQUESTS: Final = 100_000
MOST_SECONDS: Final = 86_400.0
_STAGE: Final = re.compile(r"(\d+(?:\.\d+)?)x(\d+(?:\.\d+)?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a load with one request rate, `times` the rate that all stages are multiples of."""

    times: float
    rate_per_s: float
    start_s: float
    seconds: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds

    @property
    def num_requests(self) -> int:
        return round(self.rate_per_s * self.seconds)


def parse_stages(text: str) -> tuple[tuple[float, float], ...]:
    """Return multiple and seconds of each stage from words such as `0.8x20,3x60`. Raises SettingsError."""
    pairs = []
    for word in text.replace(",", " ").split():
        match = _STAGE.fullmatch(word)
        if match is None or not float(match[2]) > 0:
            raise SettingsError(f"--stages {word}: a stage is TIMESxSECONDS, such as 3x60")
        pairs.append((float(match[1]), float(match[2])))
    seconds = sum(seconds for _, seconds in pairs)
    if not any(times for times, _ in pairs) or seconds > MOST_SECONDS:
        raise SettingsError(
            f"--stages {text!r}: stages have some requests, in at most {MOST_SECONDS:g} s, not {seconds:g} s"
        )
    return tuple(pairs)


def stages_of(text: str, base_per_s: float) -> tuple[Stage, ...]:
    """Return the stages one after the other, at multiples of base_per_s requests/s. Raises SettingsError."""
    pairs = parse_stages(text)
    starts_s = accumulate((seconds for _, seconds in pairs), initial=0.0)
    stages = tuple(
        Stage(times, times * base_per_s, start_s, seconds)
        for (times, seconds), start_s in zip(pairs, starts_s, strict=False)
    )
    num_requests = sum(stage.num_requests for stage in stages)
    if not 0 < num_requests <= MOST_REQUESTS:
        raise SettingsError(
            f"--stages {text} of {base_per_s:.4g} requests/s are {num_requests} requests: 1 to {MOST_REQUESTS} can be "
            "sent"
        )
    return stages


def highest_of(stages: Sequence[Stage]) -> tuple[float, float]:
    """Return from when to when the request rate is highest: to the end of the last stage with that rate."""
    most = max(stage.rate_per_s for stage in stages)
    highest = [stage for stage in stages if stage.rate_per_s == most]
    return highest[0].start_s, highest[-1].end_s


def stage_times_s(stages: Sequence[Stage], burstiness: float, seed: int) -> list[float]:
    """Return when each request is sent: those of a stage at random moments within it, in order."""
    return [at_s for number, stage in enumerate(stages) for at_s in _times_s(stage, number, burstiness, seed)]


def _times_s(stage: Stage, number: int, burstiness: float, seed: int) -> list[float]:
    """The gap before the first request and the one after the last are drawn too, so that all come within the stage."""
    if not stage.num_requests:
        return []
    rng = Random(f"{seed} stage {number}")
    *times_s, end_s = send_times_s(stage.num_requests + 1, stage.rate_per_s, burstiness, rng)
    return [stage.start_s + stage.seconds * (each / end_s) for each in times_s]
