"""Runs requests through an Engine without a node: the least scheduler that chunks, batches, joins, leaves and
shares prefixes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.engine import Engine
from serving_core.node.blocks import BlockAllocator, BlockLease
from serving_core.node.prefix import CHUNK, STEP, BlockNames, root_name
from serving_core.requests import Request, SampledToken, SamplingParams, Work, finish_reason


@dataclass
class Run:
    """One request on its way: it joins at a step, and num_computed of its tokens are in the pool."""

    request: Request
    names: BlockNames
    joins_at: int = 0
    num_computed: int = 0
    lease: BlockLease | None = None


def greedy(max_tokens: int, **sampling) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)


class CountingEngine:
    """An engine that counts the tokens it computes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, works: Sequence[Work]) -> list[SampledToken]:
        self.num_tokens += sum(work.num_tokens for work in works)
        return self._engine.step(works)


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return a prompt of random bytes for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def token_ids(answers: Sequence[Sequence[SampledToken]]) -> list[list[int]]:
    return [[token.token_id for token in answer] for answer in answers]


def run_all(
    engine: Engine,
    prompts: Sequence[list[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    chunk_tokens: int = 1000,
    joins_at: Sequence[int] = (),
    allocator: BlockAllocator | None = None,
    adapters: Sequence[str] = (),
    propose: Callable[[Request], list[int]] = lambda request: [],
) -> list[list[SampledToken]]:
    """The sampled tokens of each prompt, all served together; request i joins at step joins_at[i] (or 0), and is
    computed with adapters[i] (or none), and with the draft tokens that are proposed for it.

    Prefixes are shared by way of an `allocator` that is given, also from one call to the next of one engine.
    """
    if isinstance(sampling, SamplingParams):
        sampling = [sampling] * len(prompts)
    adapters = adapters or [""] * len(prompts)
    runs = [
        Run(
            Request(str(i), 0, list(prompt), len(prompt), sampling[i], adapter=adapters[i]),
            BlockNames(root_name(engine.fingerprint, "", adapters[i]), engine.layout.block_size),
            joins_at[i] if joins_at else 0,
        )
        for i, prompt in enumerate(prompts)
    ]
    allocator = allocator or BlockAllocator(engine.num_blocks, caching=False)
    sampled: dict[str, list[SampledToken]] = {run.request.request_id: [] for run in runs}
    step = 0
    while runs:
        joined = [run for run in runs if run.joins_at <= step]
        works = [_work(run, engine, allocator, chunk_tokens, propose) for run in joined]
        tokens = iter(engine.step(works) if works else [])
        for run, work in zip(joined, works, strict=True):
            run.num_computed += work.num_tokens
            _publish(run, engine)
            taken = work.take(tokens)
            sampled[run.request.request_id] += taken
            run.request.token_ids += [token.token_id for token in taken]
            run.num_computed += max(0, len(taken) - 1)
            _publish(run, engine)
            if taken and finish_reason(run.request, engine.eos_token_ids):
                run.lease.release()
                runs.remove(run)
        step += 1
    allocator.check_integrity()
    assert allocator.num_free == engine.num_blocks
    return list(sampled.values())


def _work(
    run: Run,
    engine: Engine,
    allocator: BlockAllocator,
    chunk_tokens: int,
    propose: Callable[[Request], list[int]],
) -> Work:
    if run.lease is None:
        num_blocks = (len(run.request.token_ids) - 1) // engine.layout.block_size
        numerics_ids = [engine.numerics + CHUNK, engine.numerics + STEP]
        found = run.names.find(run.request.token_ids, num_blocks, numerics_ids, allocator.blocks_by_name.__contains__)
        run.names.begin(*found)
        run.lease = allocator.allocate(len(run.names.names), run.names.names)
        run.num_computed = run.lease.num_cached * engine.layout.block_size
    num_tokens = min(chunk_tokens, len(run.request.token_ids) - run.num_computed)
    reaches_end = run.request.num_output_tokens and run.num_computed + num_tokens == len(run.request.token_ids)
    draft_tokens = propose(run.request) if reaches_end else []
    needed = engine.layout.num_blocks_for(run.num_computed + num_tokens + len(draft_tokens))
    run.lease.grow(max(0, needed - len(run.lease.block_ids)))
    return Work(run.request, run.num_computed, num_tokens, run.lease.block_ids, draft_tokens)


def _publish(run: Run, engine: Engine) -> None:
    is_step = bool(run.request.num_output_tokens) and not engine.is_batch_invariant
    while len(run.names.names) < run.num_computed // engine.layout.block_size:
        run.names.add(run.request.token_ids, engine.numerics + (STEP if is_step else CHUNK))
    run.lease.publish(run.names.names)
