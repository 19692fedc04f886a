"""What `splitserve doctor --save` measures beyond what it shows: a profile for `splitserve simulate`.

1. Steps by what is in them, on a node that reads and one that writes, at the same time where there are cores for both:
   each beside a busy one from its first step to its last; and how far equal ones spread.
2. A few of them once more on each node alone: what share of that time they take while the other one rests.
3. A cluster is asked one request after the other: what a message, the door, the corridor and a node's own work around a
   step take is what remains of its timelines when the steps are taken away. Its nodes have the cores of those above:
   it is a node that reads and one that writes, or, where there are no cores for both, one that does both, which has no
   corridor: its latency is then 0.
"""

import asyncio
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from serving_core.model_config import read_model_config
from serving_core.needs import model_layout, num_blocks_for
from serving_core.settings import EngineSettings
from serving_core.shapes import BOTH
from serving_node.settings import NodeSettings
from splitserve.launch.models import LocalModel, Report
from splitserve_bench.compare.arena import Arena
from splitserve_bench.compare.contenders import SPLIT, ClusterContender, colocated
from splitserve_bench.doctor.doctor import DECODE_NODE, PREFILL_NODE, DoctorBench, all_cpus, batches_of, node_cpus
from splitserve_bench.doctor.grids import ANSWERS, PROMPTS, GridFigures, GridTask
from splitserve_bench.doctor.processes import both, figures_of
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import Prompts
from splitserve_bench.serve.metrics import tpot_s, ttft_s
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.simulate.grid import Grid
from splitserve_bench.simulate.profile import ControlProfile, CorridorProfile, NodeSizes, Profile, StepProfile
from splitserve_bench.simulate.spread import NO_SPREAD, Spread

GRIDS_MODULE: Final = "splitserve_bench.doctor.grids"
CHUNKS: Final = (1, 16, 64, 128, 256, 512)
CONTEXTS: Final = (0, 512, 1536)  # before a chunk
ANSWER_CONTEXTS: Final = (32, 256, 1024)  # before a token of an answer
NUM_SPREAD: Final = 96  # equal steps, of prompts and of answers
SPREAD_PERCENTS: Final = (1, 5, 25, 50, 75, 95, 99)
LONE_PROMPT_TOKENS: Final = 256  # one chunk, in a model of some context
LONE_OUTPUT_TOKENS: Final = 32
LONE_REQUESTS: Final = 12
SHORT_PROMPT_TOKENS: Final = 16
SHORT_REQUESTS: Final = 48  # of one token, for what varies beside steps
LONE_TIMEOUT_S: Final = 300.0
NODE_FLAGS: Final = (
    *("dtype", "quantization", "kv_cache_dtype", "weights_memory_bytes", "weights_disk_path"),
    "batch_invariant",
)


async def measure_profile(
    model: LocalModel, settings: EngineSettings, sizes: DoctorBench, bytes_per_s: float, report: Report
) -> Profile:
    """`bytes_per_s` is the corridor's. Raises BenchError, ModelError and SettingsError."""
    cpus, (parts, at_once) = all_cpus(), node_cpus(all_cpus(), sizes.cores)
    node = node_sizes(model.folder, settings)
    tasks = _tasks(model.folder, settings, sizes, parts, node.max_model_len)
    steps = await measure_steps(*tasks, report, at_once=at_once)
    report("a cluster, one request after the other ...")
    flags = {name: getattr(settings, name) for name in NODE_FLAGS}
    contender, num_cpus = lone_cluster(sizes.cores, at_once=at_once)
    outcomes = await _lone_requests(model, contender, cpus[:num_cpus], flags, node, report)
    long, short = outcomes[:LONE_REQUESTS], outcomes[LONE_REQUESTS:]
    profile = profile_of(model.name, sizes.cores, node, steps, bytes_per_s, long, short)
    return dataclasses.replace(profile, flags=given_flags(settings))


def given_flags(settings: EngineSettings) -> dict[str, Any]:
    """Those of NODE_FLAGS that are not as usual."""
    usual = EngineSettings()
    return {name: value for name in NODE_FLAGS if (value := getattr(settings, name)) != getattr(usual, name)}


