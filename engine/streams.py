"""Order the work of two threads on one CUDA device: the engine's thread computes steps, and the event loop's thread
moves KV in a stream of its own, so that neither waits for the other's queue.

Between the threads the rules of host memory hold. A layer is reported, and a step is over, when the device has computed
it. A read or write of the pool is over when it returns. On a CPU, which has no streams, these functions do nothing.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from serving_core.requests import OnLayer

FIRST = -1  # stream priority: KV copies are short, and run before the next kernels of a step


def take_own_stream(device: torch.device) -> None:
    """Give this thread a stream of its own, ordered after all work queued before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=FIRST))  # type: ignore[no-untyped-call]


class StepStream:
    """The stream that computes steps: the stream that is current at construction."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def taken(self) -> AbstractContextManager[object]:
        """Return a context in which another thread works in this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def step(self, on_layer: OnLayer | None = None) -> Iterator["LayerReports"]:
        """Enclose the computation of a step. On exit the device has computed it, also if the step failed, so that its
        blocks can be reused.
        """
        layers = LayerReports(on_layer, self._stream)
        try:
            yield layers
            layers.await_last()
        finally:
            if self._stream is not None:
                self._stream.synchronize()


class LayerReports:
    """Reports layers when the device has computed their queued kernels. On a CPU nothing is queued."""

    def __init__(self, on_layer: OnLayer | None, stream: torch.cuda.Stream | None) -> None:
        self._on_layer = on_layer
        self._stream = stream
        self._queued: deque[tuple[torch.cuda.Event, int]] = deque()

    @property
    def on_queued(self) -> OnLayer | None:
        """Return the callback for the model; None if there is no listener."""
        return self._on_layer if self._on_layer is None or self._stream is None else self._queue

    def await_all_but_last(self) -> None:
        """Report all layers but the last, so that the work after the layers can be queued meanwhile."""
        while len(self._queued) > 1:
            self._await_next()

    def await_last(self) -> None:
        """Report all layers."""
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
