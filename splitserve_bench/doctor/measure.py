"""Measure what nodes on this machine cost, to compare prefill and decode nodes with mixed ones, and to simulate.

For what `splitserve doctor` shows:

1. A prefill node computes prompts and a decode node does steps, at the same time, each in a process on its own cores as
   under `splitserve up`: so the figures include how much they slow each other down by their use of memory.
2. KV of prompts is transferred between two processes, as in `splitserve bench transfer`.
3. One node on the cores of both does prompts and then steps, where there are cores for two.
4. topologies.py simulates what follows.

For the profile that `--save` writes:

1. Steps by what is in them, on both nodes at the same time where there are cores for both: each beside a busy one from
   its first step to its last; and how much equal steps vary.
2. Some of them once more on each node alone: what share of that time they take while the other one is idle.
3. Requests to a cluster, one after the other: what a message, the API server, a transfer and a node's own work around
   a step take is what remains of the requests' timelines when the steps are taken away. Its nodes have the cores of
   those above: it is a prefill and a decode node, or, where there are no cores for both, one mixed node, which has no
   transfers: their latency is then 0.
"""

import asyncio
import dataclasses
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serving_core.errors import SettingsError
from serving_core.layout import KVLayout
from serving_core.model_files.config import FAKE_ARCHITECTURE, read_model_config
from serving_core.node.needs import model_layout, num_blocks_for
from serving_core.process.cpus import allowed_cpus, divide_cpus
from serving_core.settings import EngineSettings
from serving_core.shapes import MIXED
from serving_node.settings import NodeSettings
from splitserve.launch.models import LocalModel, Report
from splitserve_bench.compare.arena import Arena
from splitserve_bench.compare.contenders import SPLIT, ClusterContender, colocated
from splitserve_bench.crew import worker
from splitserve_bench.doctor.costs import NodeCosts, PrefillCost, WholeCost, fit_prefill, fit_transfers
from splitserve_bench.doctor.steps import ANSWERS, GO_ON, MEASURE, PROMPTS, StepFigures, StepTask
from splitserve_bench.doctor.topologies import Topologies, compare_topologies
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import Prompts
from splitserve_bench.serve.metrics import tpot_s, ttft_s
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.simulate.profile import (
    NO_SPREAD,
    ControlProfile,
    Grid,
    NodeSizes,
    Profile,
    Spread,
    StepProfile,
    TransferProfile,
)

PREFILL_NODE, DECODE_NODE, WHOLE_NODE = "prefill node", "decode node", "one node for both"
MODULE: Final = "splitserve_bench.doctor.steps"
TRANSPORT: Final = "zmq-shm"  # as between two nodes of one machine
TRANSFER_TOKENS: Final = (16, 512, 2048)
TRANSFER_REPEATS: Final = 5
STEP_CONTEXTS: Final = (128, 512)  # tokens in each cache before the decode steps
MARGIN_TOKENS: Final = 32  # of a context beyond its tokens: the steps that follow
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


@dataclass(frozen=True, slots=True)
class DoctorBench:
    """What is measured, and for which load and lengths prefill and decode nodes are compared with mixed ones."""

    cores: int  # of a node
    running: int  # answers for each of the two nodes
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The seconds of a prompt of `amount` tokens, a step of `amount` requests, or a transfer of `amount` bytes."""

    amount: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DoctorFigures:
    """Everything that was measured and simulated. `engine` is the engine's description of itself."""

    model: str
    engine: Mapping[str, str]
    cores: int
    at_once: bool  # whether there are cores for both nodes at the same time
    running: int
    prompts: tuple[Measured, ...]
    steps: tuple[Measured, ...]
    transfers: tuple[Measured, ...]
    costs: NodeCosts
    topologies: tuple[Topologies, ...] = ()  # simulated, one for each mix of lengths


