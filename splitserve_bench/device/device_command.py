"""`splitserve bench device`. What it measures with is imported when it runs, so that help is quick."""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

import click

from serving_core.errors import SettingsError
from serving_core.extras import is_installed, needs
from splitserve.commands.terminal import report
from splitserve_bench.device.record import JSON_FILE, MARKDOWN_FILE, Record
from splitserve_bench.device.running import DONE, NOT_REACHED, SKIPPED, Outcome, run_step
from splitserve_bench.device.steps import GPU_TESTS, MODEL, Machine, Step, full_sizes, steps_of, trial_sizes
from splitserve_bench.engine.random_models import SHAPES
from splitserve_bench.options import ListOf

LOG_FILE: Final = "log.txt"
LEAST_S: Final = 20.0  # a step that would get less is left for the next run
NAMES: Final = ListOf("NAME,NAME,...", str)


@click.command("device")
@click.option("--out", default="device-report", show_default=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--steps", "names", default=None, type=NAMES, help="Only these, again if need be; by default all.")
@click.option("--limit-s", default=540.0, show_default=True, type=click.FloatRange(1.0), help="For all steps together.")
@click.option("--shape", default="llama-3.1-8b", show_default=True, type=click.Choice(tuple(SHAPES)))
@click.option("--layers", default=0, type=click.IntRange(0), help="Only so many layers of the --shape.")
@click.option("--scratch", default="", help="Folder for the model of random weights; empty: a temporary one.")
@click.option("--trial", is_flag=True, help="Tiny sizes, also without a device: whether each step can be done.")
@needs("node")
def device_command(
    out: Path, names: tuple[str, ...] | None, limit_s: float, shape: str, layers: int, scratch: str, *, trial: bool
) -> None:
    """Measure and test everything that needs a CUDA device, in one report. Run it again to go on where it stopped."""
    machine = look()
    if not machine.num_devices and not trial:
        raise SettingsError("there is no CUDA device here; --trial goes through all steps in tiny sizes without one")
    sizes = (trial_sizes if trial else full_sizes)(shape, layers)
    what = f"{shape}{f', {layers} layers' if layers else ''}{', a trial' if trial else ''} on {machine.device_name}"
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    model = Path(scratch or tempfile.gettempdir()).absolute() / f"splitserve-device-{shape}-{layers}"
    steps = steps_of(sizes, machine, model, out)
    record = Record(out, what)
    to_do = [step for step in _chosen(steps, names) if names or not record.is_done(step.name)]
    go_through(steps, with_model(to_do, steps, str(model)), record, out, limit_s)
    if all(record.state(step.name) in (DONE, SKIPPED) for step in steps):
        shutil.rmtree(model, ignore_errors=True)
    report(f"{out / MARKDOWN_FILE} and {JSON_FILE}")


def look() -> Machine:
    """What is here."""
    import torch

    return Machine(
        num_devices=torch.cuda.device_count() if (is_here := torch.cuda.is_available()) else 0,
        first_device=os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        device_name=torch.cuda.get_device_name() if is_here else "CPU",
        has_vllm=is_installed("vllm"),
        has_tests=GPU_TESTS.is_dir(),
    )


def go_through(order: list[Step], chosen: list[Step], record: Record, out: Path, limit_s: float) -> None:
    """Does these steps one after the other, and notes each as soon as it is over. What there is no time for is left."""
    give_up_at = time.monotonic() + limit_s
    for step in chosen:
        left_s = give_up_at - time.monotonic()
        if step.why_not:
            outcome = Outcome(SKIPPED, why=step.why_not)
        elif left_s < min(LEAST_S, step.limit_s):
            outcome = Outcome(NOT_REACHED, why=f"the {limit_s:g} s of --limit-s were over")
        else:
            report(f"{step.name}, {min(left_s, step.limit_s):.0f} s at most ...")
            outcome = run_step(step, min(left_s, step.limit_s), out, out / LOG_FILE)
        record.take(step, outcome, order)
        report(f"{step.name}: {outcome.state}{f', {outcome.why}' if outcome.why else ''}")


def with_model(to_do: list[Step], steps: list[Step], folder: str) -> list[Step]:
    """Return the steps `to_do`, and before them the step that writes the model, if one of them reads it: the model may
    have been removed since."""
    if not any(folder in step.arguments and not step.why_not for step in to_do):
        return to_do
    return [step for step in steps if step in to_do or step.name == MODEL]


def _chosen(steps: list[Step], names: tuple[str, ...] | None) -> list[Step]:
    known = [step.name for step in steps]
    if unknown := [name for name in names or () if name not in known]:
        raise SettingsError(f"--steps: there is no step {unknown[0]!r}, but {', '.join(known)}")
    return [step for step in steps if names is None or step.name in names]
