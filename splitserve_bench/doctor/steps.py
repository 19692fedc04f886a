"""Measure steps of one node by what is in them, with an engine in a process of its own.

`python -m splitserve_bench.doctor.steps TASK` reads a JSON object with the fields of StepTask, and is a worker of
splitserve_bench/crew.py with two jobs: MEASURE, and GO_ON, which repeats the last step until the process is killed, so
that another node is measured beside a busy one. Of repeats the fastest counts, which others on the machine disturb
least; how much equal steps vary is measured at one place of the grid.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from serving_core.process.cpus import pin
from serving_core.settings import EngineSettings
from splitserve_bench.crew import say, work

ANSWERS, PROMPTS = "answers", "prompts"
MEASURE: Final = {"measure": True}
GO_ON: Final = {"measure": False}

Step = Callable[[], object]
Seconds = dict[tuple[int, int], float]


@dataclass(frozen=True, slots=True)
class StepTask:
    """The steps to measure: each number of `rows` with each number of `columns`; both ascend.

    For ANSWERS a row is a number of requests that decode, for PROMPTS a number of tokens of one prompt; the column is
    the number of tokens before them. The spread is measured with `num_spread` equal steps of the middle row and the
    first column.
    """

    settings: dict[str, Any]  # of EngineSettings, but for the size of the pool
    cpus: str  # in the form of --cpus
    kind: str  # ANSWERS or PROMPTS
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    repeats: int
    num_spread: int = 0

    def num_equal(self, row: int, column: int) -> int:
        """Return how many equal steps are to be measured at a place to find their spread: 0 at all places but one."""
        is_middle = (row, column) == (self.rows[(len(self.rows) - 1) // 2], self.columns[0])
        return self.num_spread if is_middle else 0


@dataclass(frozen=True, slots=True)
class StepFigures:
    """seconds[row][column] of steps, equal steps' times as multiples of the usual one, and the engine's description."""

    seconds: tuple[tuple[float, ...], ...]
    factors: tuple[float, ...] = ()
    description: Mapping[str, str] = dataclasses.field(default_factory=dict)


def measure(task: StepTask) -> tuple[StepFigures, Step]:
    """Run the task in this process, whose CPUs are set; return the figures, and a function that repeats the last step.

    Raises ModelError when the model cannot be loaded, and SettingsError when the settings do not fit it.
    """
    from engine.build import build_engine  # torch, whose threads are as many as there are cores when it is imported
    from serving_core.model_files.config import read_model_config
    from splitserve_bench.engine.driver import NUM_STEPS

    settings = EngineSettings(**task.settings)
    config = read_model_config(Path(settings.model))
    layout = config.kv_layout(settings.block_size, config.dtype)  # of blocks, only the number of tokens counts here
    is_of_prompts = task.kind == PROMPTS
    most_tokens = max(task.columns) + (max(task.rows) if is_of_prompts else 0) + NUM_STEPS
    num_requests = 1 if is_of_prompts else max(task.rows)
    engine = build_engine(
        dataclasses.replace(settings, num_kv_blocks=num_requests * layout.num_blocks_for(most_tokens))
    )
    engine.warm_up()
    seconds, factors, step = (_prompts if is_of_prompts else _answers)(engine, task)
    rows = tuple(tuple(seconds[row, column] for column in task.columns) for row in task.rows)
    return StepFigures(rows, tuple(factors), engine.description), step


def _answers(engine: Any, task: StepTask) -> tuple[Seconds, list[float], Step]:
    from splitserve_bench.engine.driver import NUM_STEPS, DecodeRun

    run = DecodeRun(engine, max(task.rows), max(task.columns))
    seconds: Seconds = {}
    factors: list[float] = []
    for context_tokens in task.columns:
        say(progress=f"decode steps with {context_tokens} tokens of context ...")
        run.extend(context_tokens)
        for batch in task.rows:
            num_equal = task.num_equal(batch, context_tokens)
            samples_s = _answers_s(run, batch, max(task.repeats, -(-num_equal // NUM_STEPS)))
            usual_s = seconds[batch, context_tokens] = usual_fastest(list(map(fmean, samples_s)), task.repeats)
            if num_equal:
                factors = [step_s / usual_s for steps_s in samples_s for step_s in steps_s]
    return seconds, factors, partial(_answers_s, run, task.rows[-1], 1)


def _answers_s(run: Any, batch: int, repeats: int) -> list[list[float]]:
    run.rewind(batch)
    run.run_s(batch, 1)  # the first of its shapes
    samples_s: list[list[float]] = []
    for _ in range(repeats):
        run.rewind(batch)
        samples_s.append(run.steps_s(batch))
    return samples_s


def _prompts(engine: Any, task: StepTask) -> tuple[Seconds, list[float], Step]:
    """Measure chunks of a prompt. Each is the end of its prompt, so that its step samples a token too."""
    from splitserve_bench.engine.driver import DecodeRun
    from splitserve_bench.engine.sizes import STEP_TOKENS

    run = DecodeRun(engine, 1, max(task.columns) + max(task.rows))
    seconds: Seconds = {}
    factors: list[float] = []

    def steps(num_tokens: int, before: int) -> None:
        end = before + num_tokens
        for start in range(before, end, STEP_TOKENS):
            engine.step([run.work(0, start, min(STEP_TOKENS, end - start))])

    for before in task.columns:
        say(progress=f"prompts with {before} tokens before the chunk ...")
        for num_tokens in task.rows:
            run.extend(before + num_tokens - 1)
            num_equal = task.num_equal(num_tokens, before)
            samples_s = _samples_s(partial(steps, num_tokens, before), max(task.repeats, num_equal))
            usual_s = seconds[num_tokens, before] = usual_fastest(samples_s, task.repeats)
            if num_equal:
                factors = [step_s / usual_s for step_s in samples_s]
    return seconds, factors, partial(steps, task.rows[-1], task.columns[-1])


def _samples_s(step: Step, num_samples: int) -> list[float]:
    step()  # the first of its shapes
    samples_s: list[float] = []
    for _ in range(num_samples):
        start_s = time.perf_counter()
        step()
        samples_s.append(time.perf_counter() - start_s)
    return samples_s


def usual_fastest(samples_s: Sequence[float], repeats: int) -> float:
    """Return the fastest of `repeats` samples as it usually is: the median over all groups of so many samples.

    So a place of the grid with more samples looks no faster than the others, which have one group.
    """
    groups = [samples_s[first : first + repeats] for first in range(0, len(samples_s) - repeats + 1, repeats)]
    return median(map(min, groups))


def prepare(setup: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Read the task, pin this process to its CPUs, and return the function that does a job.

    Raises SettingsError for CPUs that do not exist.
    """
    fields = json.loads(setup)
    task = StepTask(**{**fields, **{name: tuple(fields[name]) for name in ("rows", "columns")}})
    pin(task.cpus)
    last: Step | None = None

    def do(job: dict[str, Any]) -> dict[str, Any]:
        nonlocal last
        if job == MEASURE:
            figures, last = measure(task)
            return dataclasses.asdict(figures)
        assert last is not None, "what is to go on has been measured"
        while True:
            last()

    return do


if __name__ == "__main__":
    work(prepare)
