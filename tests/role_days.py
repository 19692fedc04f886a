"""How `--roles auto` follows a day whose ratio of prompt to output tokens goes from 1:1 over 20:1 to 1:3, simulated:
`python -m tests.role_days [--nodes 4] [--rate R] [--phase-s S]` prints a row for each phase.

Nodes are the profiled core of `tests.simulated_modes`, with its limits on TTFT and TPOT. Each fixed ratio of prefill to
decode nodes serves each phase alone; `auto` starts with half of the nodes in each role and serves the phases one after
the other. Goodput is the share of requests sent in a phase that are good; lost are requests that ended with an error
and were not refused.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from random import Random
from typing import Final, NamedTuple

import click

from coordinator.control.roles import AUTO
from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.datasets import PlannedRequest, plan, random_load
from splitserve_bench.serve.metrics import is_good, with_limits
from splitserve_bench.serve.records import Outcome
from splitserve_bench.simulate.fleet import FleetSize, Simulated, simulate
from tests.simulated_modes import PROFILE, VOCAB_SIZE, limits_of

PHASES: Final = {"1:1": (240, 240), "20:1": (1000, 50), "1:3": (100, 300)}  # prompt tokens, output tokens
RATIOS: Final = 8  # parts of a large fleet between which fixed ratios divide it


class Found(NamedTuple):
    """The requests of a phase: how many were sent, good and lost."""

    num: int
    num_good: int
    num_lost: int


def day(phases: Sequence[str], rate: float, phase_s: float, seed: int) -> list[PlannedRequest]:
    """Return the requests of the phases in their order, `rate` in a second, each phase as it is in any other day."""
    shapes, times_s = [], []
    number = round(rate * phase_s)
    for position, phase in enumerate(phases):
        shapes += random_load(number, *PHASES[phase], 0.5, VOCAB_SIZE, Random(f"{seed} {phase}"))
        arrivals_s = send_times_s(number, rate, 1.0, Random(f"{seed} {phase} arrivals"))
        scale = phase_s / max(phase_s, arrivals_s[-1])  # the last arrival is within the phase
        times_s += [position * phase_s + scale * at_s for at_s in arrivals_s]
    return with_limits(plan(shapes, times_s), limits_of())


def judge(planned: Sequence[PlannedRequest], outcomes: Sequence[Outcome]) -> Found:
    good = [is_good(outcome, limits_of()(each)) for each, outcome in zip(planned, outcomes, strict=True)]
    lost = [outcome for outcome in outcomes if outcome.error and not outcome.is_refused]
    return Found(len(planned), sum(good), len(lost))


def run(size: FleetSize, planned: Sequence[PlannedRequest], seed: int) -> Simulated:
    return simulate(PROFILE, size, planned, max_concurrency=None, request_timeout_s=600.0, seed=seed)


def fixed(nodes: int, rate: float, phase_s: float, seed: int, job: tuple[str, int]) -> Found:
    """Return what a fleet with this number of prefill nodes does in a phase alone."""
    phase, num_prefill = job
    planned = day([phase], rate, phase_s, seed)
    return judge(planned, run(FleetSize(num_prefill, nodes - num_prefill), planned, seed).outcomes)


def followed(nodes: int, rate: float, phase_s: float, seed: int) -> list[tuple[Found, int]]:
    """Return for each phase what `--roles auto` does, and its role changes in that phase."""
    planned = day([*PHASES], rate, phase_s, seed)
    size = FleetSize(nodes // 2, nodes - nodes // 2, roles=AUTO)
    simulated = run(size, planned, seed)
    rows, number = [], len(planned) // len(PHASES)
    for position in range(len(PHASES)):
        part = slice(position * number, (position + 1) * number)
        is_last = position == len(PHASES) - 1
        changes = [at_s for at_s in simulated.role_changes_s if position * phase_s <= at_s]
        changes = [at_s for at_s in changes if is_last or at_s < (position + 1) * phase_s]
        rows.append((judge(planned[part], simulated.outcomes[part]), len(changes)))
    return rows


@click.command()
@click.option("--nodes", default=4)
@click.option("--rate", default=0.7, help="Requests per second of each node.")
@click.option("--phase-s", default=60.0)
@click.option("--seed", default=0)
@click.option("--processes", default=2)
def main(nodes: int, rate: float, phase_s: float, seed: int, processes: int) -> None:
    load = nodes, rate * nodes, phase_s, seed
    numbers = sorted({max(1, nodes * part // RATIOS) for part in range(1, RATIOS)})
    jobs = [*product(PHASES, numbers)]
    with ProcessPoolExecutor(processes) as pool:
        auto = pool.submit(followed, *load)
        ratios = dict(zip(jobs, pool.map(partial(fixed, *load), jobs), strict=True))
    click.echo("| prompt:output | best fixed | good | auto | share | role changes | a node | lost |\n|" + "---|" * 8)
    for phase, (found, num_changes) in zip(PHASES, auto.result(), strict=True):
        most, best = max((ratios[phase, number].num_good, number) for number in numbers)
        share = f"{100 * found.num_good / most:.1f} %" if most else "-"
        values = f"{best}P+{nodes - best}D", f"{most} of {found.num}", f"{found.num_good}", share
        click.echo(" | ".join((f"| {phase}", *values, f"{num_changes}", f"{num_changes / nodes:.2f}")), nl=False)
        click.echo(f" | {found.num_lost} |")


if __name__ == "__main__":
    main()
