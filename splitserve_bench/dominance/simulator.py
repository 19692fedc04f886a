"""Does the runs of a grid: the requests of a seed, whatever the rate, the limits and the fleet, are the same ones."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import median_high
from typing import Final

from splitserve_bench.dominance.runs import Figures, Run
from splitserve_bench.errors import BenchError
from splitserve_bench.plan.asked import AskedLoad
from splitserve_bench.plan.loads import Loads
from splitserve_bench.serve.metrics import Limits, missed, tpot_s, ttft_s
from splitserve_bench.serve.misses import Misses, count_misses, is_complete
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.serve.told import told
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import Profile, read_profile

ALONE: Final = FleetSize(0, 0, 1)
SAMPLE: Final = 1200  # requests, of which the median one is told
KEPT_LOADS: Final = 4  # a seed's requests are many tokens, and the runs of a seed follow each other


class Simulator:
    """Keeps what runs have in common."""

    def __init__(self) -> None:
        self._profile = lru_cache(KEPT_LOADS)(_profile)
        self._loads = lru_cache(KEPT_LOADS)(_loads)

    def do(self, run: Run) -> Figures:
        """Raises SettingsError and BenchError."""
        profile = self._profile(run.profile)
        planned = self._loads(profile, run.load, run.seed).load(run.rate, run.num_prompts, run.seed)
        limits = Limits(run.ttft_s, run.tpot_s)
        outcomes = simulate(
            profile,
            run.fleet,
            told(planned, lambda each: limits),
            max_concurrency=None,
            request_timeout_s=run.request_timeout_s,
        )
        judged = [(outcome, missed(outcome, limits)) for outcome in outcomes]
        num_good = sum(is_complete(outcome) and not names for outcome, names in judged)
        misses = count_misses(judged)
        return Figures(
            num_total=len(outcomes),
            num_good=num_good,
            num_late_ttft=misses.ttft,
            num_late_tpot=misses.tpot,
            num_refused=misses.refused,
            num_failed=misses.failed,
            phases=_phases(misses),
        )


def alone_s(profile: Profile, load: AskedLoad) -> tuple[float, float]:
    """TTFT and TPOT of the median request of a load while a node does nothing else. Raises BenchError for answers of
    one token, which have no TPOT."""
    planned = _loads(profile, load, 0).load(1.0, SAMPLE, 0)
    median = sorted(planned, key=lambda each: len(each.prompt))[len(planned) // 2]
    num_tokens = median_high(each.output_tokens for each in planned)
    request: PlannedRequest = replace(median, index=0, send_at_s=0.0, output_tokens=num_tokens)
    (outcome,) = simulate(profile, ALONE, [request], max_concurrency=None, request_timeout_s=float("inf"))
    first_s, each_s = ttft_s(outcome), tpot_s(outcome)
    if first_s is None or each_s is None:
        raise BenchError("the median answer has one token, and no TPOT that limits could be multiples of")
    return first_s, each_s


def _phases(misses: Misses) -> dict[str, int]:
    return dict(Counter(misses.ttft_phases) + Counter(misses.tpot_phases))


def _profile(path: str) -> Profile:
    return read_profile(Path(path))


def _loads(profile: Profile, load: AskedLoad, seed: int) -> Loads:
    """Made anew for each seed: Loads keeps what it has drawn."""
    return Loads(load, profile.node.vocab_size, profile.node.max_model_len)
