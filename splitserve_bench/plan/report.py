"""Show what a search found, best plan first: in words, as a table, as JSON, and as commands to run it."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from coordinator.control.slo import DEFAULT, MAX_MS, MS
from coordinator.settings import CoordinatorSettings
from splitserve.commands.terminal import plain_table
from splitserve_bench.compare.search import Counted, SearchResult, plain, settle
from splitserve_bench.plan.candidates import OBJECTIVES, Placed, Plan
from splitserve_bench.plan.fleets import Played, percentile
from splitserve_bench.plan.hardware import CPU
from splitserve_bench.plan.nodes import MEMORY, NodeKind, NodeOptions
from splitserve_bench.plan.race import Race, Runner
from splitserve_bench.plan.search import Study
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.simulate.profile import MEASURED


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of one plan. Rates are of one cell; times `scale` they are in units of the objective.

    `played` are the probes that the result is of: of a plan that is not in the race, quick ones that failed; `quick`
    are all probes of the survey.
    """

    plan: Plan
    result: SearchResult
    curve: tuple[Counted, ...]
    played: tuple[Played, ...]  # what the result is of: of a plan that is not in the race, quick probes that failed
    quick: tuple[Played, ...]  # all probes of the survey
    is_raced: bool
    scale: float

    @property
    def value(self) -> float:
        """Return the plan's best passed rate, in units of the objective; 0 when no rate passed."""
        return (self.result.best_rate or 0.0) * self.scale

    @property
    def knee(self) -> tuple[float | None, float | None]:
        """Return the 95 % interval of the knee, in units of the objective; None for an end that is not known."""
        low, high = self.result.knee_low, self.result.knee_high
        return low and low * self.scale, high and high * self.scale

    @property
    def num_probes(self) -> int:
        """Return the number of probes in the survey and in the race."""
        return len(self.quick) + (len(self.played) if self.is_raced else 0)

    def at(self, rate: float | None) -> list[Played]:
        """Return the probes of a rate."""
        return [played for played in self.played if played.rate == rate]


def findings_of(study: Study, race: Race) -> list[Finding]:
    """Return what is known of every plan that was probed, best first.

    Plans without a rate that passed come last, those whose lowest failing rate is highest first.
    """
    _, scale = OBJECTIVES[study.options.objective]
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
    """Return sentences about which plan is best, and how close the second and the best colocated one come."""
    what, _ = OBJECTIVES[objective]
    if not found or not found[0].value:
        lowest = min((played.rate for each in found for played in (*each.played, *each.quick)), default=0.0)
        return [f"No plan reaches the goal at any rate that was tried: the lowest was {plain(lowest)} req/s a cell."]
    best, *others = found
    lines = [f"Best: {best.plan}, {plain(best.value)} {what} (knee {_interval(best)})."]
    second = next((each for each in others if each.value), None)
    if second is not None:
        lines.append(
            f"Second: {second.plan}, {plain(second.value)}, {_share(second, best)} of it: {_closeness(best, second)}"
        )
    colocated = next((each for each in found if len(each.plan.pools) == 1 and each.value), None)
    if colocated not in (None, best, second):
        assert colocated is not None
        lines.append(
            f"Best colocated: {colocated.plan}, {plain(colocated.value)}, {_share(colocated, best)} of the best."
        )
    return lines


def finding_json(finding: Finding, cells: int) -> dict[str, Any]:
    """Return the fields of a plan in the JSON object. Rates, devices and prices are those of all cells."""
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
    """Return the fields of a probe. A P90 is null when it is infinite."""
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


def _closeness(best: Finding, second: Finding) -> str:
    """Return in words between what shares of the best plan the second one lies, and whether they are surely apart."""
    (low, high), (low_2, high_2) = best.knee, second.knee
    if low is None or high is None or low_2 is None or high_2 is None:
        return "how close it is surely is not known."
    ratio = f"from {low_2 / high:.0%} to {high_2 / low:.0%} with 95 % confidence"
    return f"{ratio}, so the best is ahead." if high_2 < low else f"{ratio}, so it may be as good."


def _interval(finding: Finding) -> str:
    low, high = (("?" if each is None else plain(each)) for each in finding.knee)
    return f"{low} to {high}"


WEIGHTS: Final = "weights_memory_bytes"  # a flag that nodes may have which need not
SECRETS: Final = "SPLITSERVE_FLEET_SECRET and SPLITSERVE_API_KEY"  # without which nobody listens off loopback
PUBLIC: Final = "--host 0.0.0.0 --http-host 0.0.0.0 --fleet-host 0.0.0.0"
JOINED: Final = "--coordinator COORDINATOR:50052 --kv-bind 'tcp://eth0:*'"  # as the user's hosts have them


