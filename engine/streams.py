"""Two threads on one CUDA device: the engine's computes steps, and the event loop's moves KV in a stream of its own,
so that neither waits for what the other has queued.

Between the two holds what holds in host memory. A layer is told of, and a step is over, when the device has computed
it. A read or a write of the pool is over when it returns. A CPU has no streams, and nothing is done for it here.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from serving_core.requests import OnLayer

FIRST = -1  # a priority: what moves KV is short, and goes before the next part of a step


def take_own_stream(device: torch.device) -> None:
    """From now on what this thread does on the device is in a stream of its own, behind all that was queued before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=FIRST))  # type: ignore[no-untyped-call]


class StepStream:
    """The stream that steps are computed in: the one that is current where this is made."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def taken(self) -> AbstractContextManager[object]:
        """For another thread: what it does within is done in this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def step(self, on_layer: OnLayer | None = None) -> Iterator["LayerReports"]:
        """Within it a step is computed, and over behind it: also one that fails, whose blocks go to others."""
        layers = LayerReports(on_layer, self._stream)
        try:
            yield layers
            layers.await_last()
        finally:
            if self._stream is not None:
                self._stream.synchronize()


class LayerReports:
    """Hears of layers whose kernels are queued, and tells of them when these are done. A CPU queues nothing."""

    def __init__(self, on_layer: OnLayer | None, stream: torch.cuda.Stream | None) -> None:
        self._on_layer = on_layer
        self._stream = stream
        self._queued: deque[tuple[torch.cuda.Event, int]] = deque()

    @property
    def on_queued(self) -> OnLayer | None:
        """For the model; None where nobody wants to hear."""
        return self._on_layer if self._on_layer is None or self._stream is None else self._queue

    def await_all_but_last(self) -> None:
        """Tells of all but the last one, which what comes behind the layers may be queued beside."""
        while len(self._queued) > 1:
            self._await_next()

    def await_last(self) -> None:
        """Tells of all."""
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