async def measure_doctor(
    model: LocalModel, settings: EngineSettings, sizes: DoctorBench, report: Report
) -> DoctorFigures:
    """Measure nodes and transfers of the model one after the other, and return the figures with what follows from them.

    `report` gets progress. Raises BenchError when a process fails, ModelError when the model cannot be loaded, and
    SettingsError when the settings or sizes do not fit the model or the machine.
    """
    layout = _check(model.folder, settings, sizes)
    parts, at_once = node_cpus(allowed_cpus(), sizes.cores)
    prefill, decode = _tasks(model.folder, settings, sizes, parts)
    nodes = await measured({PREFILL_NODE: prefill, DECODE_NODE: decode}, report, at_once=at_once)
    whole = None
    if at_once:
        prefill, decode = _tasks(model.folder, settings, sizes, (",".join(parts),) * 2)
        names = f"{WHOLE_NODE}, prompts", f"{WHOLE_NODE}, answers"
        whole = await measured(dict(zip(names, (prefill, decode), strict=True)), report, at_once=False)
    transfers = await _transfers(layout, report)
    figures = conclude(model.name, sizes, nodes, whole, transfers, layout.token_bytes)
    node, found = node_sizes(model.folder, settings), []
    for prompt_tokens, output_tokens in itertools.product(sizes.prompt_tokens, sizes.output_tokens):
        report(f"simulated requests of {prompt_tokens} + {output_tokens} tokens ...")
        found.append(compare_topologies(node, figures.costs, sizes.running, prompt_tokens, output_tokens))
        await asyncio.sleep(0)  # so that a signal ends it
    return dataclasses.replace(figures, topologies=tuple(found))


async def measured(tasks: Mapping[str, StepTask], report: Report, *, at_once: bool) -> Sequence[StepFigures]:
    """Run each task in a process of its own, called by its name, and return their results in order.

    With `at_once` they run at the same time, and each repeats its last step until all are done, so that each is
    measured beside busy ones; else one after the other. When one fails, the others are stopped. Raises BenchError when
    a process ends or is too slow, and SettingsError with what a node cannot use.
    """
    turns = asyncio.Semaphore(len(tasks) if at_once else 1)
    together = asyncio.Barrier(len(tasks) if at_once else 1)

    async def measure(name: str, task: StepTask) -> StepFigures:
        async with turns, worker(MODULE, json.dumps(dataclasses.asdict(task)), name, report) as node:
            await node.started()
            figures = await node.done(MEASURE)
            await node.begin(GO_ON)
            await together.wait()
            seconds = tuple(map(tuple, figures["seconds"]))
            return StepFigures(seconds, tuple(figures["factors"]), figures["description"])

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(measure(*each)) for each in tasks.items()]
    except* (BenchError, SettingsError) as failures:
        failed: BaseException = failures
        while isinstance(failed, BaseExceptionGroup):
            failed = failed.exceptions[0]
        raise failed from None
    return [each.result() for each in running]


def conclude(
    model: str,
    sizes: DoctorBench,
    nodes: Sequence[StepFigures],
    whole: Sequence[StepFigures] | None,
    transfers: Sequence[Measured],
    token_bytes: int,
) -> DoctorFigures:
    """Return the figures of measurements, of which nothing is simulated.

    `nodes` are the steps of a prefill and of a decode node, `whole` those of one node on the cores of both (None: not
    measured), `transfers` bytes and their seconds. `token_bytes` are the bytes of a token's KV.
    """
    of_prefill, of_decode = nodes
    costs = NodeCosts(
        *_fitted(sizes, nodes),
        fit_transfers([(each.amount, each.seconds) for each in transfers]),
        token_bytes,
        None if whole is None else WholeCost(*_fitted(sizes, whole)),
    )
    return DoctorFigures(
        model=model,
        engine=of_decode.description,
        cores=sizes.cores,
        at_once=whole is not None,
        running=sizes.running,
        prompts=tuple(map(Measured, sizes.prompt_tokens, _first(of_prefill))),
        steps=tuple(map(Measured, batches_of(sizes.running), _first(of_decode))),
        transfers=tuple(transfers),
        costs=costs,
    )