def commands_of(study: Study, plan: Plan) -> list[str]:
    """Return the lines that run a plan: `splitserve up` where one host does, else the coordinator and each node.

    The coordinator gets the limits, which the simulated requests had too.
    """
    options = study.options
    model = options.nodes.model or "MODEL"
    placed = sorted(plan.placed(), key=lambda each: each.host)
    num_hosts = len({each.host for each in placed})
    each_cell = f", in each of {options.cells} cells" if options.cells > 1 else ""
    of_coordinator = [*_limits(study.limits), *_in_flight(plan)]
    if num_hosts == 1 and (pools := _pool_sizes(plan, options.nodes)):
        return [f"Run it{each_cell}:", f"  {_up(plan, model, [*pools, *of_coordinator])}"]
    hosts = f"{num_hosts} host{'s' if num_hosts > 1 else ''}"
    words = [f"Run it on {hosts}{each_cell}, with {SECRETS} set; COORDINATOR and eth0 are to be yours:"]
    words.append(f"  splitserve coordinator {shlex.quote(model)} {' '.join([PUBLIC, *of_coordinator])}")
    num_taken = Counter[int]()  # devices of each host
    for each in placed:
        words.append(f"  {_node(each, num_taken[each.host], model, plan.gpus_per_host)}")
        num_taken[each.host] += each.kind.num_devices
    return words


def _limits(limits: Limits) -> list[str]:
    """Return the flags that set limits for every request without its own."""
    named = {"ttft": limits.ttft_s, "tpot": limits.tpot_s}
    limits_ms = [
        f"{name}:{_plain(limit_s * MS)}" for name, limit_s in named.items() if limit_s and limit_s * MS <= MAX_MS
    ]
    return [f"--slo-class {DEFAULT}={','.join(limits_ms)}"] if limits_ms else []


