"""Runs an engine's steps in a thread of its own, so that a node's event loop stays free, and counts them."""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Generic, TypeVar

from serving_core.failpoints import reach
from serving_core.requests import OnLayer

NUM_RECENT_STEPS: Final = 64

P = TypeVar("P")  # one part of a step: a Work on rank 0, a Share on a follower
R = TypeVar("R")  # what a step gives: the sampled tokens on rank 0, nothing on a follower
T = TypeVar("T")


class Stepper(Generic[P, R]):
    """One step at a time. Owned by one event loop."""

    def __init__(self, compute: Callable[[Sequence[P], OnLayer | None], R]) -> None:
        """`compute` is an engine's `step` or `follow`."""
        self._compute = compute
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._started_at: float | None = None
        self.num_steps = 0

    async def run(
        self, plan: Callable[[], list[P]], step: Callable[[list[P]], Awaitable[None]], wake: asyncio.Event
    ) -> None:
        """Steps whatever there is to plan, and waits for `wake` when there is nothing. Ends by cancel, or as plan or
        step raises; then the thread is closed."""
        try:
            while True:
                wake.clear()
                if parts := plan():
                    await step(parts)
                else:
                    await wake.wait()
        finally:
            self.close()

    async def step(self, parts: Sequence[P], on_layer: OnLayer | None = None) -> tuple[R, float]:
        """What the step gives, and the seconds it took. `on_layer` is called on the event loop, and not after this
        returns."""
        assert self._started_at is None, "two steps at a time"
        self._started_at = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            relay = None if on_layer is None else _on_loop(loop, on_layer)
            result = await loop.run_in_executor(self._thread, self._computed, parts, relay)
        finally:
            step_s = time.monotonic() - self._started_at
            self._started_at = None
            self.num_steps += 1
        self._recent_s.append(step_s)
        return result, step_s

    def _computed(self, parts: Sequence[P], on_layer: OnLayer | None) -> R:
        """In the engine's thread."""
        reach("step")
        return self._compute(parts, on_layer)

    async def between(self, compute: Callable[[], T]) -> tuple[T, float]:
        """What is to be computed between two steps, in the engine's thread too, and the seconds it took."""
        assert self._started_at is None, "a step runs"
        self._started_at = time.monotonic()
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, compute)
            return result, self.step_age_s
        finally:
            self._started_at = None

    @property
    def step_s(self) -> float:
        """Median seconds of the recent steps; 0 before the first."""
        return statistics.median(self._recent_s) if self._recent_s else 0.0

    @property
    def step_age_s(self) -> float:
        """Seconds the running step has taken so far; 0 when idle."""
        return 0.0 if self._started_at is None else time.monotonic() - self._started_at

    def close(self) -> None:
        """Waits for the running step, then ends the thread."""
        self._thread.shutdown(wait=True)


def _on_loop(loop: asyncio.AbstractEventLoop, on_layer: OnLayer) -> OnLayer:
    """The same, for another thread to call."""

    def relay(num_layers: int) -> None:
        loop.call_soon_threadsafe(on_layer, num_layers)

    return relay