def _first(figures: StepFigures) -> list[float]:
    """Return the seconds of each row at the fewest tokens before it."""
    return [row[0] for row in figures.seconds]


def _fitted(sizes: DoctorBench, nodes: Sequence[StepFigures]) -> tuple[PrefillCost, Grid]:
    of_prefill, of_decode = nodes
    prompts = list(zip(sizes.prompt_tokens, _first(of_prefill), strict=True))
    return fit_prefill(prompts), Grid(batches_of(sizes.running), STEP_CONTEXTS, tuple(of_decode.seconds))


def batches_of(running: int) -> tuple[int, ...]:
    """Return the batch sizes to measure: powers of two up to 2 * `running`, with `running` and 2 * `running`.

    `running` is the number of requests that run on each of two nodes.
    """
    powers = [2**exponent for exponent in range((2 * running).bit_length()) if 2**exponent <= 2 * running]
    return tuple(sorted({*powers, running, 2 * running}))


def node_cpus(cpus: Sequence[int], cores: int) -> tuple[tuple[str, str], bool]:
    """Return the CPUs of two nodes of `cores` cores, in the form of --cpus, and whether they are different CPUs.

    Both have the same ones when there are not enough for two; both are "" when `cpus` is empty: not known. Raises
    SettingsError when there are not enough for one.
    """
    if not cpus:
        return ("", ""), False
    if cores > len(cpus):
        raise SettingsError(f"--cores {cores} is more than the {len(cpus)} CPUs of this process")
    if 2 * cores > len(cpus):
        only = divide_cpus(cpus[:cores], 1)[0]
        return (only, only), False
    first, second = divide_cpus(cpus[: 2 * cores], 2)
    return (first, second), True


def _check(folder: Path, settings: EngineSettings, sizes: DoctorBench) -> KVLayout:
    """Return the model's KV layout.

    Raises SettingsError when the sizes are too large for the model.
    """
    config = read_model_config(folder)
    if config.architecture == FAKE_ARCHITECTURE:
        raise SettingsError("the fake model computes nothing that could be measured")
    most, needed = config.max_position_embeddings, max(*sizes.prompt_tokens, STEP_CONTEXTS[-1] + MARGIN_TOKENS)
    if needed > most:
        raise SettingsError(f"{needed} tokens are more than the model's {most}")
    dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    kv_dtype = dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    return config.kv_layout(settings.block_size, kv_dtype)


def _tasks(
    folder: Path, settings: EngineSettings, sizes: DoctorBench, parts: tuple[str, str]
) -> tuple[StepTask, StepTask]:
    """Return the task of prompts and that of decode steps, on these CPUs."""
    fields = _fields(folder, settings)
    return (
        StepTask(fields, parts[0], PROMPTS, sizes.prompt_tokens, (0,), sizes.repeats),
        StepTask(fields, parts[1], ANSWERS, batches_of(sizes.running), STEP_CONTEXTS, sizes.repeats),
    )


def _fields(folder: Path, settings: EngineSettings) -> dict[str, Any]:
    return dataclasses.asdict(dataclasses.replace(settings, model=str(folder), device="cpu"))


async def _transfers(layout: KVLayout, report: Report) -> list[Measured]:
    from splitserve_bench.transfer.measure import TransferBench, measure_transfer

    report("KV transfers ...")
    measured = await measure_transfer(
        layout, TransferBench((TRANSPORT,), TRANSFER_TOKENS, TRANSFER_REPEATS, is_scattered=False), report
    )
    return [Measured(each.num_bytes, each.commit.fastest_s) for each in measured.transfers]


