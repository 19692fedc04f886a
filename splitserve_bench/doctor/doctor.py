"""What two nodes on this machine cost, and from which lengths on a prefill and a decode node beat two that do both.

1. A prefill node computes prompts and a decode node does steps, at the same time, each in a process on its own cores as
   under `splitserve up`: what they take from each other of the memory is in the figures.
2. The corridor moves the KV of prompts between two processes, as in `splitserve bench transfer`.
3. One node on the cores of both does prompts and then steps, where there are cores for two.
4. split_model.py says what follows.
"""

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serving_core.cpus import divide_cpus
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout
from serving_core.model_config import FAKE_ARCHITECTURE, read_model_config
from serving_core.settings import EngineSettings
from splitserve.launch.models import LocalModel, Report
from splitserve_bench.doctor.node import LONG_CONTEXT_TOKENS, SHORT_CONTEXT_TOKENS, NodeFigures, NodeTask
from splitserve_bench.doctor.processes import both, figures_of
from splitserve_bench.doctor.split_model import (
    Comparison,
    DecodeCost,
    NodeCosts,
    PrefillCost,
    WholeCost,
    compare,
    fit_corridor,
    fit_decode,
    fit_prefill,
    pays_between,
    prompt_tokens_per_output_token,
    smoother_from,
)

PREFILL_NODE, DECODE_NODE, WHOLE_NODE = "prefill node", "decode node", "one node for both"
TRANSPORT: Final = "zmq-shm"  # as between two nodes of one machine
TRANSFER_TOKENS: Final = (16, 512, 2048)
TRANSFER_REPEATS: Final = 5
NODE_MODULE: Final = "splitserve_bench.doctor.node"
MARGIN_TOKENS: Final = 32  # of a context beyond its tokens: the steps that follow

Pair = tuple[NodeFigures, NodeFigures]  # of prompts, and of decode steps


@dataclass(frozen=True, slots=True)
class DoctorBench:
    """What is measured, and for which load and lengths the two ways are compared."""

    cores: int  # of a node
    running: int  # answers for each of the two nodes
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class PaysBetween:
    """The prompt lengths at which the split pays for one output length, None at both ends when at none; and from which
    on it takes less time between tokens, however many requests it serves."""

    output_tokens: int
    least_prompt_tokens: int | None
    most_prompt_tokens: int | None
    smoother_from_tokens: int | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Something of so many tokens, requests or bytes, and the seconds that it takes."""

    amount: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DoctorFigures:
    """Everything that was found. The engine describes itself; the corridor's amounts are bytes."""

    model: str
    engine: dict[str, str]
    cores: int
    at_once: bool  # whether there are cores for both nodes at the same time
    running: int
    prompts: tuple[Measured, ...]
    steps: tuple[Measured, ...]
    transfers: tuple[Measured, ...]
    costs: NodeCosts
    balanced_prompt_tokens: int  # the prompt whose tokens are weighed against those of answers
    balance: float  # tokens of such a prompt that take as long as one output token
    comparisons: tuple[Comparison, ...]
    most_prompt_tokens: int  # that the ranges go to: those that the model takes
    pays: tuple[PaysBetween, ...]


async def measure_doctor(
    model: LocalModel, settings: EngineSettings, sizes: DoctorBench, report: Report
) -> DoctorFigures:
    """Starts the nodes and the corridor's ends one after the other. Raises BenchError, ModelError, and SettingsError
    when the model or the sizes cannot be used."""
    layout, most_tokens = _check(model.folder, settings, sizes)
    parts, at_once = node_cpus(all_cpus(), sizes.cores)
    prefill, decode = _tasks(model.folder, settings, sizes, parts)
    together = asyncio.Barrier(2) if at_once else None  # each beside a busy one until both are measured
    of_prefill = _node(prefill, PREFILL_NODE, report, together)
    of_decode = _node(decode, DECODE_NODE, report, together)
    nodes = await both(of_prefill, of_decode, at_once=at_once)
    whole = None
    if at_once:
        tasks = _tasks(model.folder, settings, sizes, (",".join(parts),) * 2)
        whole = await both(*(_node(each, WHOLE_NODE, report, None) for each in tasks), at_once=False)
    transfers = await _transfers(layout, report)
    return conclude(model.name, sizes, nodes, whole, transfers, layout.token_bytes, most_tokens)


