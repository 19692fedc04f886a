"""How long the parts of a step take, each without the parts within it, so that they sum up to the whole.

The watches stand around the calls of one engine's modules, so that it does not matter whether torch or a library
called by ctypes computes. They cost a microsecond or two a call, and nothing once they are taken away. While they
stand, decode goes from module to module too, and not by the one program that computes all of them in less time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

import engine.engine
from engine.attention.annexed import AnnexedAttention
from engine.engine import Engine
from engine.model.experts import MixtureOfExperts
from engine.model.layers import FeedForward, Linear, RMSNorm
from engine.model.llama import DecoderLayer, LlamaDecoder, SelfAttention
from splitserve_bench.engine.machine import synchronize

LINEARS, HEAD, ATTENTION = "linear layers", "head", "attention"
NORMS = "norms and residual sums"
ROTATION = "norms of heads, rotation, KV store"
ACTIVATION, SAMPLING = "activation", "sampling"
REST = "embedding, tables, batch, overhead"
PARTS: Final = (LINEARS, HEAD, ATTENTION, NORMS, ROTATION, ACTIVATION, SAMPLING, REST)

# What a module does itself, apart from the modules within it.
PART_OF_MODULE: Final = (
    (Linear, LINEARS),
    (MixtureOfExperts, LINEARS),  # whose products are mostly those of all experts at once
    (RMSNorm, NORMS),
    (DecoderLayer, NORMS),
    (SelfAttention, ROTATION),
    (FeedForward, ACTIVATION),
    (LlamaDecoder, REST),
)


class Stopwatch:
    """Own seconds and calls of each part so far."""

    def __init__(self, device: torch.device) -> None:
        self.own_s: Final = dict.fromkeys(PARTS, 0.0)
        self.num_calls: Final = dict.fromkeys(PARTS, 0)
        self._device = device
        self._within_s: list[float] = []  # of each running call, the seconds of calls within it

    @property
    def total_s(self) -> float:
        """Seconds of all parts."""
        return sum(self.own_s.values())

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose calls are timed as this part."""

        def timed(*arguments: Any, **named: Any) -> Any:
            synchronize(self._device)
            start_s = time.perf_counter()
            self._within_s.append(0.0)
            try:
                result = function(*arguments, **named)
                synchronize(self._device)
                return result
            finally:
                elapsed_s = time.perf_counter() - start_s
                self.own_s[part] += elapsed_s - self._within_s.pop()
                self.num_calls[part] += 1
                if self._within_s:
                    self._within_s[-1] += elapsed_s

        return timed


@contextmanager
def watching(loaded: Engine) -> Iterator[Stopwatch]:
    """Watches around all parts of an engine's steps, until the context ends. Only one thread may use the engine."""
    stopwatch = Stopwatch(loaded.pool.device)
    with ExitStack() as stack:

        def watch(owner: Any, name: str, part: str) -> None:
            stack.enter_context(_replaced(owner, name, stopwatch.around(part, getattr(owner, name))))

        stack.enter_context(_replaced(loaded, "program", None))
        watch(loaded, "step", REST)
        watch(engine.engine, "sample", SAMPLING)
        watch(loaded.attention, "plan", ATTENTION)
        watch(loaded.attention, "attend", ATTENTION)
        watch(AnnexedAttention, "attend", ATTENTION)  # and what it waits for
        decoder = loaded.model
        assert isinstance(decoder, LlamaDecoder)
        for path, module in decoder.named_modules():
            part = _part_of(path, module)
            if part is not None:
                watch(module, "forward", part)
        if decoder.lm_head is None:
            assert decoder.embed_tokens is not None
            watch(decoder.embed_tokens, "logits", HEAD)
        yield stopwatch


def _part_of(path: str, module: torch.nn.Module) -> str | None:
    if path == "lm_head":
        return HEAD
    if path.endswith((".q_norm", ".k_norm")):
        return ROTATION
    return next((part for kind, part in PART_OF_MODULE if isinstance(module, kind)), None)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """The owner's own attribute, where it has one, comes back at the end."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