async def measure_profile(
    model: LocalModel, settings: EngineSettings, sizes: DoctorBench, bytes_per_s: float, report: Report
) -> Profile:
    """Measure nodes of the model, and return their profile for a simulation.

    `bytes_per_s` is the measured rate of transfers. `report` gets progress. Raises BenchError when a process or a
    request fails, ModelError when the model cannot be loaded, and SettingsError when the settings do not fit the
    machine.
    """
    cpus, (parts, at_once) = allowed_cpus(), node_cpus(allowed_cpus(), sizes.cores)
    node = node_sizes(model.folder, settings)
    tasks = _profile_tasks(model.folder, settings, sizes, parts, node.max_model_len)
    steps = await measure_steps(*tasks, report, at_once=at_once)
    report("a cluster, one request after the other ...")
    contender, num_cpus = lone_cluster(sizes.cores, at_once=at_once)
    outcomes = await _lone_requests(model, contender, cpus[:num_cpus], given_flags(settings), node, report)
    long, short = outcomes[:LONE_REQUESTS], outcomes[LONE_REQUESTS:]
    profile = profile_of(model.name, sizes.cores, node, steps, bytes_per_s, long, short)
    return dataclasses.replace(profile, flags=given_flags(settings))


def given_flags(settings: EngineSettings) -> dict[str, Any]:
    """Return by name the flags among NODE_FLAGS whose values differ from the defaults."""
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
    """Return the profile of nodes with these steps, to which these requests were sent one after the other.

    `steps` has no overhead yet. `outcomes` are of requests of one length, `short` of more, short ones, from which the
    times of messages and of the API server follow. While they ran, the other node of the cluster was idle. Times below
    0, which noise can make, become 0.
    """
    num_prompt_tokens = outcomes[0].num_prompt_tokens
    answer_s = steps.answers.at(1, num_prompt_tokens + LONE_OUTPUT_TOKENS / 2) * steps.answers_alone_factor
    overhead_s = _median(outcomes, lambda each: (tpot_s(each) or 0.0) / steps.answers_spread.mean - answer_s)
    chunk_s = steps.prompts.at(num_prompt_tokens, 0) * steps.prompts_alone_factor + overhead_s
    prompt_overhead_s = _median(outcomes, lambda each: _phase(each, "prefill_s") / steps.prompts_spread.mean - chunk_s)
    latency_s = _median(outcomes, lambda each: _phase(each, "kv_transfer_s"))
    return Profile(
        model=model,
        cores=cores,
        node=node,
        steps=dataclasses.replace(steps, overhead_s=overhead_s, prompt_overhead_s=prompt_overhead_s),
        kv_transfer=TransferProfile(latency_s, bytes_per_s),
        control=control_of(short),
    )


def lone_cluster(cores: int, *, at_once: bool) -> tuple[ClusterContender, int]:
    """Return the cluster that requests are sent to one at a time, and how many CPUs it needs in all.

    It has a prefill and a decode node of `cores` cores each, or one mixed node when there are not cores for both
    (`at_once`).
    """
    if at_once:
        return ClusterContender("two nodes", SPLIT, 1, 1, 0), 2 * cores
    return colocated(1, cores), cores


def node_sizes(folder: Path, settings: EngineSettings) -> NodeSizes:
    """Return the sizes of a node that has these settings, and all other flags by default."""
    config, nodes = read_model_config(folder), NodeSettings().resolved(MIXED, "cpu")
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


def _profile_tasks(
    folder: Path, settings: EngineSettings, sizes: DoctorBench, parts: tuple[str, str], max_model_len: int
) -> tuple[StepTask, StepTask]:
    """Return the task of prompts and that of decode steps, with contexts of at most half of the model's."""
    fields = _fields(folder, settings)
    room = max_model_len // 2
    chunks = tuple(each for each in CHUNKS if each <= room)
    before, before_answers = (tuple(each for each in places if each <= room) for places in (CONTEXTS, ANSWER_CONTEXTS))
    return (
        StepTask(fields, parts[0], PROMPTS, chunks, before, sizes.repeats, NUM_SPREAD),
        StepTask(fields, parts[1], ANSWERS, batches_of(sizes.running), before_answers, sizes.repeats, NUM_SPREAD),
    )


