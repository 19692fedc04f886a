"""DistServe's profiles (simdistserve/estimators/profile_data/profiler-*.json of LLMServe/DistServe): coefficients by
model and tensor parallel size, in milliseconds,

    prompts   a + b · tokens + c · sum of squared lengths
    answers   a + b · tokens before them all + c · answers, with other coefficients from a number of answers on

so a chunk of n tokens after k others takes a + b · n + c · ((k + n)² - k²). What was measured is not in the file.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields, read_json_object
from splitserve_bench.errors import BenchError
from splitserve_bench.plan.devices import Link
from splitserve_bench.plan.model_sizes import ModelSizes
from splitserve_bench.plan.tables import MS, Check, Entry, check_of
from splitserve_bench.simulate.costs import StepLoad, together_s

THRESHOLD, PROMPTS, FEW, MANY = "decoding_large_small_bs_threshold", "prefill", "decoding_smallbs", "decoding_largebs"
MOST_TP: Final = 64
CHECKED_TOKENS: Final = (128, 256, 512, 1024, 2048)
CHECKED_ANSWERS: Final = ((1, 512), (8, 512), (32, 512), (64, 512), (128, 512))  # with the tokens before each

Coefficients = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class DistServeSteps:
    """Of one model and size; coefficients in milliseconds."""

    prompts: Coefficients
    few_answers: Coefficients
    many_answers: Coefficients
    many_from: int  # answers

    def answers_s(self, num_answers: float, context_tokens: float) -> float:
        base, before, each = self.few_answers if num_answers < self.many_from else self.many_answers
        return MS * max(0.0, base + before * num_answers * context_tokens + each * num_answers)

    def chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        base, each, squared = self.prompts
        return MS * max(0.0, base + each * num_tokens + squared * num_tokens * (num_tokens + 2 * before_tokens))

    def both_s(self, load: StepLoad) -> float:
        return together_s(self, load)


class DistServeTable:
    """Every model and size of a file. The hardware is in the file's name alone, if anywhere."""

    kind = "DistServe"

    def __init__(self, steps: dict[Entry, DistServeSteps]) -> None:
        self._steps = steps

    def entries(self) -> Sequence[Entry]:
        return sorted(self._steps)

    def steps(self, entry: Entry, model: ModelSizes, link: Link) -> DistServeSteps:
        """As fitted on whole steps, collectives and all."""
        return self._steps[entry]

    def checks(self, entry: Entry, model: ModelSizes | None) -> list[Check]:
        """Nothing measured is there to hold out, but a size between two others: each of its steps is predicted straight
        in 1 / size between theirs."""
        sizes = sorted(each.tp for each in self._steps if each.model == entry.model)
        at = sizes.index(entry.tp)
        if not 0 < at < len(sizes) - 1:
            return []
        held, less, more = (self._steps[Entry(entry.model, "", sizes[index])] for index in (at, at - 1, at + 1))
        share = (1 / entry.tp - 1 / sizes[at + 1]) / (1 / sizes[at - 1] - 1 / sizes[at + 1])

        def between(seconds_of: Callable[[DistServeSteps], float]) -> tuple[float, float]:
            return share * seconds_of(less) + (1 - share) * seconds_of(more), seconds_of(held)

        prompts = [between(lambda each, num=num: each.chunk_s(num, 0)) for num in CHECKED_TOKENS]  # type: ignore[misc]
        answers = [
            between(lambda each, num=num, context=context: each.answers_s(num, context))  # type: ignore[misc]
            for num, context in CHECKED_ANSWERS
        ]
        beside = f"TP {entry.tp} from TP {sizes[at - 1]} and {sizes[at + 1]}"
        return check_of(f"prompts, {beside}", prompts) + check_of(f"answers, {beside}", answers)


def read_distserve(path: Path) -> DistServeTable:
    """Raises BenchError for anything but such a file."""
    try:
        steps: dict[Entry, DistServeSteps] = {}
        models = read_json_object(path)
        for model in models.names:
            sizes = _nested(models, model)
            for tp in sizes.names:
                steps[Entry(model, "", _size(tp))] = _steps(_nested(sizes, tp))
    except ModelError as error:
        raise BenchError(str(error)) from error
    if not steps:
        raise BenchError(f"{path} has no model")
    return DistServeTable(steps)


def _size(tp: str) -> int:
    if not tp.isdecimal() or not 1 <= int(tp) <= MOST_TP:
        raise BenchError(f"{tp!r:.80} is no tensor parallel size from 1 to {MOST_TP}")
    return int(tp)


def _steps(fields: JsonFields) -> DistServeSteps:
    prompts, few, many = (_coefficients(fields, name) for name in (PROMPTS, FEW, MANY))
    return DistServeSteps(prompts, few, many, fields.integer(THRESHOLD))


def _coefficients(fields: JsonFields, name: str) -> Coefficients:
    """As they were fitted: what more of them adds may be below 0, as it is of OPT-175B's few answers."""
    values = fields.raw(name)
    if not isinstance(values, list) or len(values) != 3:
        raise fields.error(name, "a list of 3 numbers")
    wrapped = JsonFields({str(place): value for place, value in enumerate(values)}, name)
    base = wrapped.number("0")
    first, second = (wrapped.number(place, minimum=-sys.float_info.max) for place in "12")
    if not base + first + second > 0:
        raise fields.error(name, "above 0 in all")
    return base, first, second


def _nested(fields: JsonFields, name: str) -> JsonFields:
    if (found := fields.nested(name)) is None:
        raise fields.error(name, "an object")
    return found
