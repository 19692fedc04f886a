"""What a search found, best plan first, and what it means in words. Pure."""

import math
from dataclasses import dataclass
from typing import Any

from splitserve_bench.compare.search import Counted, SearchResult, settle
from splitserve_bench.compare.verdict import plain
from splitserve_bench.plan.asked import OBJECTIVES
from splitserve_bench.plan.fleets import Played, percentile
from splitserve_bench.plan.plans import Plan
from splitserve_bench.plan.race import Race, Runner
from splitserve_bench.plan.study import Study


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of one plan. Rates are of a cell; times `scale` they are what the objective counts."""

    plan: Plan
    result: SearchResult
    curve: tuple[Counted, ...]
    played: tuple[Played, ...]  # what the result is of: of a plan that is not in the race, quick probes that failed
    quick: tuple[Played, ...]  # all probes of the survey
    is_raced: bool
    scale: float

    @property
    def value(self) -> float:
        """Of the objective; 0 when no rate passed."""
        return (self.result.best_rate or 0.0) * self.scale

    @property
    def knee(self) -> tuple[float | None, float | None]:
        """Between what values its knee surely is."""
        low, high = self.result.knee_low, self.result.knee_high
        return low and low * self.scale, high and high * self.scale

    @property
    def num_probes(self) -> int:
        """In the survey and in the race."""
        return len(self.quick) + (len(self.played) if self.is_raced else 0)

    def at(self, rate: float | None) -> list[Played]:
        """The probes of that rate."""
        return [played for played in self.played if played.rate == rate]


def findings_of(study: Study, race: Race) -> list[Finding]:
    """Of every plan that was probed, best first; then those whose failures are known at higher rates."""
    _, scale = OBJECTIVES[study.asked.objective]
    found = [_finding(plan, runner, scale) for plan, runner in zip(study.plans, race.runners, strict=True)]
    found = [each for each in found if each.played or each.quick]
    return sorted(found, key=lambda each: (-each.value, -(each.result.failing_rate or 0.0) * each.scale))


def _finding(plan: Plan, runner: Runner, scale: float) -> Finding:
    survey = runner.survey or runner
    quick, is_raced = tuple(survey.played), runner is not survey and bool(runner.played)
    if is_raced:
        curve, played, result = tuple(runner.search.curve()), tuple(runner.played), runner.result
    else:
        lowest = survey.result.failing_rate or math.inf
        curve = tuple(each for each in survey.search.curve() if each.rate >= lowest)
        played = tuple(each for each in quick if each.rate >= lowest)
        result = settle(curve, runner.goal, len(played))
    return Finding(plan, result, curve, played, quick, is_raced, scale / runner.weight)


def words_of(found: list[Finding], objective: str) -> list[str]:
    """Which plan is best, and how close the second is."""
    what, _ = OBJECTIVES[objective]
    if not found or not found[0].value:
        lowest = min((played.rate for each in found for played in (*each.played, *each.quick)), default=0.0)
        return [f"No plan reaches the goal at any rate that was tried: the lowest was {plain(lowest)} req/s a cell."]
    best, *others = found
    lines = [f"Best: {best.plan}, {plain(best.value)} {what} (knee {_interval(best)})."]
    second = next((each for each in others if each.value), None)
    if second is not None:
        lines.append(
            f"Second: {second.plan}, {plain(second.value)}, {_share(second, best)} of it: {_told(best, second)}"
        )
    colocated = next((each for each in found if len(each.plan.pools) == 1 and each.value), None)
    if colocated not in (None, best, second):
        assert colocated is not None
        lines.append(
            f"Best colocated: {colocated.plan}, {plain(colocated.value)}, {_share(colocated, best)} of the best."
        )
    return lines


def finding_json(finding: Finding, cells: int) -> dict[str, Any]:
    """For --json and --save."""
    result = finding.result
    pools = [
        {
            "role": pool.role,
            "nodes": pool.count,
            "hardware": pool.kind.hardware,
            "tensor_parallel_size": pool.kind.tp,
            "pipeline_parallel_size": pool.kind.pp,
        }
        for pool in finding.plan.pools
    ]
    low, high = finding.knee
    return {
        "plan": str(finding.plan),
        "cells": cells,
        "pools": pools,
        "devices": finding.plan.num_devices * cells,
        "goodput_per_s": result.best_rate and result.best_rate * cells,
        "objective": finding.value,
        "objective_knee": [low, high],
        "attainment": result.attainment,
        "attainment_interval": [result.attainment_low, result.attainment_high],
        "dollars_per_h": finding.plan.dollars_per_h * cells,
        "kilowatts": finding.plan.kilowatts * cells,
        "probes": [_played_json(played, cells) for played in (finding.played if finding.is_raced else ())],
        "quick_probes": [_played_json(played, cells) for played in finding.quick],
    }


def _played_json(played: Played, cells: int) -> dict[str, Any]:
    """P90s are null where they are infinite."""
    p90s = {"ttft_p90_s": percentile(played.ttfts_s), "tpot_p90_s": percentile(played.tpots_s)}
    times = {name: p90_s if p90_s < math.inf else None for name, p90_s in p90s.items()}
    return {
        "request_rate": played.rate * cells,
        "good": played.num_good,
        "counted": played.num_counted,
        "ended_early": played.is_early,
        "missed": played.missed,
        **times,
    }


def _share(one: Finding, best: Finding) -> str:
    return f"{one.value / best.value:.0%}"


def _told(best: Finding, second: Finding) -> str:
    """Whether the knees are told apart, and how far apart they can be."""
    (low, high), (low_2, high_2) = best.knee, second.knee
    if low is None or high is None or low_2 is None or high_2 is None:
        return "how close it is surely is not known."
    ratio = f"from {low_2 / high:.0%} to {high_2 / low:.0%} with 95 % confidence"
    return f"{ratio}, so the best is ahead." if high_2 < low else f"{ratio}, so it may be as good."


def _interval(finding: Finding) -> str:
    low, high = (("?" if each is None else plain(each)) for each in finding.knee)
    return f"{low} to {high}"
