"""LLMServingSim's measurements of vLLM (profiler/perf/HARDWARE/MODEL/VARIANT of casys-kaist/LLMServingSim):
microseconds of one layer's parts by tokens, of the head by sequences, and of attention by chunk, tokens before it,
answers and tokens before each, for each tensor parallel size in a folder tpN.

A step is the sum of its parts, straight between the places that were measured. Attention of prompts and of answers is
taken from the rows with one of them alone; in a step of both that of answers takes a multiple, the median of the rows
with both by the number of answers. Collectives are not in the files: they are a ring's, by the link (plan/roofline.py).
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from splitserve_bench.errors import BenchError
from splitserve_bench.plan.devices import LINKS, PCIE, Link
from splitserve_bench.plan.model_sizes import ModelSizes
from splitserve_bench.plan.roofline import collectives_s
from splitserve_bench.plan.table_rows import read_rows
from splitserve_bench.plan.tables import US, Check, Entry, check_of, left_out
from splitserve_bench.simulate.costs import StepLoad
from splitserve_bench.simulate.grid import Grid
from splitserve_bench.simulate.profile import flat_grid

FOLDER: Final = re.compile(r"tp([1-9]\d?)", re.ASCII)
# How often a step has each part: of a layer, or of the whole.
ONCE: Final = ("qkv_proj", "qk_norm", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
OF_A_LAYER: Final = {"layernorm": 2, **dict.fromkeys(ONCE, 1)}
OF_A_STEP: Final = ("embedding", "final_layernorm")
OF_SEQUENCES: Final = ("lm_head", "sampler")
NEEDED: Final = frozenset({"layernorm", "qkv_proj", "o_proj", "down_proj"})
SEED: Final = 0
EXPERTS: Final = "moe.csv"
NO_LINK: Final = LINKS[PCIE]  # of one rank, which sends nothing

Place = tuple[int, int, int, int]  # chunk, tokens before it, answers, tokens before each


@dataclass(frozen=True, slots=True)
class Parts:
    """What was measured at one size: of a layer, of a step and of its sequences, by tokens or sequences; attention of
    a layer."""

    layer: dict[str, Grid]
    step: dict[str, Grid]
    sequences: dict[str, Grid]
    attention: dict[Place, float]

    @property
    def prompts(self) -> Grid:
        """Attention of chunks, by tokens and tokens before them."""
        return _widest({place[:2]: seconds for place, seconds in self.attention.items() if not place[2]})

    @property
    def answers(self) -> Grid:
        """Attention of answers, by number and tokens before each."""
        return _widest({place[2:]: seconds for place, seconds in self.attention.items() if not place[0]})


@dataclass(frozen=True, slots=True)
class LLMServingSimSteps:
    """Of one size."""

    tokens: Grid  # of all layers and the step, by tokens
    sequences: Grid
    prompts: Grid  # attention of one layer
    answers: Grid  # the same
    beside: Grid  # how often as long that of answers takes beside a chunk, by their number
    model: ModelSizes
    link: Link
    tp: int

    def answers_s(self, num_answers: float, context_tokens: float) -> float:
        attention_s = self.answers.at(num_answers, context_tokens)
        return self.shared_s(num_answers, num_answers) + self.model.num_layers * attention_s

    def chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        return self.shared_s(num_tokens, 1) + self.model.num_layers * self.prompts.at(num_tokens, before_tokens)

    def both_s(self, load: StepLoad) -> float:
        num_answers, num_tokens = load.num_answers, load.num_prompt_tokens
        attention_s = self.answers.at(num_answers, load.num_cached / num_answers) * self.beside.at(num_answers, 0)
        attention_s += self.prompts.at(num_tokens, load.num_before / num_tokens)
        return self.shared_s(num_answers + num_tokens, num_answers + 1) + self.model.num_layers * attention_s

    def shared_s(self, num_tokens: float, num_sequences: float) -> float:
        """All but attention."""
        ring_s = collectives_s(self.model, self.link, self.tp, num_tokens)
        return self.tokens.at(num_tokens, 0) + self.sequences.at(num_sequences, 0) + ring_s


class LLMServingSimTable:
    """Every size of a folder."""

    kind = "LLMServingSim"

    def __init__(self, parts: dict[Entry, Parts]) -> None:
        self._parts = parts

    def entries(self) -> Sequence[Entry]:
        return sorted(self._parts)

    def steps(self, entry: Entry, model: ModelSizes, link: Link) -> LLMServingSimSteps:
        parts = self._parts[entry]
        weighted = [(OF_A_LAYER[name] * model.num_layers, grid) for name, grid in parts.layer.items()]
        return LLMServingSimSteps(
            tokens=_sum([*weighted, *((1, grid) for grid in parts.step.values())]),
            sequences=_sum([(1, grid) for grid in parts.sequences.values()]),
            prompts=parts.prompts,
            answers=parts.answers,
            beside=_beside(parts, sorted(parts.attention)),
            model=model,
            link=link,
            tp=entry.tp,
        )

    def checks(self, entry: Entry, model: ModelSizes | None) -> list[Check]:
        """Each place between others, left out; chunks that are on no line of the grid; and, with the model's number of
        layers, whole steps of both, half of whose places are held out."""
        parts = self._parts[entry]
        dense = [pair for grid in (*parts.layer.values(), *parts.step.values()) for pair in left_out(grid)]
        head = [pair for grid in parts.sequences.values() for pair in left_out(grid)]
        prompts, answers = parts.prompts, parts.answers
        between = [
            (prompts.at(chunk, before), seconds)
            for (chunk, before, num, _), seconds in parts.attention.items()
            if not num and not (chunk in prompts.rows and before in prompts.columns)
        ]
        return [
            *check_of("products and norms, each place in turn", dense),
            *check_of("head and sampler, each place in turn", head),
            *check_of("attention of chunks off the grid", between),
            *check_of("attention of answers, each place in turn", left_out(answers)),
            *(self._both_checks(entry, model) if model is not None else []),
        ]

    def _both_checks(self, entry: Entry, model: ModelSizes) -> list[Check]:
        """Without collectives."""
        parts = self._parts[entry]
        places = sorted(place for place in parts.attention if place[0] and place[2])
        held = set(Random(SEED).sample(places, len(places) // 2))
        beside = _beside(parts, [place for place in places if place not in held])
        steps = replace(self.steps(entry, model, NO_LINK), tp=1, beside=beside)
        pairs = []
        for chunk, before, num, context in sorted(held):
            measured_s = (
                steps.shared_s(chunk + num, num + 1) + model.num_layers * parts.attention[chunk, before, num, context]
            )
            pairs.append((steps.both_s(StepLoad(num, num * context, chunk, before * chunk)), measured_s))
        return check_of("whole steps of both, half of the places", pairs)


def read_llmservingsim(folder: Path) -> LLMServingSimTable:
    """Raises BenchError for a folder without such files, or with a file that is not as it should be."""
    hardware, model = (folder.resolve().parts[index] if len(folder.resolve().parts) > 4 else "" for index in (-4, -2))
    sizes = {
        int(match[1]): path for path in folder.iterdir() if path.is_dir() and (match := FOLDER.fullmatch(path.name))
    }
    if not sizes:
        raise BenchError(f"{folder} has no folder tp1, tp2, ...: it is none of LLMServingSim's")
    return LLMServingSimTable({Entry(model, hardware, tp): _parts(sizes[tp]) for tp in sorted(sizes)})


def _parts(folder: Path) -> Parts:
    if (folder / EXPERTS).exists():
        raise BenchError(f"{folder} is of a mixture of experts, which cannot be planned")
    tokens = _grids(folder / "dense.csv", "tokens")
    sequences = _grids(folder / "per_sequence.csv", "sequences")
    if unknown := sorted({*tokens, *sequences} - {*OF_A_LAYER, *OF_A_STEP, *OF_SEQUENCES}):
        raise BenchError(f"{folder} has the part {unknown[0]!r}, which no step is known to have")
    if missing := sorted({*NEEDED, OF_SEQUENCES[0]} - {*tokens, *sequences}):
        raise BenchError(f"{folder} lacks the part {missing[0]}")
    attention: dict[Place, float] = {}
    for row in read_rows(folder / "attention.csv", ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")):
        place = (row.count("prefill_chunk"), row.count("kv_prefill"), row.count("n_decode"), row.count("kv_decode"))
        attention[place] = US * row.positive("time_us")
    if not (any(not place[2] for place in attention) and any(not place[0] for place in attention)):
        raise BenchError(f"{folder} needs attention of chunks alone and of answers alone")
    return Parts(
        layer={name: grid for name, grid in tokens.items() if name in OF_A_LAYER},
        step={name: grid for name, grid in tokens.items() if name in OF_A_STEP},
        sequences=sequences,
        attention=attention,
    )


def _grids(path: Path, places: str) -> dict[str, Grid]:
    """By part."""
    seconds: dict[str, dict[int, float]] = {}
    for row in read_rows(path, ("layer", places, "time_us")):
        seconds.setdefault(row.text("layer"), {})[row.count(places, 1)] = US * row.positive("time_us")
    return {name: flat_grid(sorted(own), [own[place] for place in sorted(own)]) for name, own in seconds.items()}


def _sum(weighted: Sequence[tuple[int, Grid]]) -> Grid:
    """At all places of any."""
    places = sorted({row for _, grid in weighted for row in grid.rows})
    return flat_grid(places, [sum(times * grid.at(place, 0) for times, grid in weighted) for place in places])


def _beside(parts: Parts, places: Iterable[Place]) -> Grid:
    """By the number of answers, the median over these places; 1 where none has both."""
    prompts, answers = parts.prompts, parts.answers
    factors: dict[int, list[float]] = {}
    for chunk, before, num, context in places:
        if chunk and num:
            rest_s = parts.attention[chunk, before, num, context] - prompts.at(chunk, before)
            factors.setdefault(num, []).append(max(0.0, rest_s) / answers.at(num, context))
    rows = sorted(factors) or [1]
    return flat_grid(rows, [statistics.median(factors.get(row, [1.0])) for row in rows])


def _widest(seconds: dict[tuple[int, int], float]) -> Grid:
    """The most places that make a whole grid: for the columns of one of the rows, all rows that have them."""
    columns: dict[int, set[int]] = {}
    for row, column in seconds:
        columns.setdefault(row, set()).add(column)

    def rows_with(wanted: set[int]) -> list[int]:
        return sorted(row for row, own in columns.items() if own >= wanted)

    chosen = max(columns.values(), key=lambda wanted: len(wanted) * len(rows_with(wanted)))
    rows, places = rows_with(chosen), sorted(chosen)
    return Grid(tuple(rows), tuple(places), tuple(tuple(seconds[row, place] for place in places) for row in rows))
