"""Measure the speed of an engine in this process, without a cluster.

1. Start: from the start of this process to an engine that has done its first steps.
2. Prefill: prompts together, in steps as full as can be, as in nodes.
3. Decode: greedy steps of a batch, each over the KV of a whole context that was computed before.
4. The machine: the rates of products and of reading memory that torch reaches with as many threads, before and after
   the rest. The costs of prefill and decode (costs.py) are divided by them.
5. Sampling the tokens of a step.
6. Weights that are not in the memory where they are computed with: what decode steps read of them.
"""

import dataclasses
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from engine.engine import Engine
from engine.model.experts import MixtureOfExperts
from engine.model.llama import LlamaDecoder
from engine.ops.backends import choose_ops
from engine.sampler import sample
from serving_core.errors import SettingsError
from serving_core.model_files.config import read_model_config
from serving_core.requests import Request, SamplingParams
from serving_core.settings import EngineSettings
from splitserve.launch.models import Report
from splitserve_bench.engine.costs import decode_flops, decode_kv_bytes, prompt_flops
from splitserve_bench.engine.driver import (
    NUM_STEPS,
    DecodeRun,
    PromptRun,
    load_engine,
    most_tokens,
    num_blocks_for,
    threads,
)
from splitserve_bench.engine.machine import MachineFigures, better_of, measure_machine
from splitserve_bench.engine.sizes import EngineBench, PromptSize

SAMPLED_CONTEXT_TOKENS: Final = 512  # of each request, half of it output: for the penalties
LOGITS_DEVIATION: Final = 3.0  # most of the mass is then with some thousand tokens
SAMPLING_CALLS: Final = 4  # in a row
SAMPLING: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.2, top_p 0.9": {"temperature": 0.2, "top_p": 0.9},
    "temperature 1, top_p 0.9": {"top_p": 0.9},
    "temperature 0.7, top_p 0.8, top_k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "temperature 1, min_p 0.05": {"min_p": 0.05},
    "greedy, all penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.05,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
    },
    "temperature 1, logprobs 5": {"logprobs": 5},
}


@dataclass(frozen=True, slots=True)
class StartFigures:
    """Seconds from the process's start to the imported engine, from there to the loaded one, and of its first steps.

    The time to find or write the model's folder does not count.
    """

    imports_s: float
    load_s: float
    warm_up_s: float
    ready_s: float  # all three


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """Prompts of one length: the rate of the median repeat and of the fastest.

    Operations are known only of models that our own decoder runs, else None.
    """

    prompts: PromptSize
    tokens_per_s: float
    best_tokens_per_s: float
    flops: int | None  # of all prompts
    gemm_share: float | None  # of the median, of the machine's rate of products


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """One decode step of a batch: the mean of NUM_STEPS steps in a row, its median over the repeats and its least.

    Bytes and operations are those of the mean step. All but the KV bytes are known only of models that our own decoder
    runs, else None. Shares are of the machine's rates.
    """

    batch: int
    context_tokens: int  # in the cache before the first of the steps
    step_s: float
    best_step_s: float
    weight_bytes: int | None
    kv_bytes: float
    flops: float | None
    bandwidth_share: float | None
    gemm_share: float | None


@dataclass(frozen=True, slots=True)
class SamplingFigures:
    """The median seconds to sample the tokens of one step from its logits, with these sampling parameters."""

    parameters: str
    batch: int
    vocab_size: int
    step_s: float


@dataclass(frozen=True, slots=True)
class OffloadFigures:
    """Layers whose weights are on disk or in host memory: what decode steps of one request read of them.

    `alone_bytes_per_s` is the rate of reading while nothing computes.
    """

    where: str
    num_layers: int
    num_bytes: int
    step_bytes: float
    step_s: float  # the median of the repeats
    bytes_per_s: float
    alone_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """All figures of one engine on this machine.

    `model` is the name of its folder, `engine` the engine's description of itself.
    """

    model: str
    engine: dict[str, str]
    weight_bytes: int
    sizes: EngineBench
    start: StartFigures
    machine: MachineFigures
    prefill: tuple[PrefillFigures, ...]
    decode: tuple[DecodeFigures, ...]
    sampling: tuple[SamplingFigures, ...]
    offload: OffloadFigures | None


