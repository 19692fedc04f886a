"""What the engine itself reaches on this machine: in this process, without a cluster.

1. Start: from the start of this process to an engine that has done its first steps.
2. Prefill: prompts one after the other, in chunks, as the scripts for other engines do it.
3. Decode: greedy steps of a batch, each over the KV of a whole context that was computed before.
4. The machine: the GEMM rate and the read bandwidth that torch reaches with as many threads, before and after the rest.
   What prefill and decode cost (see costs.py) is divided by them.
5. A profile of one decode step and one prompt by part, of our own decoders.
6. What a node does between two decode steps.
7. Choosing tokens: what a step takes for it, greedy and sampled.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from engine.engine import Engine
from engine.model.llama import LlamaDecoder
from serving_core.errors import SettingsError
from serving_core.model_config import FAKE_ARCHITECTURE, TRANSFORMERS, read_model_config
from serving_core.settings import EngineSettings
from splitserve.launch.models import Report
from splitserve_bench.engine.choosing import measure_choosing
from splitserve_bench.engine.costs import decode_flops, decode_kv_bytes, prompt_flops
from splitserve_bench.engine.driver import NUM_STEPS, DecodeRun, PromptRun, most_tokens, num_blocks_for
from splitserve_bench.engine.figures import (
    DecodeFigures,
    EngineBench,
    EngineFigures,
    LoopFigures,
    MachineFigures,
    PartFigures,
    PrefillFigures,
    ProfileFigures,
    PromptSize,
    StartFigures,
    StructuredFigures,
)
from splitserve_bench.engine.machine import better_of, measure_machine
from splitserve_bench.engine.node_loop import measure_loop
from splitserve_bench.engine.offload import measure_offload
from splitserve_bench.engine.peers import DECODE, LOAD, PREFILL, PeerResult, decode_key
from splitserve_bench.engine.stopwatch import PARTS, watching
from splitserve_bench.engine.structured import measure_structured
from splitserve_bench.engine.weight_bytes import read_weight_bytes

PROFILED_BATCH: Final = 16
BY_TRANSFORMERS: Final = "--model-impl transformers"


@dataclasses.dataclass(frozen=True, slots=True)
class _Decode:
    """A batch at a context, and the seconds of a step in each repeat."""

    batch: int
    context_tokens: int
    steps_s: list[float]


@dataclasses.dataclass(frozen=True, slots=True)
class _Steps:
    """Steps to profile: run_s makes num_steps of them after prepare, and gives their mean seconds."""

    name: str
    num_steps: int
    prepare: Callable[[], None]
    run_s: Callable[[], float]


def measure_engine(
    folder: Path, settings: EngineSettings, sizes: EngineBench, num_threads: int, imports_s: float, report: Report
) -> EngineFigures:
    """Loads the model of the folder and measures it with so many threads, 0 for as many as torch takes by itself.

    `settings` says how to load it; the model and the size of the pool are put in. `imports_s` is the age of the process
    when it had imported this. Raises ModelError or SettingsError when the model or the sizes cannot be used.
    """
    config = read_model_config(folder)
    if config.architecture == FAKE_ARCHITECTURE:
        raise SettingsError("the fake model computes nothing that could be measured")
    if most_tokens(sizes) > config.max_position_embeddings:
        raise SettingsError(f"{most_tokens(sizes)} tokens are more than the model's {config.max_position_embeddings}")
    num_blocks = num_blocks_for(sizes, config.kv_layout(settings.block_size, config.dtype))
    settings = dataclasses.replace(settings, model=str(folder), num_kv_blocks=num_blocks)
    with threads(num_threads):
        report(f"loading {folder.name} ...")
        engine, start = _start(settings, imports_s)
        dtype: torch.dtype = getattr(torch, engine.description["dtype"])
        report("GEMM rate and memory bandwidth of this machine ...")
        before = measure_machine(engine.pool.device, dtype)
        prefill_s = {size: _prefill_s(engine, size, sizes, report) for size in sizes.prompts}
        run = DecodeRun(engine, max(sizes.batches), max(sizes.contexts), sizes.step_tokens)
        decode = _decode(engine, run, sizes, report)
        is_ours = _is_ours(engine)
        profiles = [_profile_decode(engine, run, sizes, report)] if is_ours else []
        structured = _structured(engine, run, sizes, report) if sizes.structured else None
        offload = measure_offload(engine, run, sizes.repeats)
        loop = _loop(engine, sizes, report)
        report("choosing tokens ...")
        choosing = measure_choosing(engine, _profiled_batch(sizes), sizes.repeats)
        profiles += [_profile_prompt(engine, sizes, report)] if is_ours else []
        report("GEMM rate and memory bandwidth once more ...")
        machine = better_of(before, measure_machine(engine.pool.device, dtype))
    return EngineFigures(
        model=folder.name,
        engine=engine.description,
        weight_bytes=engine.weight_bytes,
        start=start,
        machine=machine,
        prefill=tuple(_prefill_figures(engine, machine, size, prefill_s[size]) for size in sizes.prompts),
        decode=tuple(_decode_figures(engine, machine, each) for each in decode),
        profiles=tuple(profiles),
        loop=loop,
        choosing=choosing,
        step_tokens=sizes.step_tokens,
        shares_steps=sizes.shares_steps,
        structured=structured,
        offload=offload,
    )


def measure_transformers(
    folder: Path, settings: EngineSettings, sizes: EngineBench, num_threads: int, report: Report
) -> PeerResult:
    """Load, prefill and decode as `measure_engine` has them, with transformers' modelling code. Raises ModelError or
    SettingsError when it does not compute the model with such settings."""
    config = read_model_config(folder, TRANSFORMERS)
    num_blocks = num_blocks_for(sizes, config.kv_layout(settings.block_size, config.dtype))
    settings = dataclasses.replace(settings, model=str(folder), num_kv_blocks=num_blocks, model_impl=TRANSFORMERS)
    with threads(num_threads):
        engine, start = _start(settings, 0.0)
        theirs = {(LOAD, ""): start.load_s + start.warm_up_s}
        for size in sizes.prompts:
            median_s = statistics.median(_prefill_s(engine, size, sizes, report))
            theirs[PREFILL, str(size)] = size.count * size.num_tokens / median_s
        run = DecodeRun(engine, max(sizes.batches), max(sizes.contexts), sizes.step_tokens)
        for each in _decode(engine, run, sizes, report):
            theirs[DECODE, decode_key(each.batch, each.context_tokens)] = statistics.median(each.steps_s) * 1e3
    return PeerResult(BY_TRANSFORMERS, theirs)


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """torch computes with so many, 0 for as many as it takes by itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _start(settings: EngineSettings, imports_s: float) -> tuple[Engine, StartFigures]:
    begin_s = time.perf_counter()
    engine = Engine(settings)
    loaded_s = time.perf_counter()
    engine.warm_up()
    warm_s = time.perf_counter()
    ready_s = imports_s + warm_s - begin_s
    return engine, StartFigures(imports_s, loaded_s - begin_s, warm_s - loaded_s, ready_s)