async def measure_steps(prompts: StepTask, answers: StepTask, report: Report, *, at_once: bool) -> StepProfile:
    """Run both tasks, and return the seconds of steps without overhead, with their spread.

    With `at_once` the nodes are on different cores: they run beside each other, and some steps once more alone. Nodes
    on the same cores take turns, and a step is taken to cost as much beside another node as alone.
    """
    tasks = {PREFILL_NODE: prompts, DECODE_NODE: answers}
    of_prompts, of_answers = await measured(tasks, report, at_once=at_once)
    steps = StepProfile(
        answers=Grid(answers.rows, answers.columns, of_answers.seconds),
        prompts=Grid(prompts.rows, prompts.columns, of_prompts.seconds),
        overhead_s=0.0,
        answers_spread=spread_of(of_answers.factors),
        prompts_spread=spread_of(of_prompts.factors),
    )
    if not at_once:
        return steps
    few = {f"{name}, alone": few_of(task) for name, task in tasks.items()}
    prompts_alone, answers_alone = await measured(few, report, at_once=False)
    return dataclasses.replace(
        steps,
        answers_alone_factor=alone_factor(steps.answers, few_of(answers), answers_alone),
        prompts_alone_factor=alone_factor(steps.prompts, few_of(prompts), prompts_alone),
    )


def few_of(task: StepTask) -> StepTask:
    """Return a smaller task: every second row, the last among them, with the fewest tokens before it, and no spread."""
    return dataclasses.replace(task, rows=task.rows[::-2][::-1], columns=task.columns[:1], num_spread=0)


def control_of(outcomes: Sequence[Outcome]) -> ControlProfile:
    """Return the median seconds of messages and of the way through the API server, and how much both vary around them.

    `outcomes` are of requests that were sent one after the other.
    """
    messages_s = [_phase(each, "prefill_queue_s") / 2 for each in outcomes]
    api_servers_s = [max(0.0, _api_server_s(each)) for each in outcomes]
    message_s, api_server_s = statistics.median(messages_s), statistics.median(api_servers_s)
    factors = [each_s / message_s for each_s in messages_s if message_s]
    factors += [each_s / api_server_s for each_s in api_servers_s if api_server_s]
    return ControlProfile(message_s, api_server_s, spread_of(factors))


def spread_of(factors: Sequence[float]) -> Spread:
    """Return the quantiles of these factors, SPREAD_PERCENTS; without factors, those of no variation."""
    if not factors:
        return NO_SPREAD
    percentiles = statistics.quantiles(factors, n=100, method="inclusive")
    shares = tuple(percent / 100 for percent in SPREAD_PERCENTS)
    return Spread(shares, tuple(percentiles[percent - 1] for percent in SPREAD_PERCENTS))


def alone_factor(beside: Grid, task: StepTask, alone: StepFigures) -> float:
    """Return the time of steps alone divided by that beside a busy node: the median over `task`, at most 1.

    `beside` are seconds of steps beside a busy node, `alone` those of the steps of `task` alone.
    """
    places = [(row, column) for row in range(len(task.rows)) for column in range(len(task.columns))]
    shares = [alone.seconds[row][column] / beside.at(task.rows[row], task.columns[column]) for row, column in places]
    return min(1.0, statistics.median(shares))


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
    """Return the median of what `seconds_of` says of each outcome, or 0 when noise makes it less."""
    return max(0.0, statistics.median(map(seconds_of, outcomes)))


def _api_server_s(outcome: Outcome) -> float:
    return (ttft_s(outcome) or 0.0) - _phase(outcome, "ttft_s")


def _phase(outcome: Outcome, name: str) -> float:
    assert outcome.timeline is not None, "a server of ours tells where the time went"
    return outcome.timeline[name]
