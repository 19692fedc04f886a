"""Run an engine's steps in a thread of its own, and say what the error of a step means.

What is done beside a step that computes is no part of its own.

While a step runs, the loop may offer the one behind it. When the first is done, the thread decides by its result
whether the offered one follows. If so it begins at once, and the loop takes the first one's result in meanwhile; what
the second one gives may depend on that, so its end waits for it.
"""

import asyncio
import statistics
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

import torch

from engine.offload.layers_on_disk import WeightsLost
from serving_core.failpoints import reach
from serving_core.requests import OnLayer

OUT_OF_MEMORY: Final = 2  # of CUDA's error codes
OF_TRITON: Final = "Triton Error [CUDA]"
OF_CPU_ALLOCATOR: Final = "DefaultCPUAllocator: can't allocate memory"
MOST_FAILED_STEPS: Final = 4  # in a row, after which the next one is not believed to be better


def is_fatal(error: Exception) -> bool:
    """Whether every later step would fail too: weights that are gone, a device that has failed. CUDA gives such an
    error to all calls that follow, the first of which may be Triton's."""
    of_device = isinstance(error, torch.AcceleratorError) or str(error).startswith(OF_TRITON)
    return isinstance(error, WeightsLost) or (of_device and not _is_out_of_memory(error))


def cause_of(error: Exception) -> str:
    """Return the cause in words that a client may read: the error's own message may hold paths."""
    return "the node is out of memory" if _is_out_of_memory(error) else f"the step failed ({type(error).__name__})"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == OUT_OF_MEMORY
    text = str(error)
    return OF_CPU_ALLOCATOR in text or (text.startswith(OF_TRITON) and "out of memory" in text)


PLAN = "plan"  # what the scheduler decides
HAND_OVER = "threads"  # from the event loop to the engine's thread, or back
BUILD = "build"  # the tensors of a batch
COMPUTE = "compute"  # of CUDA devices only what starts it: the first to await them is `sample`
SAMPLE = "sample"  # tokens out of logits
DRAFT = "draft"  # what a draft model computes, between two steps
AFTER = "after"  # what tokens mean: ends, records, blocks that are full
SEND = "send"  # what the coordinator is told, and other decisions
IDLE = "idle"  # nothing to compute
PARTS: Final = (PLAN, BUILD, COMPUTE, SAMPLE, DRAFT, AFTER, SEND, HAND_OVER, IDLE)
BETWEEN: Final = (PLAN, BUILD, SAMPLE, AFTER, SEND, HAND_OVER)


