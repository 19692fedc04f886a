"""splitwise-sim's measurements (data/perf_model.csv of Mutinifni/splitwise-sim): one row for each run of some equal
requests together, with the milliseconds of its prompts' step and of a token of its answers.

Prompts: the median of lone prompts of each length, straight in between; a chunk takes at least what a prompt of its
size takes, and at least what its tokens add to the prompt. Answers: the median at each batch, straight in between; what
a cached token adds is the least squares' slope over the lone answers, at least 0, for hardly anything else was measured
of it.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from splitserve_bench.errors import BenchError
from splitserve_bench.plan.devices import Link
from splitserve_bench.plan.model_sizes import ModelSizes
from splitserve_bench.plan.table_rows import read_rows
from splitserve_bench.plan.tables import MS, Check, Entry, check_of, left_out
from splitserve_bench.simulate.costs import StepLoad, together_s
from splitserve_bench.simulate.grid import Grid
from splitserve_bench.simulate.profile import flat_grid

COLUMNS: Final = (
    *("model", "hardware", "prompt_size", "batch_size", "token_size"),
    *("prompt_time", "token_time", "tensor_parallel"),
)
HELD_OUT: Final = 0.2  # of the rows, as in the paper
SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One row."""

    prompt_tokens: int  # of each request
    batch: int
    output_tokens: int
    prompts_s: float
    token_s: float

    @property
    def context_tokens(self) -> float:
        """Before a token of an answer, in the middle of it."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class SplitwiseSteps:
    """Of one model, hardware and size."""

    prompts: Grid  # by tokens
    answers: Grid  # by batch, at context_tokens
    context_tokens: float
    cached_token_s: float

    def answers_s(self, num_answers: float, context_tokens: float) -> float:
        at_least_s = self.answers.seconds[0][0] / 2  # an extrapolated slope may not make a step free
        beyond_tokens = num_answers * (context_tokens - self.context_tokens)
        return max(at_least_s, self.answers.at(num_answers, 0) + beyond_tokens * self.cached_token_s)

    def chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        added_s = self.prompts.at(before_tokens + num_tokens, 0) - self.prompts.at(before_tokens, 0)
        return max(self.prompts.at(num_tokens, 0), added_s if before_tokens > 0 else 0.0)

    def both_s(self, load: StepLoad) -> float:
        return together_s(self, load)


class SplitwiseTable:
    """Every model, hardware and size of a file."""

    kind = "splitwise-sim"

    def __init__(self, runs: dict[Entry, list[Run]]) -> None:
        self._runs = runs

    def entries(self) -> Sequence[Entry]:
        return sorted(self._runs)

    def steps(self, entry: Entry, model: ModelSizes, link: Link) -> SplitwiseSteps:
        """As measured with the collectives."""
        return fitted(self._runs[entry], entry)

    def checks(self, entry: Entry, model: ModelSizes | None) -> list[Check]:
        """A fifth of the rows, drawn; each place that was measured between others; and prompts read together, which are
        not fitted, as one prompt of all their tokens."""
        runs = self._runs[entry]
        drawn = set(Random(SEED).sample(range(len(runs)), round(HELD_OUT * len(runs))))
        kept = fitted([run for index, run in enumerate(runs) if index not in drawn], entry)
        held = [runs[index] for index in sorted(drawn)]
        whole = fitted(runs, entry)
        lone = [(kept.chunk_s(run.prompt_tokens, 0), run.prompts_s) for run in held if run.batch == 1]
        answers = [(kept.answers_s(run.batch, run.context_tokens), run.token_s) for run in held]
        together = [(whole.chunk_s(run.batch * run.prompt_tokens, 0), run.prompts_s) for run in runs if run.batch > 1]
        return [
            *check_of("prompts, a fifth of the rows", lone),
            *check_of("prompts, each length in turn", left_out(whole.prompts)),
            *check_of("prompts read together", together),
            *check_of("answers, a fifth of the rows", answers),
            *check_of("answers, each batch in turn", left_out(whole.answers)),
        ]


def fitted(runs: Sequence[Run], entry: Entry) -> SplitwiseSteps:
    """Raises BenchError where too little was measured."""
    lone = [run for run in runs if run.batch == 1]
    most = max((run.batch for run in runs), default=0)
    if len({run.prompt_tokens for run in lone}) < 2 or most < 2:
        raise BenchError(f"{entry}: lone prompts of two lengths and answers of two batches are needed")
    context_tokens = statistics.median(run.context_tokens for run in runs if run.batch == most)
    near = [run for run in lone if run.context_tokens == context_tokens] or lone
    prompts = _medians(lone, lambda run: run.prompt_tokens, lambda run: run.prompts_s)
    answers = _medians([*near, *(run for run in runs if run.batch > 1)], lambda run: run.batch, lambda run: run.token_s)
    slope_s, _ = statistics.linear_regression([run.context_tokens for run in lone], [run.token_s for run in lone])
    return SplitwiseSteps(prompts, answers, context_tokens, max(0.0, slope_s))


def read_splitwise(path: Path) -> SplitwiseTable:
    """Raises BenchError, which names the line."""
    runs: dict[Entry, list[Run]] = {}
    for row in read_rows(path, COLUMNS):
        entry = Entry(row.text("model"), row.text("hardware"), row.count("tensor_parallel", 1))
        runs.setdefault(entry, []).append(
            Run(
                prompt_tokens=row.count("prompt_size", 1),
                batch=row.count("batch_size", 1),
                output_tokens=row.count("token_size", 1),
                prompts_s=MS * row.positive("prompt_time"),
                token_s=MS * row.positive("token_time"),
            )
        )
    if not runs:
        raise BenchError(f"{path} has no rows")
    return SplitwiseTable(runs)


def _medians(runs: Iterable[Run], place_of: Callable[[Run], int], seconds_of: Callable[[Run], float]) -> Grid:
    """By place."""
    seconds: dict[int, list[float]] = {}
    for run in runs:
        seconds.setdefault(place_of(run), []).append(seconds_of(run))
    places = sorted(seconds)
    return flat_grid(places, [statistics.median(seconds[place]) for place in places])
