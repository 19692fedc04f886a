"""Load an engine and run steps of it: prompts in chunks, and greedy decode steps over contexts of one length."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import torch

from engine.build import build_engine
from engine.engine import Engine
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout
from serving_core.model_files.config import FAKE_ARCHITECTURE, read_model_config
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from splitserve_bench.engine.sizes import STEP_TOKENS, EngineBench, PromptSize
from splitserve_bench.prompts import Prompts

NUM_STEPS: Final = 16  # decode steps in a row, as the scripts for peers do
GREEDY: Final = SamplingParams(max_tokens=2**30, temperature=0, ignore_eos=True)


def load_engine(folder: Path, settings: EngineSettings, num_kv_blocks: int = 0) -> Engine:
    """Load the model of a folder with these settings, and return its engine.

    The pool has `num_kv_blocks` blocks; 0 takes the size that the settings give. Raises ModelError when the model
    cannot be loaded, and SettingsError for the fake model, which computes nothing.
    """
    if read_model_config(folder, settings.model_impl).architecture == FAKE_ARCHITECTURE:
        raise SettingsError("the fake model computes nothing that could be measured")
    return build_engine(dataclasses.replace(settings, model=str(folder), num_kv_blocks=num_kv_blocks))


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """Return a context manager inside which torch computes with `num_threads` threads; 0 leaves torch's own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_blocks_for(sizes: EngineBench, layout: KVLayout) -> int:
    """Return how many KV blocks of this layout hold all prompts, or all contexts, of the largest single measurement."""
    of_prompts = [each.count * layout.num_blocks_for(each.num_tokens) for each in sizes.prompts]
    longest = layout.num_blocks_for(max(sizes.contexts) + NUM_STEPS)
    return max(*of_prompts, max(sizes.batches) * longest)


def most_tokens(sizes: EngineBench) -> int:
    """Return the number of tokens of the longest request, with the tokens that it generates."""
    return max(max(sizes.contexts) + NUM_STEPS, *(each.num_tokens for each in sizes.prompts))


class Chunk(NamedTuple):
    """Consecutive tokens of prompt number `prompt` that one step computes, from token `start` on."""

    prompt: int
    start: int
    num_tokens: int


def chunks_of(size: PromptSize, step_tokens: int) -> list[list[Chunk]]:
    """Return the steps that compute all prompts in order, each a list of chunks of `step_tokens` tokens together."""
    steps: list[list[Chunk]] = []
    left = 0
    for prompt in range(size.count):
        start = 0
        while start < size.num_tokens:
            if not left:
                steps.append([])
                left = step_tokens
            num_tokens = min(left, size.num_tokens - start)
            steps[-1].append(Chunk(prompt, start, num_tokens))
            start, left = start + num_tokens, left - num_tokens
    return steps


class PromptRun:
    """Prompts of one length, each with KV blocks of its own, to be computed as often as wanted."""

    def __init__(self, engine: Engine, size: PromptSize, step_tokens: int = STEP_TOKENS) -> None:
        prompts = Prompts(engine.config.vocab_size, size.num_tokens)
        num_blocks = engine.layout.num_blocks_for(size.num_tokens)
        self._engine = engine
        self._steps = chunks_of(size, step_tokens)
        self._requests = [_request(index, prompts.draw()) for index in range(size.count)]
        self._blocks = [range(index * num_blocks, (index + 1) * num_blocks) for index in range(size.count)]

    def run_s(self) -> float:
        """Compute all prompts and the first token of each, and return how many seconds that took."""
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
    """Requests whose contexts grow from one length to the next, with decode steps of any number of them at each."""

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
        """Compute the contexts of all requests up to this length, which must not be below that of the call before."""
        for request, prompt, blocks in zip(self.requests, self._prompts, self._blocks, strict=True):
            request.token_ids[:] = prompt[: context_tokens + 1]
            self._compute(request, blocks, self._whole_blocks(self._context_tokens), context_tokens)
        self._context_tokens = context_tokens

    def rewind(self, batch: int) -> None:
        """Take the first `batch` requests back to the end of their contexts, so that steps can be repeated."""
        start = self._whole_blocks(self._context_tokens)
        for request, blocks in zip(self.requests[:batch], self._blocks[:batch], strict=True):
            del request.token_ids[self._context_tokens + 1 :]
            # An 8-bit block is filled from its start: a block in which the context ends is computed again.
            self._compute(request, blocks, start, self._context_tokens)

    def work(self, index: int, start: int, num_tokens: int) -> Work:
        """Return the part of a step that computes `num_tokens` tokens of request `index`, from token `start` on."""
        return Work(self.requests[index], start, num_tokens, self._blocks[index])

    def run_s(self, batch: int, num_steps: int = NUM_STEPS) -> float:
        """Run decode steps of the first `batch` requests, and return the mean seconds of a step.

        `rewind` must come before.
        """
        return statistics.fmean(self.steps_s(batch, num_steps))

    def steps_s(self, batch: int, num_steps: int = NUM_STEPS) -> list[float]:
        """Run decode steps of the first `batch` requests, and return the seconds of each. `rewind` must come before."""
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
