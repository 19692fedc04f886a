"""Attention of steps by one backend and that of prompts by another, over the same pool, also where a batch has both."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from engine.attention.paged import Attention
from engine.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class _Part:
    rows: slice  # of the query
    backend: Attention
    plan: Any


class StepsApart:
    """Requests of few tokens at the head of a batch by a backend whose programs share the keys of each, all from the
    first of many tokens on by one that is good at many rows: a backend takes rows that follow each other, and their
    order is the caller's. A node plans answers before prompts."""

    def __init__(self, steps: Attention, prompts: Attention, few_tokens: int) -> None:
        """The first takes requests of up to so many tokens."""
        assert steps.pool is prompts.pool
        self.steps, self.prompts = steps, prompts
        self._few_tokens = few_tokens
        self.name = prompts.name if steps is prompts else f"{prompts.name}, of steps {steps.name}"
        self.pool = prompts.pool
        self.score_scale, self.softcap = prompts.score_scale, prompts.softcap

    def plan(self, batch: ForwardBatch, window: int | None) -> list[_Part]:
        num_steps, num_requests, num_rows = self._num_steps(batch), len(batch.starts) - 1, batch.starts[-1]
        if num_steps in (0, num_requests):
            backend = self.steps if num_steps else self.prompts
            return [_Part(slice(num_rows), backend, backend.plan(batch, window))]
        first_row = batch.starts[num_steps]
        steps, prompts = batch.part(0, num_steps), batch.part(num_steps, num_requests)
        return [
            _Part(slice(first_row), self.steps, self.steps.plan(steps, window)),
            _Part(slice(first_row, num_rows), self.prompts, self.prompts.plan(prompts, window)),
        ]

    def attend(self, query: torch.Tensor, layer: int, plan: list[_Part]) -> torch.Tensor:
        attended = [part.backend.attend(query[part.rows], layer, part.plan) for part in plan]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _num_steps(self, batch: ForwardBatch) -> int:
        """How many of its leading requests have few tokens."""
        if batch.longest_query <= self._few_tokens:
            return len(batch.starts) - 1
        counts = (end - start for start, end in pairwise(batch.starts))
        return next(number for number, count in enumerate(counts) if count > self._few_tokens)