def _is_ours(engine: Engine) -> bool:
    """Whether our own decoder computes, and not transformers' code, of whose work and parts nothing is known."""
    return isinstance(engine.model, LlamaDecoder)


def _prefill_s(engine: Engine, size: PromptSize, sizes: EngineBench, report: Report) -> list[float]:
    """Seconds of each repeat."""
    report(f"prefill of {size.count} prompts of {size.num_tokens} tokens ...")
    first = size if sizes.shares_steps else dataclasses.replace(size, count=1)
    PromptRun(engine, first, sizes.step_tokens, shares_steps=sizes.shares_steps).run_s()  # the first of its shapes
    prompts = PromptRun(engine, size, sizes.step_tokens, shares_steps=sizes.shares_steps)
    return [prompts.run_s() for _ in range(sizes.repeats)]


def _decode(engine: Engine, run: DecodeRun, sizes: EngineBench, report: Report) -> list[_Decode]:
    """All batches at all contexts."""
    measured = []
    for context_tokens in sizes.contexts:
        report(f"computing {max(sizes.batches)} contexts of {context_tokens} tokens ...")
        run.extend(context_tokens)
        for batch in sizes.batches:
            report(f"decode steps of {batch} requests at {context_tokens} tokens ...")
            run.rewind(batch)
            run.run_s(batch, 1)  # the first of its shapes
            samples_s = []
            for _ in range(sizes.repeats):
                run.rewind(batch)
                samples_s.append(run.run_s(batch))
            measured.append(_Decode(batch, context_tokens, samples_s))
    return measured


