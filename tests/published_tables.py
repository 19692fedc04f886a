"""Step times that others have published, as profiles for `splitserve plan --profile`, one a size: `python -m
tests.published_tables distserve|splitwise|llmservingsim SOURCE --model FOLDER --hardware h100 --table-model NAME DIR`.

DistServe (simdistserve/estimators/profile_data/profiler-*.json of LLMServe/DistServe) has coefficients in milliseconds,
splitwise-sim (data/perf_model.csv of Mutinifni/splitwise-sim) a row for each run of some equal requests together, and
LLMServingSim (profiler/perf/HARDWARE/MODEL/VARIANT of casys-kaist/LLMServingSim) microseconds of the parts of a step in
folders tpN. Memory and links are those of the hardware's data sheet.
"""

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click

from splitserve_bench.plan.hardware import DEVICES
from splitserve_bench.plan.model_sizes import ModelSizes, read_model_sizes
from splitserve_bench.plan.nodes import NodeOptions, machines_of
from splitserve_bench.simulate.profile import Grid, Profile

MS, US = 1e-3, 1e-6
MANY_ANSWERS = "decoding_large_small_bs_threshold"
OF_A_LAYER = {
    **dict.fromkeys(("qkv_proj", "qk_norm", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj"), 1),
    "layernorm": 2,
}


class Steps(NamedTuple):
    """Seconds of steps of one size: of answers by their number and the tokens before each, and of a chunk of a prompt
    by its tokens and those before it."""

    answers_s: Callable[[float, float], float]
    chunk_s: Callable[[float, float], float]


def flat(seconds: Mapping[int, float]) -> Grid:
    """Straight between places of one quantity."""
    return Grid(tuple(sorted(seconds)), (0,), tuple((seconds[place],) for place in sorted(seconds)))


def distserve(path: Path, table_model: str, hardware: str, model: ModelSizes) -> dict[int, Steps]:
    """A chunk of n tokens after k others takes a + b · n + c · ((k + n)² - k²), as whole prompts take their squares."""

    def steps_of(fields: dict) -> Steps:
        base, each, squared = fields["prefill"]

        def answers_s(num: float, context: float) -> float:
            a, b, c = fields["decoding_smallbs" if num < fields[MANY_ANSWERS] else "decoding_largebs"]
            return MS * max(0.0, a + b * num * context + c * num)

        def chunk_s(num: float, before: float) -> float:
            return MS * (base + each * num + squared * num * (num + 2 * before))

        return Steps(answers_s, chunk_s)

    return {int(tp): steps_of(fields) for tp, fields in json.loads(path.read_text())[table_model].items()}


def splitwise(path: Path, table_model: str, hardware: str, model: ModelSizes) -> dict[int, Steps]:
    """Medians by prompt length and by batch. What a cached token adds is the slope over lone answers."""
    runs = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["hardware"]) == (table_model, hardware):
                names = ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time")
                runs[int(row["tensor_parallel"])].append(tuple(float(row[name]) for name in names))
    return {tp: _splitwise_steps(of_size) for tp, of_size in runs.items()}


def _splitwise_steps(runs: Sequence[tuple[float, ...]]) -> Steps:
    lone = [run for run in runs if run[1] == 1]
    most = max(run[1] for run in runs)
    usual = statistics.median(run[0] + run[2] / 2 for run in runs if run[1] == most)
    near = [run for run in lone if run[0] + run[2] / 2 == usual] or lone
    prompts = flat(_medians((run[0], run[3]) for run in lone))
    answers = flat(_medians((run[1], run[4]) for run in [*near, *(run for run in runs if run[1] > 1)]))
    slope, _ = statistics.linear_regression([run[0] + run[2] / 2 for run in lone], [run[4] for run in lone])
    cached_s = MS * max(0.0, slope)

    def answers_s(num: float, context: float) -> float:
        least_s = answers.seconds[0][0] / 2  # an extrapolated slope may not make a step free
        return max(least_s, answers.at(num, 0) + num * (context - usual) * cached_s)

    def chunk_s(num: float, before: float) -> float:
        added_s = prompts.at(before + num, 0) - prompts.at(before, 0) if before > 0 else 0.0
        return max(prompts.at(num, 0), added_s)

    return Steps(answers_s, chunk_s)


def _medians(points: Iterable[tuple[float, float]]) -> dict[int, float]:
    found = defaultdict(list)
    for place, milliseconds in points:
        found[int(place)].append(MS * milliseconds)
    return {place: statistics.median(seconds) for place, seconds in found.items()}


def llmservingsim(folder: Path, table_model: str, hardware: str, model: ModelSizes) -> dict[int, Steps]:
    """A step is the sum of its parts, straight between the places that were measured; collectives are not there."""
    return {int(each.name[2:]): _summed(each, model.num_layers) for each in folder.iterdir() if each.name[:2] == "tp"}


def _summed(folder: Path, num_layers: int) -> Steps:
    tokens, sequences = _parts(folder / "dense.csv", "tokens"), _parts(folder / "per_sequence.csv", "sequences")
    chunks, answers = {}, {}
    with (folder / "attention.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            chunk, before, num, context = (
                int(row[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
            )
            if not num:
                chunks[chunk, before] = US * float(row["time_us"])
            elif not chunk:
                answers[num, context] = US * float(row["time_us"])
    of_chunks, of_answers = _whole(chunks), _whole(answers)

    def shared_s(num_tokens: float, num_sequences: float) -> float:
        layers_s = sum(OF_A_LAYER.get(name, 0) * grid.at(num_tokens, 0) for name, grid in tokens.items())
        step_s = sum(grid.at(num_tokens, 0) for name, grid in tokens.items() if name not in OF_A_LAYER)
        return num_layers * layers_s + step_s + sum(grid.at(num_sequences, 0) for grid in sequences.values())

    return Steps(
        lambda num, context: shared_s(num, num) + num_layers * of_answers.at(num, context),
        lambda num, before: shared_s(num, 1) + num_layers * of_chunks.at(num, before),
    )


def _parts(path: Path, places: str) -> dict[str, Grid]:
    seconds = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            seconds[row["layer"]][int(row[places])] = US * float(row["time_us"])
    return {name: flat(own) for name, own in seconds.items()}


def _whole(seconds: Mapping[tuple[int, int], float]) -> Grid:
    """All rows that have the columns of the fullest one."""
    columns = defaultdict(set)
    for row, column in seconds:
        columns[row].add(column)
    chosen = max(columns.values(), key=len)
    rows, places = sorted(row for row, own in columns.items() if own >= chosen), tuple(sorted(chosen))
    return Grid(tuple(rows), places, tuple(tuple(seconds[row, place] for place in places) for row in rows))


TABLES = {read.__name__: read for read in (distserve, splitwise, llmservingsim)}


ROLES = ("prefill_hardware", "decode_hardware", "both_hardware")


def profiles_of(table: str, source: Path, table_model: str, nodes: NodeOptions) -> dict[int, Profile]:
    """By TP size: the profiles of the planner's nodes of one hardware, with the steps of a table."""
    (hardware,) = nodes.both_hardware
    sizes = TABLES[table](source, table_model, hardware, read_model_sizes(Path(nodes.model)))
    sheet = replace(nodes, tp_sizes=tuple(sorted(sizes)), **dict.fromkeys(ROLES, (hardware.split("-")[0],)))
    return {kind.tp: _with_steps(kind.profile, hardware, sizes[kind.tp]) for kind in machines_of(sheet).kinds}


def _with_steps(profile: Profile, hardware: str, steps: Steps) -> Profile:
    def grid_of(grid: Grid, seconds_of: Callable[[float, float], float]) -> Grid:
        seconds = [tuple(seconds_of(row, column) for column in grid.columns) for row in grid.rows]
        return Grid(grid.rows, grid.columns, tuple(seconds))

    answers, prompts = grid_of(profile.steps.answers, steps.answers_s), grid_of(profile.steps.prompts, steps.chunk_s)
    return replace(profile, hardware=hardware, steps=replace(profile.steps, answers=answers, prompts=prompts))


@click.command()
@click.argument("table", type=click.Choice(list(TABLES)))
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--model", required=True, type=click.Path(exists=True, file_okay=False))
@click.option("--hardware", required=True, help=f"As the table calls it; the sheet is of one of {', '.join(DEVICES)}.")
@click.option("--table-model", default="")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(table: str, source: Path, model: str, hardware: str, table_model: str, folder: Path) -> None:
    """Write hardware-tpN.json for each size of a table."""
    names = dict.fromkeys(ROLES, (hardware,))
    unset = dict.fromkeys(("device_memory_bytes", "max_model_len", "max_num_batched_tokens", "max_num_seqs"), 0)
    nodes = NodeOptions(model, (), **names, link="", host_link="ib", gpus_per_host=64, tp_sizes=(), **unset)
    for tp, profile in profiles_of(table, source, table_model, nodes).items():
        profile.save(folder / f"{hardware}-tp{tp}.json")


if __name__ == "__main__":
    main()
