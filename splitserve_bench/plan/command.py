"""`splitserve plan`. What it searches with is imported when it runs, so that help is quick."""

import json
import os
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import click

from serving_core.extras import require
from splitserve.commands.terminal import counting, report, stderr, stdout
from splitserve.signals import run_to_end
from splitserve_bench.plan.asked import Asked
from splitserve_bench.plan.options import (
    PlanGroup,
    asked_of,
    fleet_options,
    hardware_options,
    load_options,
    objective_options,
    output_options,
    search_options,
)
from splitserve_bench.plan.profile_command import profile_command

if TYPE_CHECKING:
    from splitserve_bench.plan.race import Race
    from splitserve_bench.plan.study import Study

EVERY: Final = 10  # simulations, a line of progress at least where there is no terminal


@click.group("plan", cls=PlanGroup, invoke_without_command=True)
@hardware_options
@fleet_options
@objective_options
@load_options
@search_options
@output_options
@click.pass_context
def plan_command(
    context: click.Context, /, jobs: int, plot: Path | None, save_path: Path | None, as_json: bool, **flags: Any
) -> None:
    """Find how to divide --gpus devices into nodes that read, that write or that do both, and with how many ranks each,
    for the most good requests a second: by simulation, with the decisions of the real coordinator and the real
    nodes."""
    if context.invoked_subcommand is not None:
        return
    from splitserve_bench.plan.findings import findings_of, words_of
    from splitserve_bench.plan.report import best_commands, draw, plan_json, plan_view, save
    from splitserve_bench.plan.study import study_of

    if plot is not None:
        require("bench")
    asked = asked_of(flags)
    study = study_of(asked)
    for line in study.machines.unfit:
        report(f"left out: {line}")
    if clipped := study.loads.clipped():
        report(clipped)
    report(f"{len(study.plans)} plans: {', '.join(map(str, study.plans))}")
    race = study.race()
    _run(study, race, asked, jobs or _num_cpus())
    found = findings_of(study, race)
    if as_json:
        click.echo(json.dumps(plan_json(study, found)))
    else:
        stdout.print(plan_view(study, found))
        for line in (*words_of(found, asked.objective), *best_commands(study, found)):
            stdout.print(line, markup=False, soft_wrap=True)  # so that commands can be copied
    if save_path is not None:
        save(json.dumps(plan_json(study, found), indent=2), save_path)
        report(f"written: {save_path}")
    if plot is not None:
        draw(study, found, plot)
        report(f"picture: {plot}")


def _run(study: "Study", race: "Race", asked: Asked, jobs: int) -> None:
    """Raises BenchError."""
    from splitserve_bench.plan.crew import run_race
    from splitserve_bench.plan.progress import Progress

    began_s = perf_counter()
    progress = Progress(race, study.plans, asked.cells, began_s)
    with counting(f"Planning, {len(study.plans)} plans") as show:

        def tell() -> None:
            is_news = progress.played(now := perf_counter())
            if stderr.is_terminal or is_news or progress.num_played % EVERY == 0:
                show(*progress.counts, progress.line(now))

        run_to_end(run_race(race, asked, min(jobs, len(study.plans)), tell))
    report(f"{progress.num_played} simulations of {len(study.plans)} plans in {perf_counter() - began_s:.0f} s")


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


plan_command.add_command(profile_command)