def measure_engine(
    folder: Path, settings: EngineSettings, sizes: EngineBench, num_threads: int, imports_s: float, report: Report
) -> EngineFigures:
    """Load the model of the folder and measure it with `num_threads` threads, 0 for torch's own number.

    `imports_s` is how old the process was in seconds when it had imported this module; `report` gets progress. Raises
    ModelError when the model cannot be loaded, and SettingsError when the settings or sizes do not fit it.
    """
    config = read_model_config(folder, settings.model_impl)
    if most_tokens(sizes) > config.max_position_embeddings:
        raise SettingsError(f"{most_tokens(sizes)} tokens are more than the model's {config.max_position_embeddings}")
    num_blocks = num_blocks_for(sizes, config.kv_layout(settings.block_size, config.dtype))
    with threads(num_threads):
        report(f"loading {folder.name} ...")
        begin_s = time.perf_counter()
        engine = load_engine(folder, settings, num_blocks)
        loaded_s = time.perf_counter()
        engine.warm_up()
        warm_up_s = time.perf_counter() - loaded_s
        load_s = loaded_s - begin_s
        measured = _Measured(engine, sizes, report)
        before = measured.machine()
        prefill_s = [measured.prefill_s(size) for size in sizes.prompts]
        run = DecodeRun(engine, max(sizes.batches), max(sizes.contexts), sizes.step_tokens)
        decode_s = measured.decode_s(run)
        offload = measured.offload(run)
        sampling = measured.sampling()
        machine = better_of(before, measured.machine())
    return EngineFigures(
        model=folder.name,
        engine=engine.description,
        weight_bytes=engine.weight_bytes,
        sizes=sizes,
        start=StartFigures(imports_s, load_s, warm_up_s, imports_s + load_s + warm_up_s),
        machine=machine,
        prefill=tuple(map(measured.prefill_figures, [machine] * len(prefill_s), sizes.prompts, prefill_s)),
        decode=tuple(measured.decode_figures(machine, *key, steps_s) for key, steps_s in decode_s.items()),
        sampling=sampling,
        offload=offload,
    )


