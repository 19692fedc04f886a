"""A load whose rate changes from stage to stage. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from random import Random
from typing import Final

from serving_core.errors import SettingsError
from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.serve.serve_options import ServeOptions
from splitserve_bench.serve.workloads import Workload, workload_of

MOST_REQUESTS: Final = 100_000
MOST_SECONDS: Final = 86_400.0
_STAGE: Final = re.compile(r"(\d+(?:\.\d+)?)x(\d+(?:\.\d+)?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Stage:
    """So many requests a second from start_s on."""

    rate: float
    start_s: float
    seconds: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds

    @property
    def num_requests(self) -> int:
        return round(self.rate * self.seconds)


def parse_stages(text: str, base_rate: float) -> list[Stage]:
    """One after the other from words such as `0.8x20,3x60`: 0.8 times base_rate for 20 s, then 3 times for 60 s. Raises
    SettingsError."""
    pairs = []
    for word in text.replace(",", " ").split():
        match = _STAGE.fullmatch(word)
        if match is None or not float(match[2]) > 0:
            raise SettingsError(f"--stages {word}: a stage is TIMESxSECONDS, such as 3x60")
        pairs.append((float(match[1]) * base_rate, float(match[2])))
    starts_s = accumulate((seconds for _, seconds in pairs), initial=0.0)
    stages = [Stage(rate, start_s, seconds) for (rate, seconds), start_s in zip(pairs, starts_s, strict=False)]
    num_requests, seconds = sum(stage.num_requests for stage in stages), sum(stage.seconds for stage in stages)
    if not 0 < num_requests <= MOST_REQUESTS or seconds > MOST_SECONDS:
        raise SettingsError(
            f"--stages have 1 to {MOST_REQUESTS} requests in at most {MOST_SECONDS:g} s, not {num_requests} in "
            f"{seconds:g} s"
        )
    return stages


def overload_of(stages: Sequence[Stage]) -> tuple[float, float]:
    """From when to when the rate is highest: to the end of the last such stage."""
    most = max(stage.rate for stage in stages)
    highest = [stage for stage in stages if stage.rate == most]
    return highest[0].start_s, highest[-1].end_s


def staged_load(stages: Sequence[Stage], options: ServeOptions, max_model_len: int | None, vocab_size: int) -> Workload:
    """The requests of a data set, each stage's at random moments within it, with the burstiness that is asked for. A
    trace gives lengths; where it ends before the stages do it begins anew, with other tokens unless it says itself
    which prompts share theirs. Raises SettingsError or BenchError for what cannot be sent."""
    times_s = list(chain.from_iterable(_times_s(stage, number, options) for number, stage in enumerate(stages)))
    planned: list[PlannedRequest] = []
    num_clipped, lap = 0, 0
    while missing := len(times_s) - len(planned):
        part = workload_of(replace(options, num_prompts=missing, seed=options.seed + lap), max_model_len, vocab_size)
        planned += part.planned
        num_clipped, lap = num_clipped + part.num_clipped, lap + 1
    timed = [replace(each, index=i, send_at_s=times_s[i]) for i, each in enumerate(planned)]
    return Workload(tuple(timed), num_clipped)


def _times_s(stage: Stage, number: int, options: ServeOptions) -> list[float]:
    """The gap before the first request and the one after the last are drawn too, so that all come within the stage."""
    if not stage.num_requests:
        return []
    rng = Random(f"{options.seed} stage {number}")
    *times_s, end_s = send_times_s(stage.num_requests + 1, stage.rate, options.burstiness, rng)
    return [stage.start_s + stage.seconds * (each / end_s) for each in times_s]