def profile_of(
    model: str,
    cores: int,
    node: NodeSizes,
    steps: StepProfile,
    bytes_per_s: float,
    outcomes: Sequence[Outcome],
    short: Sequence[Outcome],
) -> Profile:
    """From steps without overhead, and what became of requests that were alone in a cluster of one node, or of two, one
    of which rested while the other one worked: some of one length, and more of them short, which tell of messages."""
    num_prompt_tokens = outcomes[0].num_prompt_tokens
    answer_s = steps.answers.at(1, num_prompt_tokens + LONE_OUTPUT_TOKENS / 2) * steps.answers_alone_factor
    overhead_s = _median(outcomes, lambda each: (tpot_s(each) or 0.0) / steps.answers_spread.mean - answer_s)
    chunk_s = steps.prompts.at(num_prompt_tokens, 0) * steps.prompts_alone_factor + overhead_s
    prompt_overhead_s = _median(outcomes, lambda each: _phase(each, "prefill_s") / steps.prompts_spread.mean - chunk_s)
    latency_s = _median(outcomes, lambda each: _phase(each, "transfer_s"))
    return Profile(
        model=model,
        cores=cores,
        node=node,
        steps=dataclasses.replace(steps, overhead_s=overhead_s, prompt_overhead_s=prompt_overhead_s),
        corridor=CorridorProfile(latency_s, bytes_per_s),
        control=control_of(short),
    )


def lone_cluster(cores: int, *, at_once: bool) -> tuple[ClusterContender, int]:
    """Who is asked lone requests, and on how many CPUs: each node on as many as the steps were measured on. Two nodes,
    or one where there are no cores for both at once."""
    if at_once:
        return ClusterContender("two nodes", SPLIT, 1, 1, 0), 2 * cores
    return colocated(1, cores), cores


def node_sizes(folder: Path, settings: EngineSettings) -> NodeSizes:
    """Of a node that is told nothing else."""
    config, nodes = read_model_config(folder), NodeSettings().resolved(BOTH, "cpu")
    layout = model_layout(settings, config)
    return NodeSizes(
        num_blocks=num_blocks_for(settings, layout, 1),
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        num_layers=layout.num_layers,
        max_model_len=settings.max_model_len or config.max_position_embeddings,
        vocab_size=config.vocab_size,
        max_num_batched_tokens=nodes.max_num_batched_tokens,
        max_num_seqs=nodes.max_num_seqs,
        max_num_queued=nodes.max_num_queued,
        overlap_min_tokens=nodes.overlap_min_tokens,
    )


def _tasks(
    folder: Path, settings: EngineSettings, sizes: DoctorBench, parts: tuple[str, str], max_model_len: int
) -> tuple[GridTask, GridTask]:
    """Of answers and of prompts, as far as the model's context reaches."""
    fields = dataclasses.asdict(dataclasses.replace(settings, model=str(folder), device="cpu"))
    room = max_model_len // 2
    chunks = tuple(each for each in CHUNKS if each <= room)
    before, before_answers = (tuple(each for each in places if each <= room) for places in (CONTEXTS, ANSWER_CONTEXTS))
    return (
        GridTask(fields, parts[1], ANSWERS, batches_of(sizes.running), before_answers, sizes.repeats, NUM_SPREAD),
        GridTask(fields, parts[0], PROMPTS, chunks, before, sizes.repeats, NUM_SPREAD),
    )


async def measure_steps(answers: GridTask, prompts: GridTask, report: Report, *, at_once: bool) -> StepProfile:
    """Measure the steps of both nodes, without overhead. Nodes on the same cores take turns and are no neighbours."""
    together = asyncio.Barrier(2) if at_once else None
    of_prompts, of_answers = await both(
        _grid(prompts, PREFILL_NODE, report, together), _grid(answers, DECODE_NODE, report, together), at_once=at_once
    )
    steps = StepProfile(
        answers=Grid(answers.rows, answers.columns, of_answers.seconds),
        prompts=Grid(prompts.rows, prompts.columns, of_prompts.seconds),
        overhead_s=0.0,
        answers_spread=spread_of(of_answers.factors),
        prompts_spread=spread_of(of_prompts.factors),
    )
    if not at_once:
        return steps
    few_answers, few_prompts = few_of(answers), few_of(prompts)
    answers_alone = await _grid(few_answers, f"{DECODE_NODE}, alone", report)
    prompts_alone = await _grid(few_prompts, f"{PREFILL_NODE}, alone", report)
    return dataclasses.replace(
        steps,
        answers_alone_factor=alone_factor(steps.answers, few_answers, answers_alone),
        prompts_alone_factor=alone_factor(steps.prompts, few_prompts, prompts_alone),
    )