def _profile_decode(engine: Engine, run: DecodeRun, sizes: EngineBench, report: Report) -> ProfileFigures:
    """Of one batch at the longest context."""
    batch = _profiled_batch(sizes)
    name = f"a decode step of {batch} requests at {max(sizes.contexts)} tokens"
    report(f"profile of {name} ...")
    steps = _Steps(name, NUM_STEPS, lambda: run.rewind(batch), lambda: run.run_s(batch))
    return _profile(engine, steps, sizes.repeats)


def _structured(engine: Engine, run: DecodeRun, sizes: EngineBench, report: Report) -> StructuredFigures:
    """What grammars cost the batch that is profiled."""
    batch = _profiled_batch(sizes)
    report(f"decode steps of {batch} requests with grammars ...")
    return measure_structured(engine, run, batch, sizes.repeats)


def _profiled_batch(sizes: EngineBench) -> int:
    return max((each for each in sizes.batches if each <= PROFILED_BATCH), default=min(sizes.batches))


def _loop(engine: Engine, sizes: EngineBench, report: Report) -> tuple[LoopFigures, ...]:
    """Of all batches at the shortest context."""
    context_tokens = min(sizes.contexts)
    figures = []
    for batch in sizes.batches:
        report(f"a node's loop with {batch} answers at {context_tokens} tokens ...")
        figures.append(measure_loop(engine, batch, context_tokens, sizes.repeats))
    return tuple(figures)


def _profile_prompt(engine: Engine, sizes: EngineBench, report: Report) -> ProfileFigures:
    num_tokens = min(sizes.step_tokens, max(each.num_tokens for each in sizes.prompts))
    prompt = PromptRun(engine, PromptSize(1, num_tokens), sizes.step_tokens)
    name = f"a prompt of {num_tokens} tokens in one chunk"
    report(f"profile of {name} ...")
    return _profile(engine, _Steps(name, 1, lambda: None, prompt.run_s), sizes.repeats)


def _profile(engine: Engine, steps: _Steps, repeats: int) -> ProfileFigures:
    """Of the fastest repeat: what others on the machine disturb most is not the engine's."""
    plain_s, stopwatches = [], []
    for _ in range(repeats):
        steps.prepare()
        plain_s.append(steps.run_s())
        steps.prepare()
        with watching(engine) as stopwatch:
            steps.run_s()
        stopwatches.append(stopwatch)
    fastest = min(stopwatches, key=lambda each: each.total_s)
    parts = [
        PartFigures(
            name=part,
            num_calls=fastest.num_calls[part] / steps.num_steps,
            own_s=fastest.own_s[part] / steps.num_steps,
            share=fastest.own_s[part] / fastest.total_s,
        )
        for part in PARTS
    ]
    return ProfileFigures(steps.name, fastest.total_s / steps.num_steps, min(plain_s), tuple(parts))


def _prefill_figures(
    engine: Engine, machine: MachineFigures, size: PromptSize, samples_s: list[float]
) -> PrefillFigures:
    flops = size.count * prompt_flops(engine.config, size.num_tokens) if _is_ours(engine) else None
    num_tokens, median_s = size.count * size.num_tokens, statistics.median(samples_s)
    return PrefillFigures(
        prompts=size,
        tokens_per_s=num_tokens / median_s,
        best_tokens_per_s=num_tokens / min(samples_s),
        flops=flops,
        gemm_share=None if flops is None else flops / median_s / machine.gemm_flops_per_s,
    )


def _decode_figures(engine: Engine, machine: MachineFigures, measured: _Decode) -> DecodeFigures:
    # A step's token sees itself too: context + 1 in the first step, context + NUM_STEPS in the last.
    contexts = [measured.context_tokens + (1 + NUM_STEPS) / 2] * measured.batch
    is_ours = _is_ours(engine)
    weight_bytes = read_weight_bytes(engine, measured.batch) if is_ours else None
    kv_bytes = decode_kv_bytes(engine.config, engine.layout, contexts)
    flops = decode_flops(engine.config, contexts) if is_ours else None
    median_s = statistics.median(measured.steps_s)
    return DecodeFigures(
        batch=measured.batch,
        context_tokens=measured.context_tokens,
        step_s=median_s,
        best_step_s=min(measured.steps_s),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        flops=flops,
        bandwidth_share=None
        if weight_bytes is None
        else (weight_bytes + kv_bytes) / median_s / machine.read_bytes_per_s,
        gemm_share=None if flops is None else flops / median_s / machine.gemm_flops_per_s,
    )
