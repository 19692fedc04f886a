"""Offload weights to host memory: a stream of its own copies a layer's weights to one of a few buffers on the device
while the layers before it compute.

Streams wait for each other; the host waits for none. A copy waits for all work queued when it was requested, including
the layer that used its buffer before; a layer waits for its own copy. On a CPU, which has no streams, the same code
copies at once; only tests use that.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from engine.model.layers import Layer
from engine.offload.residence import ROOM, Residence
from serving_core.errors import SettingsError
from serving_core.process.memory import available_bytes

ALIGNMENT: Final = 512  # torch's alignment on a device, since the choice of kernels may depend on it
PIECE_BYTES: Final = 64 * 2**20  # pinned at once: torch rounds up to the next power of two


class HostStore:
    """A LayerStore that moves layers from the device to host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self._layers: dict[int, HostLayer] = {}

    def begin(self) -> None:
        self._tensors = []

    @contextlib.contextmanager
    def holding(self, module: Layer) -> Iterator[None]:
        yield
        self._tensors += module.tensors

    @property
    def held_bytes(self) -> int:
        return sum(map(_reserved, self._tensors))

    def offload(self, number: int, layer: nn.Module) -> None:
        if (num_bytes := self.held_bytes) > (free_bytes := available_bytes()):
            said = f"a layer takes {num_bytes} bytes of host memory, and {free_bytes} are free"
            raise SettingsError(f"--weights-memory-bytes: {said}")
        try:
            self._layers[number] = HostLayer(layer, self._tensors, self._device)
        except RuntimeError as error:
            raise SettingsError(f"--weights-memory-bytes: {num_bytes} bytes cannot be pinned: {error}") from error

    def finish(self) -> "LayersOnHost | None":
        return LayersOnHost(self._layers, self._device) if self._layers else None


class HostLayer:
    """One offloaded layer, whose weights lie in host memory.

    Without a buffer on the device its tensors are only shapes, not on the CPU: kernels that use them fail.
    """

    def __init__(self, module: nn.Module, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Move the tensors off the device. Raises RuntimeError if memory is short."""
        self.module: Final = module
        self._tensors = tensors
        self._nowhere = [torch.zeros((), dtype=each.dtype, device="cpu").expand(each.shape) for each in tensors]
        self.num_bytes: Final = sum(map(_reserved, tensors))
        together = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        for view, tensor in zip(self.views(together), tensors, strict=True):
            view.copy_(tensor)
        self._pieces = [_pinned(piece) for piece in torch.split(together, PIECE_BYTES)]
        self.bind(None)

    def views(self, place: torch.Tensor) -> list[torch.Tensor]:
        """Return the layer's tensors as views of `place`, a buffer of bytes on the device."""
        starts = itertools.accumulate(map(_reserved, self._nowhere), initial=0)
        return [
            place[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, self._nowhere, strict=False)
        ]

    def bind(self, views: Sequence[torch.Tensor] | None) -> None:
        """Make the layer's tensors these views of a buffer, as returned by `views`; None: the layer cannot compute.

        Copies no weights: `copy_to` that buffer before the layer computes.
        """
        for tensor, view in zip(self._tensors, views or self._nowhere, strict=True):
            tensor.data = view

    def copy_to(self, place: torch.Tensor) -> None:
        """Queue a copy of the weights to the buffer `place`, in the current stream."""
        for piece, part in zip(self._pieces, torch.split(place[: self.num_bytes], PIECE_BYTES), strict=True):
            part.copy_(piece, non_blocking=True)


class LayersOnHost:
    """Copies the offloaded layers of one model to the device ahead of their use, by hooks at a layer's begin and end.

    One thread at a time may use it.
    """

    where: Final = "in host memory"

    def __init__(self, layers: Mapping[int, HostLayer], device: torch.device) -> None:
        self.layer_bytes: Final = {number: layer.num_bytes for number, layer in layers.items()}
        self.num_read_bytes = 0
        self._layers, self._device = layers, device
        self._streams = torch.get_device_module(device)
        self._copying = self._streams.Stream(device)
        self._places = [
            torch.empty(max(self.layer_bytes.values()), dtype=torch.uint8, device=device) for _ in range(ROOM)
        ]
        self._copied = [self._streams.Event() for _ in self._places]
        self._views = {number: [layer.views(place) for place in self._places] for number, layer in layers.items()}
        self._free = list(range(ROOM))  # buffers
        self._place_of: dict[int, int] = {}
        self._residence = Residence(list(layers))
        for place in self._places:
            if place.is_cuda:
                place.record_stream(self._copying)  # so that torch does not reuse the freed buffer during a copy
        for number, layer in layers.items():
            layer.module.register_forward_pre_hook(lambda *_, number=number: self._begin(number))
            layer.module.register_forward_hook(lambda *_, number=number: self._end(number))

    def read_alone(self) -> tuple[int, float]:
        """Copy all offloaded layers once as a measurement, between steps; return the bytes and the seconds taken."""
        self._streams.synchronize(self._device)
        before, began_s = self.num_read_bytes, time.perf_counter()
        for number in self._layers:
            self._begin(number)
            self._end(number)
        self._streams.synchronize(self._device)
        return self.num_read_bytes - before, time.perf_counter() - began_s

    def _begin(self, layer: int) -> None:
        self._residence.begin(layer)
        self._read_ahead()
        self._streams.current_stream(self._device).wait_event(self._copied[self._place_of[layer]])

    def _end(self, layer: int) -> None:
        self._residence.end(layer)
        self._read_ahead()

    def _read_ahead(self) -> None:
        while True:
            to_let_go, to_read = self._residence.next_move(self._place_of)
            for layer in to_let_go:
                self._layers[layer].bind(None)
                self._free.append(self._place_of.pop(layer))
            if to_read is None:
                return
            self._copy(to_read, self._free.pop())

    def _copy(self, layer: int, place: int) -> None:
        self._copying.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._copying):
            self._layers[layer].copy_to(self._places[place])
        self._copied[place].record(self._copying)
        self._layers[layer].bind(self._views[layer][place])
        self._place_of[layer] = place
        self.num_read_bytes += self.layer_bytes[layer]


def _reserved(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _pinned(piece: torch.Tensor) -> torch.Tensor:
    return torch.empty(piece.shape, dtype=piece.dtype, device="cpu", pin_memory=piece.is_cuda).copy_(piece)