class StepClock:
    """Seconds of each part so far. They are one after the other, in whatever thread, so that they sum up to the time
    from the start to the last lap."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: Final = dict.fromkeys(PARTS, 0.0)
        self._now = now
        self._last_s = now()

    def lap(self, part: str) -> None:
        """All since the last lap was this part."""
        now_s = self._now()
        self.seconds[part] += now_s - self._last_s
        self._last_s = now_s


NUM_RECENT_STEPS: Final = 64
TAKEN_IN_DEADLINE_S: Final = 600.0  # for the loop, to take in what a step gave

P = TypeVar("P")  # one part of a step: a Work on rank 0, a Share on a follower
R = TypeVar("R")  # what a step gives: the sampled tokens on rank 0, nothing on a follower
T = TypeVar("T")


class Stepped(NamedTuple, Generic[R]):
    """A step is done."""

    result: R
    step_s: float
    goes_on: bool = False  # the step ahead of it has begun


@dataclass(eq=False)
class Step(Generic[P, R]):
    """One that runs."""

    parts: Sequence[P]
    done: "asyncio.Future[Stepped[R]]"
    ahead: "Ahead[P, R] | None" = None  # offered; at most once, and any time


@dataclass(eq=False)
class Ahead(Step[P, R]):
    """One that is to begin as soon as the step before it is done, if it follows."""

    follows: Callable[[R], bool] = field(kw_only=True)  # tells by what the step before gave, in the engine's thread
    compute: Callable[[R, Callable[[], None], Callable[[], None]], R] = field(kw_only=True)
    """Computes it behind what the step before gave, in the engine's thread. Calls the second when its computation
    begins, the third before it needs what the loop makes of the step before."""
    _is_taken_in: threading.Event = field(default_factory=threading.Event)
    _is_given_up: bool = False

    def take_in(self) -> None:
        """The loop has taken in the step before."""
        self._is_taken_in.set()

    def give_up(self) -> None:
        """Nobody will take in the step before: this one is to fail."""
        self._is_given_up = True
        self._is_taken_in.set()

    def wait(self) -> None:
        """Returns when the step before is taken in. Raises RuntimeError when it will not be."""
        if not self._is_taken_in.wait(TAKEN_IN_DEADLINE_S) or self._is_given_up:
            raise RuntimeError("what the step before gave was not taken in")


class Stepper(Generic[P, R]):
    """One step at a time. Owned by one event loop."""

    def __init__(self, compute: Callable[[Sequence[P], OnLayer | None], R]) -> None:
        """`compute` is an engine's `step` or `follow`."""
        self._compute = compute
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._started_at: float | None = None
        self._running: Step[P, R] | None = None
        self.num_steps = 0

    async def run(
        self, plan: Callable[[], list[P]], step: Callable[[list[P]], Awaitable[None]], wake: asyncio.Event
    ) -> None:
        """Steps whatever there is to plan, and waits for `wake` when there is nothing. Ends by cancel, or as plan or
        step raises, when the running step has ended, which nothing else waits for; then the thread is closed."""
        try:
            while True:
                wake.clear()
                if parts := plan():
                    await step(parts)
                else:
                    await wake.wait()
        finally:
            await asyncio.to_thread(self.close)

    async def step(self, parts: Sequence[P], on_layer: OnLayer | None = None) -> tuple[R, float]:
        """What the step gives, and the seconds it took. `on_layer` is called on the event loop, and not after this
        returns."""
        result, step_s, _ = await self.begin(parts, on_layer).done
        return result, step_s

    def begin(self, parts: Sequence[P], on_layer: OnLayer | None = None) -> Step[P, R]:
        """Starts a step, of which `done` is to be awaited. `on_layer` is called on the event loop, and not after
        that."""
        assert self._running is None, "two steps at a time"
        loop = asyncio.get_running_loop()
        self._running = step = Step(parts, loop.create_future())
        self._started_at = time.monotonic()
        relay = None if on_layer is None else _on_loop(loop, on_layer)
        loop.run_in_executor(self._thread, self._computed, loop, step, relay).add_done_callback(self._ended)
        return step

    def _computed(self, loop: asyncio.AbstractEventLoop, step: Step[P, R], on_layer: OnLayer | None) -> R:
        """In the engine's thread: this step and those that follow it. Gives what the last one does."""
        reach("step")
        result = self._compute(step.parts, on_layer)
        while (ahead := step.ahead) is not None and ahead.follows(result):
            now, begun_at = time.monotonic(), self._started_at
            assert begun_at is not None
            self._started_at = now
            tell = _Once(loop, self._followed, step, Stepped(result, now - begun_at, goes_on=True))
            try:
                reach("step")
                result = ahead.compute(result, tell, ahead.wait)
            finally:
                tell()
            step = ahead
        return result

    def _followed(self, step: Step[P, R], stepped: Stepped[R]) -> None:
        """On the loop: a step is done, and the one ahead of it runs."""
        self._running = step.ahead
        self._count(stepped.step_s)
        if not step.done.done():
            step.done.set_result(stepped)

    def _ended(self, future: "asyncio.Future[R]") -> None:
        """On the loop: no step runs any more."""
        step, begun_at = self._running, self._started_at
        assert step is not None
        assert begun_at is not None
        self._running = self._started_at = None
        step_s, error = time.monotonic() - begun_at, future.exception()
        if error is not None:
            self.num_steps += 1
        else:
            self._count(step_s)
        if step.done.done():
            return  # nobody waits for it
        if error is not None:
            step.done.set_exception(error)
        else:
            step.done.set_result(Stepped(future.result(), step_s))

    def _count(self, step_s: float) -> None:
        self.num_steps += 1
        self._recent_s.append(step_s)

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
        started_at = self._started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    def close(self) -> None:
        """Waits for the running step, then ends the thread."""
        self._thread.shutdown(wait=True)


class _Once:
    """Has a function called on the loop, the first time that it is called itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
        self._call: tuple[object, ...] | None = (function, *arguments)
        self._loop = loop

    def __call__(self) -> None:
        if self._call is not None:
            call, self._call = self._call, None
            self._loop.call_soon_threadsafe(*call)  # type: ignore[arg-type]


def _on_loop(loop: asyncio.AbstractEventLoop, on_layer: OnLayer) -> OnLayer:
    """The same, for another thread to call."""

    def relay(num_layers: int) -> None:
        loop.call_soon_threadsafe(on_layer, num_layers)

    return relay
