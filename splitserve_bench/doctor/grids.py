"""Steps of one node by what is in them, as `splitserve doctor --save` measures them: an engine in a process of its own.

`python -m splitserve_bench.doctor.grids TASK` takes a JSON object with the fields of GridTask, and talks as
processes.py says. Of repeats the fastest counts, which others on the machine disturb least; how far equal steps spread
is measured at one place of the grid. When all is measured it goes on with steps until it is killed, so that another one
is beside a busy one all the time.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from serving_core.cpus import pin
from serving_core.errors import SplitServeError
from serving_core.settings import EngineSettings

ANSWERS, PROMPTS = "answers", "prompts"


@dataclass(frozen=True, slots=True)
class GridTask:
    """What to measure, all of it ascending: steps of `rows` answers, or of prompts in chunks of `rows` tokens, with
    `columns` tokens before them; and how far `num_spread` steps spread that have the row in the middle and the fewest
    tokens before them."""

    settings: dict[str, Any]  # of EngineSettings, but for the size of the pool
    cpus: str
    kind: str  # ANSWERS or PROMPTS
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    repeats: int
    num_spread: int = 0

    def num_equal(self, row: int, column: int) -> int:
        """Return how many equal steps are to be measured at a place beyond the repeats: none but where they spread."""
        is_middle = (row, column) == (self.rows[(len(self.rows) - 1) // 2], self.columns[0])
        return self.num_spread if is_middle else 0


@dataclass(frozen=True, slots=True)
class GridFigures:
    """seconds[row][column]; and what each of the equal steps took whose spread was asked for, as a multiple of that."""

    seconds: tuple[tuple[float, ...], ...]
    factors: tuple[float, ...] = ()


Step = Callable[[], object]


def measure_grid(task: GridTask) -> tuple[GridFigures, Step]:
    """In this process, whose cores are settled; with what takes a step like the last ones. Raises ModelError or
    SettingsError."""
    from engine.engine import Engine  # torch, whose threads are as many as there are cores when it is imported
    from serving_core.model_config import read_model_config
    from splitserve_bench.engine.driver import NUM_STEPS

    settings = EngineSettings(**task.settings)
    config = read_model_config(Path(settings.model))
    layout = config.kv_layout(settings.block_size, config.dtype)  # of blocks, only the number of tokens counts here
    is_of_prompts = task.kind == PROMPTS
    most_tokens = max(task.columns) + (max(task.rows) if is_of_prompts else 0) + NUM_STEPS
    num_requests = 1 if is_of_prompts else max(task.rows)
    engine = Engine(dataclasses.replace(settings, num_kv_blocks=num_requests * layout.num_blocks_for(most_tokens)))
    engine.warm_up()
    return _prompts(engine, task) if is_of_prompts else _answers(engine, task)


def _answers(engine: Any, task: GridTask) -> tuple[GridFigures, Step]:
    from splitserve_bench.engine.driver import NUM_STEPS, DecodeRun

    run = DecodeRun(engine, max(task.rows), max(task.columns))
    seconds: dict[tuple[int, int], float] = {}
    factors: list[float] = []
    for context_tokens in task.columns:
        _say(progress=f"answers with {context_tokens} tokens before them ...")
        run.extend(context_tokens)
        for batch in task.rows:
            num_equal = task.num_equal(batch, context_tokens)
            samples_s = _answers_s(run, batch, max(task.repeats, -(-num_equal // NUM_STEPS)))
            usual_s = seconds[batch, context_tokens] = usual_fastest(list(map(fmean, samples_s)), task.repeats)
            if num_equal:
                factors = [step_s / usual_s for steps_s in samples_s for step_s in steps_s]
    return _figures(task, seconds, factors), lambda: _answers_s(run, task.rows[-1], 1)


def _answers_s(run: Any, batch: int, repeats: int) -> list[list[float]]:
    run.rewind(batch)
    run.run_s(batch, 1)  # the first of its shapes
    samples_s: list[list[float]] = []
    for _ in range(repeats):
        run.rewind(batch)
        samples_s.append(run.steps_s(batch))
    return samples_s


def _prompts(engine: Any, task: GridTask) -> tuple[GridFigures, Step]:
    """Every chunk is the last of its prompt: it samples, too."""
    from splitserve_bench.engine.driver import DecodeRun

    run = DecodeRun(engine, 1, max(task.columns) + max(task.rows))
    seconds: dict[tuple[int, int], float] = {}
    factors: list[float] = []
    for context_tokens in task.columns:
        _say(progress=f"prompts with {context_tokens} tokens before the chunk ...")
        for chunk in task.rows:
            run.extend(context_tokens + chunk - 1)
            works = [run.work(0, context_tokens, chunk)]
            num_equal = task.num_equal(chunk, context_tokens)
            samples_s = _chunks_s(engine, works, max(task.repeats, num_equal))
            usual_s = seconds[chunk, context_tokens] = usual_fastest(samples_s, task.repeats)
            if num_equal:
                factors = [step_s / usual_s for step_s in samples_s]
    last = run.work(0, task.columns[-1], task.rows[-1])
    return _figures(task, seconds, factors), lambda: engine.step([last])


def _chunks_s(engine: Any, works: Sequence[Any], num_steps: int) -> list[float]:
    engine.step(works)  # the first of its shapes
    samples_s: list[float] = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        engine.step(works)
        samples_s.append(time.perf_counter() - start_s)
    return samples_s


def usual_fastest(samples_s: Sequence[float], repeats: int) -> float:
    """Return the fastest of so many repeats, as it usually is: the median over all such groups of samples. More samples
    make no place of a grid faster than the others, which have one group."""
    groups = [samples_s[first : first + repeats] for first in range(0, len(samples_s) - repeats + 1, repeats)]
    return median(map(min, groups))


def _figures(task: GridTask, seconds: Mapping[tuple[int, int], float], factors: Sequence[float]) -> GridFigures:
    rows = tuple(tuple(seconds[row, column] for column in task.columns) for row in task.rows)
    return GridFigures(rows, tuple(factors))


def main() -> None:
    """Does the task that is this process's argument."""
    fields = json.loads(sys.argv[1])
    lists: dict[str, Sequence[int]] = {name: tuple(fields[name]) for name in ("rows", "columns")}
    task = GridTask(**{**fields, **lists})
    try:
        pin(task.cpus)
        figures, step = measure_grid(task)
        _say(figures=dataclasses.asdict(figures))
        while True:
            step()
    except SplitServeError as error:
        _say(error=str(error))


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
