"""Which prompt tokens the next step computes. No I/O, no clock.

    waiting ──blocks for the whole prompt──> running ──chunks──> computed ──KV is away──> gone

First come, first served, by token budget: a step takes tokens of the running prompts in order of arrival until
the budget is spent, so a long prompt goes through in chunks and several short ones share a step. A prompt starts
only when the pool has blocks for all of it; whatever runs can therefore always finish.
"""

from dataclasses import dataclass

from engine.blocks import BlockAllocator, BlockLease
from engine.errors import RequestError
from engine.layout import KVLayout
from engine.requests import Request, SampledToken, Work
from protos import reasons


@dataclass(slots=True, eq=False)
class Prompt:
    """One request on this node. `lease` is None while it waits for blocks."""

    request: Request
    lease: BlockLease | None = None
    num_tokens: int = 0  # of the prompt itself; the request grows by the token that is sampled
    num_computed: int = 0
    in_step: bool = False
    cancelled: bool = False  # no further step takes it

    @property
    def is_computed(self) -> bool:
        return self.num_computed == self.num_tokens


class PrefillScheduler:
    """Waiting and running prompts of one prefill node."""

    def __init__(
        self, allocator: BlockAllocator, layout: KVLayout, *, max_num_batched_tokens: int, max_num_queued: int
    ) -> None:
        self._allocator = allocator
        self._layout = layout
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_queued = max_num_queued
        self._prompts: dict[Prompt, None] = {}  # in order of arrival

    def add(self, request: Request) -> Prompt:
        """Queues a request. Raises RequestError when the queue is full or the prompt can never fit."""
        num_blocks = self._layout.num_blocks_for(len(request.token_ids))
        if num_blocks > self._allocator.num_blocks:
            raise RequestError(
                reasons.PROMPT_TOO_LONG,
                f"the prompt needs {num_blocks} KV blocks, the prefill node has {self._allocator.num_blocks}",
            )
        if self.num_waiting >= self._max_num_queued:
            raise RequestError(reasons.QUEUE_FULL, f"the prefill queue holds its {self._max_num_queued} requests")
        prompt = Prompt(request, num_tokens=len(request.token_ids))
        self._prompts[prompt] = None
        return prompt

    def plan(self) -> list[Work]:
        """Shares of the next step, in order of arrival; empty when there is nothing to compute."""
        budget = self._max_num_batched_tokens
        works: list[Work] = []
        for prompt in self._prompts:
            if prompt.is_computed or prompt.cancelled:
                continue
            if budget == 0 or not self._start(prompt):
                break
            num_tokens = min(budget, prompt.num_tokens - prompt.num_computed)
            budget -= num_tokens
            prompt.in_step = True
            assert prompt.lease is not None
            works.append(Work(prompt.request, prompt.num_computed, num_tokens, prompt.lease.block_ids))
        return works

    def apply(self, works: list[Work], tokens: list[SampledToken]) -> list[tuple[Prompt, SampledToken | None]]:
        """Takes in a finished step; the sampled token goes with each prompt whose last chunk this was."""
        by_request = {prompt.request: prompt for prompt in self._prompts}
        sampled = iter(tokens)
        outcomes: list[tuple[Prompt, SampledToken | None]] = []
        for work in works:
            prompt = by_request[work.request]
            prompt.in_step = False
            prompt.num_computed += work.num_tokens
            token = next(sampled) if prompt.is_computed else None
            if token is not None:
                prompt.request.token_ids.append(token.token_id)
            outcomes.append((prompt, token))
        return outcomes

    def remove(self, prompt: Prompt) -> None:
        """Forgets a prompt and frees its blocks. Not while it is in a step."""
        assert not prompt.in_step, "a prompt was removed in the middle of a step"
        del self._prompts[prompt]
        if prompt.lease is not None:
            prompt.lease.release()

    @property
    def num_running(self) -> int:
        return sum(prompt.lease is not None for prompt in self._prompts)

    @property
    def num_waiting(self) -> int:
        return len(self._prompts) - self.num_running

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that no step has computed yet."""
        return sum(prompt.num_tokens - prompt.num_computed for prompt in self._prompts)

    def _start(self, prompt: Prompt) -> bool:
        """Whether the prompt has its blocks, now if not before."""
        num_blocks = self._layout.num_blocks_for(prompt.num_tokens)
        if prompt.lease is None and num_blocks <= self._allocator.num_free:
            prompt.lease = self._allocator.allocate(num_blocks)
        return prompt.lease is not None