class _Measured:
    """Measure one engine in these sizes."""

    def __init__(self, engine: Engine, sizes: EngineBench, report: Report) -> None:
        self._engine, self._sizes, self._report = engine, sizes, report
        self._is_ours = isinstance(engine.model, LlamaDecoder)  # else nothing is known of what transformers' code does

    def machine(self) -> MachineFigures:
        self._report("rates of products and of reading memory ...")
        return measure_machine(self._engine.pool.device, getattr(torch, self._engine.description["dtype"]))

    def prefill_s(self, size: PromptSize) -> list[float]:
        """Compute these prompts `repeats` times, and return the seconds of each time."""
        self._report(f"prefill of {size.count} prompts of {size.num_tokens} tokens ...")
        prompts = PromptRun(self._engine, size, self._sizes.step_tokens)
        prompts.run_s()  # the first of its shapes
        return [prompts.run_s() for _ in range(self._sizes.repeats)]

    def decode_s(self, run: DecodeRun) -> dict[tuple[int, int], list[float]]:
        """Return by batch and context the mean seconds of a decode step in each repeat."""
        sizes, measured = self._sizes, {}
        for context_tokens in sizes.contexts:
            self._report(f"computing {max(sizes.batches)} contexts of {context_tokens} tokens ...")
            run.extend(context_tokens)
            for batch in sizes.batches:
                self._report(f"decode steps of {batch} requests at {context_tokens} tokens ...")
                run.rewind(batch)
                run.run_s(batch, 1)  # the first of its shapes
                samples_s = []
                for _ in range(sizes.repeats):
                    run.rewind(batch)
                    samples_s.append(run.run_s(batch))
                measured[batch, context_tokens] = samples_s
        return measured

    @torch.inference_mode()
    def sampling(self) -> tuple[SamplingFigures, ...]:
        """Sample from random logits with each of SAMPLING's parameters, in the model's vocabulary and on its device."""
        self._report("sampling ...")
        engine, vocab_size, batch = self._engine, self._engine.config.vocab_size, max(self._sizes.batches)
        random = torch.randn(batch, vocab_size, generator=torch.Generator().manual_seed(0)) * LOGITS_DEVIATION
        logits, ops = random.to(engine.pool.device, engine.pool.compute_dtype), choose_ops(engine.pool.device)
        figures = []
        for parameters, fields in SAMPLING.items():
            requests = [_sampled_request(index, vocab_size, fields) for index in range(batch)]
            samples_s = []
            for _ in range(1 + self._sizes.repeats):
                start_s = time.perf_counter()
                for _ in range(SAMPLING_CALLS):
                    sample(logits, requests, engine.eos_token_ids, ops)
                samples_s.append((time.perf_counter() - start_s) / SAMPLING_CALLS)
            figures.append(SamplingFigures(parameters, batch, vocab_size, statistics.median(samples_s[1:])))
        return tuple(figures)

    def offload(self, run: DecodeRun) -> OffloadFigures | None:
        """Measure decode steps of one request; None when all weights are in the memory where they are computed with."""
        offloaded = self._engine.model.offloaded if isinstance(self._engine.model, LlamaDecoder) else None
        if offloaded is None:
            return None
        steps_s, num_bytes = [], 0
        for _ in range(self._sizes.repeats):
            run.rewind(1)
            before = offloaded.num_read_bytes
            steps_s.append(run.run_s(1))
            num_bytes += offloaded.num_read_bytes - before
        step_bytes, step_s = num_bytes / self._sizes.repeats / NUM_STEPS, statistics.median(steps_s)
        alone_bytes, alone_s = offloaded.read_alone()
        sizes, alone = offloaded.layer_bytes.values(), alone_bytes / alone_s
        return OffloadFigures(offloaded.where, len(sizes), sum(sizes), step_bytes, step_s, step_bytes / step_s, alone)

    def prefill_figures(self, machine: MachineFigures, size: PromptSize, samples_s: list[float]) -> PrefillFigures:
        flops = size.count * prompt_flops(self._engine.config, size.num_tokens) if self._is_ours else None
        num_tokens, median_s = size.count * size.num_tokens, statistics.median(samples_s)
        share = None if flops is None else flops / median_s / machine.gemm_flops_per_s
        return PrefillFigures(size, num_tokens / median_s, num_tokens / min(samples_s), flops, share)

    def decode_figures(
        self, machine: MachineFigures, batch: int, context_tokens: int, samples_s: list[float]
    ) -> DecodeFigures:
        # A step's token sees itself too: context + 1 in the first step, context + NUM_STEPS in the last.
        contexts = [context_tokens + (1 + NUM_STEPS) / 2] * batch
        kv_bytes = decode_kv_bytes(self._engine.config, self._engine.layout, contexts)
        figures = DecodeFigures(
            batch, context_tokens, statistics.median(samples_s), min(samples_s), None, kv_bytes, None, None, None
        )
        if not self._is_ours:
            return figures
        weight_bytes, flops = read_weight_bytes(self._engine, batch), decode_flops(self._engine.config, contexts)
        return dataclasses.replace(
            figures,
            weight_bytes=weight_bytes,
            flops=flops,
            bandwidth_share=(weight_bytes + kv_bytes) / figures.step_s / machine.read_bytes_per_s,
            gemm_share=flops / figures.step_s / machine.gemm_flops_per_s,
        )


def read_weight_bytes(engine: Engine, num_tokens: int) -> int:
    """Return the bytes of the weights that a step of `num_tokens` tokens reads, of a model that our own decoder runs.

    That is all but the embedding's vectors, unless they are the head too, and of experts the share that is taken on
    average.
    """
    decoder = engine.model
    assert isinstance(decoder, LlamaDecoder)
    embedding = decoder.embed_tokens
    assert embedding is not None
    vector_bytes = sum(parameter.nbytes for parameter in embedding.parameters(recurse=False))
    is_head = decoder.lm_head is None and embedding.num_bytes == vector_bytes  # else the head has a copy of its own
    mixtures = (module for module in decoder.modules() if isinstance(module, MixtureOfExperts))
    expert_bytes = sum(mixture.expert_bytes for mixture in mixtures)
    experts = engine.config.experts
    unread_bytes = 0 if experts is None else round((1 - experts.share_taken(num_tokens)) * expert_bytes)
    return engine.weight_bytes - (0 if is_head else vector_bytes) - unread_bytes


def _sampled_request(index: int, vocab_size: int, fields: dict[str, Any]) -> Request:
    tokens = [(index * 7919 + place) % vocab_size for place in range(SAMPLED_CONTEXT_TOKENS)]
    sampling = SamplingParams(max_tokens=2**30, seed=index, **fields)
    return Request(f"bench-{index}", 0, tokens, SAMPLED_CONTEXT_TOKENS // 2, sampling)
