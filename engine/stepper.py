"""Run an engine's steps in a thread, and classify the errors of a step.

On a CUDA device the event loop's thread moves KV in a stream of its own, so that neither thread waits for the other's
queue. Between the threads the rules of host memory hold. A layer is reported, and a step is over, when the device has
computed it. A read or write of the pool is over when it returns. On a CPU, which has no streams, `StepStream` does
nothing.

Async scheduling: while a step runs, the event loop may offer the next step. When the running step is done, the thread
decides by its result whether the offered step follows. If so, that step begins at once, and meanwhile the event loop
processes the result of the first step. The end of the second step may depend on that result, so it waits until the loop
has processed it.
"""

import asyncio
import statistics
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

import torch

from engine.offload.layers_on_disk import WeightsLost
from serving_core.process import failpoints
from serving_core.requests import OnLayer

FIRST = -1  # stream priority: KV copies are short, and run before the next kernels of a step


def take_own_stream(device: torch.device) -> None:
    """Give this thread a CUDA stream of its own, after all work queued before is done; do nothing for a CPU device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=FIRST))  # type: ignore[no-untyped-call]


class StepStream:
    """The CUDA stream that computes steps: the one that is current when the object is created.

    On a CPU there is none.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def taken(self) -> AbstractContextManager[object]:
        """Return a context in which the calling thread queues its work in this stream; on a CPU it does nothing."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def step(self, on_layer: OnLayer | None = None) -> AbstractContextManager["LayerReports"]:
        """Enclose the computation of a step; the context's value reports its layers to `on_layer`.

        On exit the device has computed the step, also if it failed, so that its blocks can be reused; on success all
        layers have been reported.
        """
        layers = LayerReports(on_layer, self._stream)
        return nullcontext(layers) if self._stream is None else self._synchronized(self._stream, layers)

    @contextmanager
    def _synchronized(self, stream: torch.cuda.Stream, layers: "LayerReports") -> Iterator["LayerReports"]:
        try:
            yield layers
            layers.await_last()
        finally:
            stream.synchronize()


class LayerReports:
    """Tells a listener, `on_layer`, how many layers the device has computed.

    On a CPU the model calls the listener itself.
    """

    def __init__(self, on_layer: OnLayer | None, stream: torch.cuda.Stream | None) -> None:
        self._on_layer = on_layer
        self._stream = stream
        self._queued: deque[tuple[torch.cuda.Event, int]] = deque()

    @property
    def on_queued(self) -> OnLayer | None:
        """Return the callback that the model calls for each queued layer; None if there is no listener."""
        return self._on_layer if self._on_layer is None or self._stream is None else self._queue

    def await_all_but_last(self) -> None:
        """Wait for all queued layers but the last, and report each; what follows can be queued meanwhile."""
        while len(self._queued) > 1:
            self._await_next()

    def await_last(self) -> None:
        """Wait for all queued layers, and report each."""
        while self._queued:
            self._await_next()

    def _queue(self, num_layers: int) -> None:
        assert self._stream is not None
        while self._queued and self._queued[0][0].query():  # type: ignore[no-untyped-call]
            self._await_next()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._queued.append((event, num_layers))

    def _await_next(self) -> None:
        assert self._on_layer is not None
        event, num_layers = self._queued.popleft()
        event.synchronize()
        self._on_layer(num_layers)


OUT_OF_MEMORY: Final = 2  # CUDA error code
OF_TRITON: Final = "Triton Error [CUDA]"
OF_CPU_ALLOCATOR: Final = "DefaultCPUAllocator: can't allocate memory"
MOST_FAILED_STEPS: Final = 4  # in a row; after these the engine counts as failed


def is_fatal(error: Exception) -> bool:
    """Return whether every step after this error would fail too: the weights are lost, or the CUDA device failed.

    Lack of memory is not fatal. After a failure of the device CUDA fails every later call, the first of which may come
    from Triton.
    """
    of_device = isinstance(error, torch.AcceleratorError) or str(error).startswith(OF_TRITON)
    return isinstance(error, WeightsLost) or (of_device and not _is_out_of_memory(error))


def cause_of(error: Exception) -> str:
    """Return the cause of a failed step in words that a client may read: lack of memory, or the error's type.

    The error's own message is left out, since it may hold paths.
    """
    return "the node is out of memory" if _is_out_of_memory(error) else f"the step failed ({type(error).__name__})"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == OUT_OF_MEMORY
    text = str(error)
    return OF_CPU_ALLOCATOR in text or (text.startswith(OF_TRITON) and "out of memory" in text)


NUM_RECENT_STEPS: Final = 64
TAKEN_IN_DEADLINE_S: Final = 600.0  # for the event loop to process a step's result

P = TypeVar("P")  # one part of a step: a Work on rank 0, a Share on a follower
R = TypeVar("R")  # result of a step: the sampled tokens on rank 0, nothing on a follower
T = TypeVar("T")


class Stepped(NamedTuple, Generic[R]):
    """The result of a finished step, its duration in seconds, and whether the offered next step has begun."""

    result: R
    step_s: float
    goes_on: bool = False  # the offered next step has begun


@dataclass(eq=False)
class Step(Generic[P, R]):
    """A running step."""

    parts: Sequence[P]
    done: "asyncio.Future[Stepped[R]]"
    next_step: "NextStep[P, R] | None" = None  # the offered next step; at most one, at any time


@dataclass(eq=False)
class NextStep(Step[P, R]):
    """A step that begins as soon as the step before it is done, if `follows` accepts the result of the step before."""

    follows: Callable[[R], bool] = field(kw_only=True)  # decides by the result before, in the engine's thread
    compute: Callable[[R, Callable[[], None], Callable[[], None]], R] = field(kw_only=True)
    """Compute this step after the step before, given that step's result, in the engine's thread in inference mode.

    Calls the second argument when the computation begins, and the third before it needs what the event loop makes of
    the step before.
    """
    _until_taken_in: threading.Lock = field(default_factory=threading.Lock)
    _is_given_up: bool = False

    def __post_init__(self) -> None:
        self._until_taken_in.acquire()

    def take_in(self) -> None:
        """Signal, from the event loop, that it has processed the result of the step before; `wait` then returns.

        Either this or `give_up` may be called, once.
        """
        self._until_taken_in.release()

    def give_up(self) -> None:
        """Signal that the result of the step before is never processed; `wait` then raises, so this step fails."""
        self._is_given_up = True
        self._until_taken_in.release()

    def wait(self) -> None:
        """Block this thread until the event loop has processed the result of the step before.

        Raises RuntimeError after `give_up`, or after TAKEN_IN_DEADLINE_S seconds.
        """
        if not self._until_taken_in.acquire(timeout=TAKEN_IN_DEADLINE_S) or self._is_given_up:
            raise RuntimeError("what the step before gave was not taken in")


class Stepper(Generic[P, R]):
    """Runs an engine's steps, one at a time, in a thread of its own. One event loop owns it."""

    def __init__(self, compute: Callable[[Sequence[P], OnLayer | None], R]) -> None:
        """Run steps with `compute`, an engine's `step` or `follow`."""
        self._compute = compute
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._started_at: float | None = None
        self._running: Step[P, R] | None = None
        self.num_steps = 0

    async def run(
        self, plan: Callable[[], list[P]], step: Callable[[list[P]], Awaitable[None]], wake: asyncio.Event
    ) -> None:
        """Run steps forever: `step` is awaited with the parts that `plan` returns; without any, `wake` is awaited.

        Ends when cancelled, or with the exception of `plan` or `step`; closes the thread first, after the running step.
        """
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
        """Run a step of these parts and wait for it; return its result and its duration in seconds.

        `on_layer` is called on the event loop, never after this returns. Raises what the computation raises.
        """
        result, step_s, _ = await self.begin(parts, on_layer).done
        return result, step_s

    def begin(self, parts: Sequence[P], on_layer: OnLayer | None = None) -> Step[P, R]:
        """Start a step of these parts and return it; the caller awaits its `done`. No other step may be running.

        `on_layer` is called on the event loop, never after `done` is set.
        """
        assert self._running is None, "two steps at a time"
        loop = asyncio.get_running_loop()
        self._running = step = Step(parts, loop.create_future())
        self._started_at = time.monotonic()
        relay = None if on_layer is None else _on_loop(loop, on_layer)
        loop.run_in_executor(self._thread, self._computed, loop, step, relay).add_done_callback(self._ended)
        return step

    @torch.inference_mode()
    def _computed(self, loop: asyncio.AbstractEventLoop, step: Step[P, R], on_layer: OnLayer | None) -> R:
        """Compute, in the engine's thread, the step and the steps that follow it; return the result of the last."""
        failpoints.reach("step")
        result = self._compute(step.parts, on_layer)
        while (next_step := step.next_step) is not None and next_step.follows(result):
            now, begun_at = time.monotonic(), self._started_at
            assert begun_at is not None
            self._started_at = now
            tell = _Once(loop, self._followed, step, Stepped(result, now - begun_at, goes_on=True))
            try:
                if failpoints.is_armed:
                    failpoints.reach("step")
                result = next_step.compute(result, tell, next_step.wait)
            finally:
                tell()
            step = next_step
        return result

    def _followed(self, step: Step[P, R], stepped: Stepped[R]) -> None:
        """Finish a step, on the event loop, while the next one runs."""
        self._running = step.next_step
        self._count(stepped.step_s)
        if not step.done.done():
            step.done.set_result(stepped)

    def _ended(self, future: "asyncio.Future[R]") -> None:
        """Finish the last step, on the event loop."""
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
            return  # nobody waits for the result
        if error is not None:
            step.done.set_exception(error)
        else:
            step.done.set_result(Stepped(future.result(), step_s))

    def _count(self, step_s: float) -> None:
        self.num_steps += 1
        self._recent_s.append(step_s)

    async def between(self, compute: Callable[[], T]) -> tuple[T, float]:
        """Run `compute` in the engine's thread while no step runs; return its result and its duration in seconds."""
        assert self._started_at is None, "a step runs"
        self._started_at = time.monotonic()
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, compute)
            return result, self.step_age_s
        finally:
            self._started_at = None

    async def run_between_steps(self, compute: Callable[[], T]) -> T:
        """Run `compute` in the engine's thread after the steps that it runs already, and return its result.

        It has to be short: the next step waits for it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, compute)

    @property
    def step_s(self) -> float:
        """Return the median seconds of the last NUM_RECENT_STEPS successful steps; 0 before the first."""
        return statistics.median(self._recent_s) if self._recent_s else 0.0

    @property
    def step_age_s(self) -> float:
        """Return the seconds since the running step, or the call of `between`, began; 0 when idle."""
        started_at = self._started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    def close(self) -> None:
        """Wait for the running step, then end the thread. Blocks the caller."""
        self._thread.shutdown(wait=True)


class _Once:
    """Calls a function on the event loop, at the first call only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
        self._call: tuple[object, ...] | None = (function, *arguments)
        self._loop = loop

    def __call__(self) -> None:
        if self._call is not None:
            call, self._call = self._call, None
            self._loop.call_soon_threadsafe(*call)  # type: ignore[arg-type]


def _on_loop(loop: asyncio.AbstractEventLoop, on_layer: OnLayer) -> OnLayer:
    """Return a callback that any thread may call and that calls `on_layer` on the event loop."""

    def relay(num_layers: int) -> None:
        loop.call_soon_threadsafe(on_layer, num_layers)

    return relay
