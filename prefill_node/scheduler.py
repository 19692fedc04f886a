"""Which prompt tokens the next step computes. No I/O, no clock.

    waiting ──blocks for the whole prompt──> running ──chunks──> computed ──KV is away──> gone

First come, first served, by token budget: a step takes tokens of the running prompts in order of arrival until
the budget is spent, so a long prompt goes through in chunks and several short ones share a step. A prompt starts
only when the pool has blocks for all of it; whatever runs can therefore always finish.

A prompt starts with the leading blocks that an earlier one left in the pool, or one that still runs has published, and
computes the rest; always its last token, whose logits choose the next. It publishes its own full blocks step by step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from serving_core import reasons
from serving_core.blocks import BlockAllocator, BlockLease
from serving_core.errors import RequestError
from serving_core.layout import KVLayout
from serving_core.prefix import BlockNames, root_name
from serving_core.requests import Request, SampledToken, Work


@dataclass(slots=True, eq=False)
class Prompt:
    """One request on this node. `lease` is None while it waits for blocks."""

    request: Request
    names: BlockNames
    lease: BlockLease | None = None
    num_tokens: int = 0  # of the prompt itself; the request grows by the token that is sampled
    num_computed: int = 0  # those whose KV was there already included
    num_cached_tokens: int = 0  # whose KV was there when the prompt started
    in_step: bool = False
    cancelled: bool = False  # no further step takes it

    @property
    def is_computed(self) -> bool:
        return self.num_computed == self.num_tokens


class PrefillScheduler:
    """Waiting and running prompts of one prefill node."""

    def __init__(
        self,
        allocator: BlockAllocator,
        layout: KVLayout,
        *,
        fingerprint: Mapping[str, str],
        max_num_batched_tokens: int,
        max_num_queued: int,
    ) -> None:
        self._allocator = allocator
        self._layout = layout
        self._fingerprint = fingerprint
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_queued = max_num_queued
        self._prompts: dict[Prompt, None] = {}  # in order of arrival
        self.num_prompt_tokens = 0  # of all prompts that ever started
        self.num_cached_tokens = 0  # of them, those that were not to be computed

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
        names = BlockNames(root_name(self._fingerprint, request.cache_salt), self._layout.block_size)
        prompt = Prompt(request, names, num_tokens=len(request.token_ids))
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
        """Takes in a finished step, whose full blocks others may use from now on; the sampled token goes with each
        prompt whose last chunk this was."""
        by_request = {prompt.request: prompt for prompt in self._prompts}
        sampled = iter(tokens)
        outcomes: list[tuple[Prompt, SampledToken | None]] = []
        for work in works:
            prompt = by_request[work.request]
            prompt.in_step = False
            prompt.num_computed += work.num_tokens
            assert prompt.lease is not None
            prompt.lease.publish(self._names(prompt, prompt.num_computed))
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
        """Prompt tokens still to be computed, as far as one can tell before a prompt starts."""
        return sum(prompt.num_tokens - self._num_done(prompt) for prompt in self._prompts)

    # ---- blocks ----

    def _start(self, prompt: Prompt) -> bool:
        """Whether the prompt has its blocks, now if not before."""
        if prompt.lease is not None:
            return True
        num_blocks = self._layout.num_blocks_for(prompt.num_tokens)
        names = self._usable_names(prompt)
        if self._allocator.num_needed(num_blocks, names) > self._allocator.num_free:
            return False
        prompt.lease = self._allocator.allocate(num_blocks, names)
        prompt.num_cached_tokens = prompt.num_computed = prompt.lease.num_cached * self._layout.block_size
        self.num_prompt_tokens += prompt.num_tokens
        self.num_cached_tokens += prompt.num_cached_tokens
        return True

    def _num_done(self, prompt: Prompt) -> int:
        if prompt.lease is not None:
            return prompt.num_computed
        return self._allocator.num_held(self._usable_names(prompt)) * self._layout.block_size

    def _usable_names(self, prompt: Prompt) -> list[bytes]:
        """Names of the blocks that the prompt need not compute if they are there: not the one of its last token."""
        return self._names(prompt, prompt.num_tokens - 1)

    def _names(self, prompt: Prompt, num_tokens: int) -> list[bytes]:
        """Names of the full blocks of the leading num_tokens tokens."""
        if not self._allocator.caching:
            return []
        return prompt.names.names_of(prompt.request.token_ids)[: num_tokens // self._layout.block_size]