def conclude(
    model: str,
    sizes: DoctorBench,
    nodes: Pair,
    whole: Pair | None,
    transfers: Sequence[Measured],
    token_bytes: int,
    most_tokens: int,
) -> DoctorFigures:
    """What follows from the figures of a prefill and a decode node, of one node in their place where there are cores
    for both at once, and from transfers, of a model that takes so many tokens."""
    of_prefill, of_decode = nodes
    costs = NodeCosts(
        *_fitted(sizes, nodes),
        fit_corridor([(each.amount, each.seconds) for each in transfers]),
        token_bytes,
        None if whole is None else WholeCost(*_fitted(sizes, whole)),
    )
    usual = sizes.prompt_tokens[len(sizes.prompt_tokens) // 2]
    lengths = [(prompt, output) for prompt in sizes.prompt_tokens for output in sizes.output_tokens]
    return DoctorFigures(
        model=model,
        engine=of_decode.description,
        cores=sizes.cores,
        at_once=whole is not None,
        running=sizes.running,
        prompts=tuple(map(Measured, sizes.prompt_tokens, of_prefill.prompts_s)),
        steps=tuple(map(Measured, batches_of(sizes.running), of_decode.steps_s)),
        transfers=tuple(transfers),
        costs=costs,
        balanced_prompt_tokens=usual,
        balance=prompt_tokens_per_output_token(costs, sizes.running, usual),
        comparisons=tuple(compare(costs, sizes.running, *each) for each in lengths),
        most_prompt_tokens=most_tokens,
        pays=tuple(_pays(costs, sizes.running, output, most_tokens) for output in sizes.output_tokens),
    )


def _fitted(sizes: DoctorBench, nodes: Pair) -> tuple[PrefillCost, DecodeCost]:
    of_prefill, of_decode = nodes
    longer = (of_decode.long_batch, LONG_CONTEXT_TOKENS, of_decode.long_step_s)
    steps = list(zip(batches_of(sizes.running), of_decode.steps_s, strict=True))
    prompts = list(zip(sizes.prompt_tokens, of_prefill.prompts_s, strict=True))
    return fit_prefill(prompts), fit_decode(steps, SHORT_CONTEXT_TOKENS, longer)


def _pays(costs: NodeCosts, running: int, output_tokens: int, most_tokens: int) -> PaysBetween:
    least, most = pays_between(costs, running, output_tokens, most_tokens) or (None, None)
    return PaysBetween(output_tokens, least, most, smoother_from(costs, running, output_tokens, most_tokens))


def batches_of(running: int) -> tuple[int, ...]:
    """The batches to measure: up to the running answers of two nodes, by powers of two, and these themselves."""
    powers = [2**exponent for exponent in range((2 * running).bit_length()) if 2**exponent <= 2 * running]
    return tuple(sorted({*powers, running, 2 * running}))


def node_cpus(cpus: Sequence[int], cores: int) -> tuple[tuple[str, str], bool]:
    """The CPUs of two nodes, and whether they are different ones; the same ones where there are not enough for both.
    Raises SettingsError when there are not enough for one. CPUs that are not known stay unpinned."""
    if not cpus:
        return ("", ""), False
    if cores > len(cpus):
        raise SettingsError(f"--cores {cores} is more than the {len(cpus)} CPUs of this process")
    if 2 * cores > len(cpus):
        only = divide_cpus(cpus[:cores], 1)[0]
        return (only, only), False
    first, second = divide_cpus(cpus[: 2 * cores], 2)
    return (first, second), True


def all_cpus() -> list[int]:
    """That this process may use; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _check(folder: Path, settings: EngineSettings, sizes: DoctorBench) -> tuple[KVLayout, int]:
    """The layout of the KV, and how many tokens the model takes."""
    config = read_model_config(folder)
    if config.architecture == FAKE_ARCHITECTURE:
        raise SettingsError("the fake model computes nothing that could be measured")
    most, needed = config.max_position_embeddings, max(*sizes.prompt_tokens, LONG_CONTEXT_TOKENS + MARGIN_TOKENS)
    if needed > most:
        raise SettingsError(f"{needed} tokens are more than the model's {most}")
    dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    kv_dtype = dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    return config.kv_layout(settings.block_size, kv_dtype), most


def _tasks(
    folder: Path, settings: EngineSettings, sizes: DoctorBench, parts: tuple[str, str]
) -> tuple[NodeTask, NodeTask]:
    fields = dataclasses.asdict(dataclasses.replace(settings, model=str(folder), device="cpu"))
    prefill = NodeTask(fields, parts[0], sizes.prompt_tokens, (), sizes.repeats)
    return prefill, NodeTask(fields, parts[1], (), batches_of(sizes.running), sizes.repeats)


async def _node(task: NodeTask, name: str, report: Report, together: asyncio.Barrier | None) -> NodeFigures:
    figures = await figures_of(NODE_MODULE, task, name, report, together)
    figures["prompts_s"], figures["steps_s"] = tuple(figures["prompts_s"]), tuple(figures["steps_s"])
    return NodeFigures(**figures)


async def _transfers(layout: KVLayout, report: Report) -> list[Measured]:
    from splitserve_bench.transfer.measure import (  # imports torch, which help can do without
        TransferBench,
        measure_transfer,
    )

    report("corridor ...")
    measured = await measure_transfer(
        layout, TransferBench((TRANSPORT,), TRANSFER_TOKENS, TRANSFER_REPEATS, is_scattered=False), report
    )
    return [Measured(each.num_bytes, each.commit.fastest_s) for each in measured.transfers]
