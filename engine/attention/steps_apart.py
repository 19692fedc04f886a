"""Attention of steps by one backend and that of prompts by another, over the same pool."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.paged import Attention
from engine.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class _Plan:
    backend: Attention
    plan: Any


class StepsApart:
    """Steps by a backend whose programs share the keys of a request, all else by one that is good at many rows."""

    def __init__(self, steps: Attention, prompts: Attention, are_steps: Callable[[ForwardBatch], bool]) -> None:
        """`are_steps` says of a batch whether it is for the first one."""
        assert steps.pool is prompts.pool
        self.steps, self.prompts = steps, prompts
        self._are_steps = are_steps
        self.name = f"{prompts.name}, of steps {steps.name}"
        self.pool = prompts.pool
        self.score_scale, self.softcap = prompts.score_scale, prompts.softcap

    def plan(self, batch: ForwardBatch, window: int | None) -> _Plan:
        backend: Attention = self.steps if self._are_steps(batch) else self.prompts
        return _Plan(backend, backend.plan(batch, window))

    def attend(self, query: torch.Tensor, layer: int, plan: _Plan) -> torch.Tensor:
        return plan.backend.attend(query, layer, plan.plan)
