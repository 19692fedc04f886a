"""Runs real works through one engine: prompts in chunks, and greedy decode steps over contexts of a given length."""

import statistics
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from engine.engine import Engine
from serving_core.layout import KVLayout
from serving_core.requests import Request, SamplingParams, Work
from splitserve_bench.engine.figures import STEP_TOKENS, EngineBench, PromptSize
from splitserve_bench.prompts import Prompts

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


class Chunk(NamedTuple):
    """What a step computes of one prompt."""

    prompt: int
    start: int
    num_tokens: int


def chunks_of(size: PromptSize, step_tokens: int, *, shares_steps: bool) -> list[list[Chunk]]:
    """The steps that compute all prompts in their order: each of one prompt, or each as full as can be."""
    steps: list[list[Chunk]] = []
    left = 0
    for prompt in range(size.count):
        start = 0
        left = left if shares_steps else 0
        while start < size.num_tokens:
            if not left:
                steps.append([])
                left = step_tokens
            num_tokens = min(left, size.num_tokens - start)
            steps[-1].append(Chunk(prompt, start, num_tokens))
            start, left = start + num_tokens, left - num_tokens
    return steps


class PromptRun:
    """Prompts of one length, each from its own blocks."""

    def __init__(
        self, engine: Engine, size: PromptSize, step_tokens: int = STEP_TOKENS, *, shares_steps: bool = False
    ) -> None:
        prompts = Prompts(engine.config.vocab_size, size.num_tokens)
        num_blocks = engine.layout.num_blocks_for(size.num_tokens)
        self._engine = engine
        self._steps = chunks_of(size, step_tokens, shares_steps=shares_steps)
        self._requests = [_request(index, prompts.draw()) for index in range(size.count)]
        self._blocks = [range(index * num_blocks, (index + 1) * num_blocks) for index in range(size.count)]

    def run_s(self) -> float:
        """Seconds to compute all prompts and the first token of each."""
        start_s = time.perf_counter()
        for chunks in self._steps:
            self._engine.step(
                [
                    Work(self._requests[prompt], start, num_tokens, self._blocks[prompt])
                    for prompt, start, num_tokens in chunks
                ]
            )
        return time.perf_counter() - start_s


class DecodeRun:
    """Requests whose contexts grow from one length to the next, and batches of which decode a few steps from there."""

    def __init__(
        self, engine: Engine, num_requests: int, most_context_tokens: int, step_tokens: int = STEP_TOKENS
    ) -> None:
        # One token more than the context: the first step computes it.
        prompts = Prompts(engine.config.vocab_size, most_context_tokens + 1)
        num_blocks = engine.layout.num_blocks_for(most_context_tokens + NUM_STEPS)
        self._engine = engine
        self._prompts = [prompts.draw() for _ in range(num_requests)]
        self.requests: Final = [_request(index, []) for index in range(num_requests)]
        self._blocks = [range(index * num_blocks, (index + 1) * num_blocks) for index in range(num_requests)]
        self._context_tokens = 0
        self._step_tokens = step_tokens

    def extend(self, context_tokens: int) -> None:
        """Makes all contexts so long. To be called with ascending lengths."""
        for request, prompt, blocks in zip(self.requests, self._prompts, self._blocks, strict=True):
            request.token_ids[:] = prompt[: context_tokens + 1]
            self._compute(request, blocks, self._whole_blocks(self._context_tokens), context_tokens)
        self._context_tokens = context_tokens

    def rewind(self, batch: int) -> None:
        """Takes the first `batch` requests back to the context."""
        start = self._whole_blocks(self._context_tokens)
        for request, blocks in zip(self.requests[:batch], self._blocks[:batch], strict=True):
            del request.token_ids[self._context_tokens + 1 :]
            # An 8-bit block is filled from its start: what follows a context that ends within one is begun anew.
            self._compute(request, blocks, start, self._context_tokens)

    def work(self, index: int, start: int, num_tokens: int) -> Work:
        """Of a step that computes tokens of one of the requests, as often as one likes."""
        return Work(self.requests[index], start, num_tokens, self._blocks[index])

    def run_s(self, batch: int, num_steps: int = NUM_STEPS) -> float:
        """Mean seconds of the steps that follow a rewind of the first `batch` requests."""
        return statistics.fmean(self.steps_s(batch, num_steps))

    def steps_s(self, batch: int, num_steps: int = NUM_STEPS) -> list[float]:
        """Return the seconds of each of the steps that follow a rewind of the first `batch` requests."""
        return [self._step_s(batch, self._context_tokens + step) for step in range(num_steps)]

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

    def _compute(self, request: Request, blocks: Sequence[int], start: int, end: int) -> None:
        for first in range(start, end, self._step_tokens):
            self._engine.step([Work(request, first, min(self._step_tokens, end - first), blocks)])

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._engine.layout.block_size


def _request(index: int, token_ids: list[int]) -> Request:
    return Request(f"bench-{index}", 0, token_ids, len(token_ids), GREEDY)