def few_of(task: GridTask) -> GridTask:
    """Every second row of it, with the fewest tokens before them."""
    return dataclasses.replace(task, rows=task.rows[::-2][::-1], columns=task.columns[:1], num_spread=0)


def control_of(outcomes: Sequence[Outcome]) -> ControlProfile:
    """Return the medians of messages and of the way through the door, and how far both spread around them."""
    messages_s = [_phase(each, "prefill_queue_s") / 2 for each in outcomes]
    doors_s = [max(0.0, _door_s(each)) for each in outcomes]
    message_s, door_s = statistics.median(messages_s), statistics.median(doors_s)
    factors = [each_s / message_s for each_s in messages_s if message_s]
    factors += [each_s / door_s for each_s in doors_s if door_s]
    return ControlProfile(message_s, door_s, spread_of(factors))


def spread_of(factors: Sequence[float]) -> Spread:
    """Return the quantiles of these factors; of none, no spread."""
    if not factors:
        return NO_SPREAD
    percentiles = statistics.quantiles(factors, n=100, method="inclusive")
    shares = tuple(percent / 100 for percent in SPREAD_PERCENTS)
    return Spread(shares, tuple(percentiles[percent - 1] for percent in SPREAD_PERCENTS))


def alone_factor(beside: Grid, task: GridTask, alone: GridFigures) -> float:
    """What steps take alone, of what they take beside a busy node: median over those that were measured both ways. Not
    above 1, as noise can make it."""
    places = [(row, column) for row in range(len(task.rows)) for column in range(len(task.columns))]
    shares = [alone.seconds[row][column] / beside.at(task.rows[row], task.columns[column]) for row, column in places]
    return min(1.0, statistics.median(shares))


async def _grid(task: GridTask, name: str, report: Report, together: asyncio.Barrier | None = None) -> GridFigures:
    figures = await figures_of(GRIDS_MODULE, task, name, report, together)
    return GridFigures(tuple(map(tuple, figures["seconds"])), tuple(figures["factors"]))


async def _lone_requests(
    model: LocalModel,
    contender: ClusterContender,
    cpus: Sequence[int],
    flags: Mapping[str, Any],
    node: NodeSizes,
    report: Report,
) -> list[Outcome]:
    prompts = Prompts(node.vocab_size, min(LONE_PROMPT_TOKENS, node.max_model_len // 2))
    planned = [PlannedRequest(index, 0.0, tuple(prompts.draw()), LONE_OUTPUT_TOKENS) for index in range(LONE_REQUESTS)]
    planned += [
        PlannedRequest(LONE_REQUESTS + index, 0.0, tuple(prompts.draw()[:SHORT_PROMPT_TOKENS]), 1)
        for index in range(SHORT_REQUESTS)
    ]
    warm_up = [PlannedRequest(index, 0.0, tuple(prompts.draw()), LONE_OUTPUT_TOKENS) for index in range(2)]
    with tempfile.TemporaryDirectory(prefix="splitserve-doctor-") as logs:
        arena = Arena(model, cpus, flags, Path(logs), report)
        outcomes = await arena.run(
            contender,
            warm_up,
            planned,
            max_concurrency=1,
            request_timeout_s=LONE_TIMEOUT_S,
            on_progress=lambda progress: None,
        )
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise BenchError(f"a request that was alone in a cluster failed: {errors[0]}")
    return outcomes


def _median(outcomes: Sequence[Outcome], seconds_of: Callable[[Outcome], float]) -> float:
    """Not below 0, as noise can make a difference."""
    return max(0.0, statistics.median(map(seconds_of, outcomes)))


def _door_s(outcome: Outcome) -> float:
    return (ttft_s(outcome) or 0.0) - _phase(outcome, "ttft_s")


def _phase(outcome: Outcome, name: str) -> float:
    assert outcome.timeline is not None, "a server of ours tells where the time went"
    return outcome.timeline[name]