def _plain(number: float) -> str:
    """Return the number without an exponent and trailing zeros."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


def _pool_sizes(plan: Plan, options: NodeOptions) -> list[str]:
    """Return the flags that give each node of a cluster the KV pool that it was simulated with.

    Empty when no flags that all nodes share do.
    """
    kinds = [pool.kind for pool in plan.pools]
    if not _have_equal_flags(kinds):
        return []
    if len(sizes := {kind.kv_cache_memory_bytes for kind in kinds}) == 1:
        return [f"--kv-cache-memory-bytes {sizes.pop()}"]
    is_cuda = not any(kind.hardware in (CPU, MEASURED) for kind in kinds)
    return [f"--gpu-memory-utilization {MEMORY:g}"] if is_cuda and not options.device_memory_bytes else []


def _up(plan: Plan, model: str, others: Sequence[str]) -> str:
    kinds = [pool.kind for pool in plan.pools]
    flags = [f"--{pool.role} {pool.count}" for pool in plan.pools]
    flags += [f"--{pool.role}-tp {pool.kind.tp}" for pool in plan.pools if pool.kind.tp > 1]
    flags += [f"--{pool.role}-pp {pool.kind.pp}" for pool in plan.pools if pool.kind.pp > 1]
    flags += [
        f"--max-num-batched-tokens {min(kind.sizes.max_num_batched_tokens for kind in kinds)}",
        f"--max-num-seqs {min(kind.sizes.max_num_seqs for kind in kinds)}",
        *_profile_flags(kinds),
    ]
    return f"splitserve up {shlex.quote(model)} {' '.join([*flags, *others])}"


def _profile_flags(kinds: Sequence[NodeKind]) -> list[str]:
    """Return the flags that start nodes of these kinds, of all kinds together."""
    given = {name: value for kind in kinds for name, value in kind.profile.flags.items()}
    words = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    return [flag if value is True else f"{flag} {shlex.quote(str(value))}" for flag, value in words.items()]


def _have_equal_flags(kinds: Sequence[NodeKind]) -> bool:
    flags = [{name: value for name, value in kind.profile.flags.items() if name != WEIGHTS} for kind in kinds]
    return all(each == flags[0] for each in flags)


def _in_flight(plan: Plan) -> list[str]:
    """Return the flag that lets the coordinator take as many requests as the nodes do, where its default is less."""
    num_taken = sum(
        pool.count * (pool.kind.sizes.max_sequences + pool.kind.sizes.max_num_queued) for pool in plan.pools
    )
    return [f"--max-num-queued-reqs {num_taken}"] if num_taken > CoordinatorSettings().max_num_queued_reqs else []


def _node(placed: Placed, first: int, model: str, gpus_per_host: int) -> str:
    """Return the command of a node, which uses the devices of its host from number `first` on."""
    kind = placed.kind
    devices = ",".join(map(str, range(first, first + kind.num_devices)))
    visible = f"CUDA_VISIBLE_DEVICES={devices} "
    flags = []
    if kind.hardware in (CPU, MEASURED):  # whose device is a core, or as many cores as a node was measured on
        visible = ""
        flags += [f"--cpus {devices if kind.hardware == CPU else f'{first + 1}/{gpus_per_host}'}"]
    flags += [f"--tensor-parallel-size {kind.tp}"] if kind.tp > 1 else []
    flags += [f"--pipeline-parallel-size {kind.pp}"] if kind.pp > 1 else []
    flags += [
        f"--max-num-batched-tokens {kind.sizes.max_num_batched_tokens}",
        f"--max-num-seqs {kind.sizes.max_num_seqs}",
        f"--kv-cache-memory-bytes {kind.kv_cache_memory_bytes}",
        *_profile_flags([kind]),
    ]
    command = f"{visible}splitserve {placed.role} {shlex.quote(model)} {JOINED} {' '.join(flags)}"
    return f"{command}  # host {placed.host}, {kind.hardware}"


def plan_view(study: Study, found: list[Finding]) -> Group:
    """Return a line about the search, and the table of all plans."""
    options = study.options
    limits = ", ".join(f"{name.upper()} ≤ {s * MS:g} ms" for name, s in study.limits.by_name().items())
    cells = f", {options.cells} cells of {options.gpus // options.cells}" if options.cells > 1 else ""
    head = f"{study.machines.name}: {options.gpus} devices{cells}; {options.attainment:.0%} of requests with {limits}"
    return Group(escape(head), "", _table(found, options.cells, options.objective), "")


def best_commands(study: Study, found: list[Finding]) -> list[str]:
    """Return the commands that run the best plan; an empty list when no plan reaches the goal."""
    return commands_of(study, found[0].plan) if found and found[0].value else []


def _table(found: list[Finding], cells: int, objective: str) -> Table:
    what, _ = OBJECTIVES[objective]
    table = plain_table("plan", numbers=("req/s", what, "knee", "attained", "P90 TTFT", "P90 TPOT", "probes"))
    table.add_column("loses by")
    for each in found:
        best, failed = each.at(each.result.best_rate), each.at(each.result.failing_rate)
        low, high = each.knee
        table.add_row(
            str(each.plan),
            _goodput(each, cells),
            plain(each.value) if each.value else "-",
            f"{plain(low) if low else '0'} to {plain(high) if high else '?'}",
            f"{each.result.attainment:.1%}" if each.result.attainment is not None else "-",
            *(_milliseconds(best, name) for name in ("ttfts_s", "tpots_s")),
            str(each.num_probes),
            ", ".join(f"{name} {count}" for name, count in _causes(failed)),
        )
    return table


def plan_json(study: Study, found: list[Finding]) -> dict[str, Any]:
    """Return the JSON object of a search: its flags, the plans, the words and the commands."""
    return {
        "model": study.machines.name,
        "asked": json.loads(study.options.to_json()),
        "words": words_of(found, study.options.objective),
        "commands": best_commands(study, found),
        "plans": [finding_json(each, study.options.cells) for each in found],
        "unfit": list(study.machines.unfit),
    }


def _goodput(finding: Finding, cells: int) -> str:
    """Return the best rate of all cells in words; "< RATE" when only failing rates are known."""
    best, failing = finding.result.best_rate, finding.result.failing_rate
    if best is not None:
        return plain(best * cells)
    return f"< {plain(failing * cells)}" if failing is not None else "-"


def _milliseconds(played: list[Played], name: str) -> str:
    """Return the P90 over all requests of these probes in words; "-" when it is infinite or there is none."""
    p90_s = percentile([each_s for each in played for each_s in getattr(each, name)])
    return f"{p90_s * MS:.1f} ms" if p90_s and math.isfinite(p90_s) else "-"


def _causes(played: list[Played]) -> list[tuple[str, int]]:
    """Return the limits that requests missed, with their counts, the most frequent first."""
    return sum((Counter(each.missed) for each in played), Counter[str]()).most_common()
