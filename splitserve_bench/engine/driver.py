"""Runs real works through one engine: prompts in chunks, and greedy decode steps over contexts of a given length."""

import statistics
import time
from collections.abc import Sequence
from typing import Final

from engine.engine import Engine
from serving_core.layout import KVLayout
from serving_core.requests import Request, SamplingParams, Work
from splitserve_bench.engine.figures import EngineBench, PromptSize
from splitserve_bench.prompts import Prompts

CHUNK_TOKENS: Final = 512  # of a prompt in one step
NUM_STEPS: Final = 16  # decode steps in a row, as the scripts for peers do
GREEDY: Final = SamplingParams(max_tokens=2**30, temperature=0, ignore_eos=True)


def num_blocks_for(sizes: EngineBench, layout: KVLayout) -> int:
    """Blocks of a pool that holds all prompts, or all contexts, of one measurement at a time."""
    of_prompts = [each.count * layout.num_blocks_for(each.num_tokens) for each in sizes.prompts]
    longest = layout.num_blocks_for(max(sizes.contexts) + NUM_STEPS) + 1  # a node keeps one more free for each
    return max(*of_prompts, max(sizes.batches) * longest)


def most_tokens(sizes: EngineBench) -> int:
    """Of one request."""
    return max(max(sizes.contexts) + NUM_STEPS, *(each.num_tokens for each in sizes.prompts))


class PromptRun:
    """Prompts of one length, computed one after the other, each from its own blocks."""

    def __init__(self, engine: Engine, size: PromptSize) -> None:
        prompts = Prompts(engine.config.vocab_size, size.num_tokens)
        num_blocks = engine.layout.num_blocks_for(size.num_tokens)
        self._engine = engine
        self._size = size
        self._requests = [_request(index, prompts.draw()) for index in range(size.count)]
        self._blocks = [range(index * num_blocks, (index + 1) * num_blocks) for index in range(size.count)]

    def run_s(self) -> float:
        """Seconds to compute all prompts and the first token of each."""
        start_s = time.perf_counter()
        for request, blocks in zip(self._requests, self._blocks, strict=True):
            _compute(self._engine, request, blocks, 0, self._size.num_tokens)
        return time.perf_counter() - start_s


class DecodeRun:
    """Requests whose contexts grow from one length to the next, and batches of which decode a few steps from there."""

    def __init__(self, engine: Engine, num_requests: int, most_context_tokens: int) -> None:
        # One token more than the context: the first step computes it.
        prompts = Prompts(engine.config.vocab_size, most_context_tokens + 1)
        num_blocks = engine.layout.num_blocks_for(most_context_tokens + NUM_STEPS)
        self._engine = engine
        self._prompts = [prompts.draw() for _ in range(num_requests)]
        self.requests: Final = [_request(index, []) for index in range(num_requests)]
        self._blocks = [range(index * num_blocks, (index + 1) * num_blocks) for index in range(num_requests)]
        self._context_tokens = 0

    def extend(self, context_tokens: int) -> None:
        """Makes all contexts so long. To be called with ascending lengths."""
        for request, prompt, blocks in zip(self.requests, self._prompts, self._blocks, strict=True):
            request.token_ids[:] = prompt[: context_tokens + 1]
            _compute(self._engine, request, blocks, self._whole_blocks(self._context_tokens), context_tokens)
        self._context_tokens = context_tokens

    def rewind(self, batch: int) -> None:
        """Takes the first `batch` requests back to the context."""
        start = self._whole_blocks(self._context_tokens)
        for request, blocks in zip(self.requests[:batch], self._blocks[:batch], strict=True):
            del request.token_ids[self._context_tokens + 1 :]
            # An 8-bit block is filled from its start: what follows a context that ends within one is begun anew.
            _compute(self._engine, request, blocks, start, self._context_tokens)

    def work(self, index: int, start: int, num_tokens: int) -> Work:
        """Of a step that computes tokens of one of the requests, as often as one likes."""
        return Work(self.requests[index], start, num_tokens, self._blocks[index])

    def run_s(self, batch: int, num_steps: int = NUM_STEPS) -> float:
        """Mean seconds of the steps that follow a rewind of the first `batch` requests."""
        return statistics.fmean(self._step_s(batch, self._context_tokens + step) for step in range(num_steps))

    def _step_s(self, batch: int, position: int) -> float:
        requests = self.requests[:batch]
        start_s = time.perf_counter()
        works = [
            Work(request, position, 1, blocks) for request, blocks in zip(requests, self._blocks[:batch], strict=True)
        ]
        tokens = self._engine.step(works)
        elapsed_s = time.perf_counter() - start_s
        for request, token in zip(requests, tokens, strict=True):
            request.token_ids.append(token.token_id)
        return elapsed_s

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._engine.layout.block_size


def _compute(engine: Engine, request: Request, blocks: Sequence[int], start: int, end: int) -> None:
    for first in range(start, end, CHUNK_TOKENS):
        engine.step([Work(request, first, min(CHUNK_TOKENS, end - first), blocks)])


def _request(index: int, token_ids: list[int]) -> Request:
    return Request(f"bench-{index}", 0, token_ids, len(token_ids), GREEDY)
