"""Decide which layers' weights stay in memory, and where the others go (weight offload)."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

import torch
from torch import nn

from engine.model.layers import Layer
from engine.model.llama import OffloadedLayers
from engine.offload.layers_on_disk import DiskStore
from engine.offload.layers_on_host import HostStore
from engine.offload.residence import ROOM, layers_elsewhere
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings


class LayerStore(Protocol):
    """Receives layers one at a time, as they are loaded, and keeps those that are offloaded."""

    def begin(self) -> None:
        """Forget the modules of the last layer, and start the next layer."""

    def holding(self, module: Layer) -> AbstractContextManager[None]:
        """Return a context in which a module of the current layer is filled and packed."""

    @property
    def held_bytes(self) -> int:
        """Return how many bytes of the current layer can be offloaded."""

    def offload(self, number: int, layer: nn.Module) -> None:
        """Offload the current layer, whose number in the model is `number`.

        Raises SettingsError without space for it.
        """

    def finish(self) -> OffloadedLayers | None:
        """Return the offloaded layers, after all layers were loaded; None if none was offloaded."""


logger = logging.getLogger(__name__)


def choose_store(settings: EngineSettings, device: torch.device) -> LayerStore:
    """Return the store for offloaded layers: a file beside a CPU, host memory beside other devices.

    Raises SettingsError for unsupported settings.
    """
    if device.type == "cpu":
        return DiskStore(settings.weights_disk_path)
    if settings.weights_disk_path:
        raise SettingsError(f"--weights-disk-path: beside {device.type} layers are in host memory, and not on disk")
    if settings.batch_invariant:
        said = "--batch-invariant tries products out at the start, and not all are on the device then"
        raise SettingsError(f"--weights-memory-bytes: {said}")
    return HostStore(device)


class Placement:
    """Decides, as a model is loaded, which of its layers are offloaded, and offloads them.

    Modules come in the model's order: those before the layers, the layers, those behind them. The first layer's size
    stands for all.
    """

    def __init__(self, layers: Sequence[nn.Module], memory_bytes: int, store: LayerStore) -> None:
        self._layers = layers
        self._number_of = {id(part): number for number, layer in enumerate(layers) for part in layer.modules()}
        self._num_elements = [sum(each.numel() for each in layer.parameters()) for layer in layers]
        self._memory_bytes: Final = memory_bytes
        self._other_bytes = self._first_bytes = 0  # bytes outside the layers, and of the first layer
        self._store = store
        self._elsewhere: list[int] | None = None  # unknown before the first layer is loaded
        self._current: int | None = None

    @contextlib.contextmanager
    def of(self, module: Layer) -> Iterator[None]:
        """Return a context that provides the memory in which the module is filled and packed.

        Raises SettingsError if memory or offload space is too small.
        """
        number = self._number_of.get(id(module))
        if number != self._current:
            self._finish_layer()
            self._current = number
            self._store.begin()
        if number is None or (self._elsewhere is not None and number not in self._elsewhere):
            yield
        else:
            with self._store.holding(module):
                yield
        if number is None:
            self._other_bytes += module.num_bytes
        elif self._elsewhere is None:
            self._first_bytes += module.num_bytes

    def finish(self) -> OffloadedLayers | None:
        """Return the offloaded layers, after the whole model is loaded; None if all weights are on their device."""
        self._finish_layer()
        offloaded = self._store.finish()
        if offloaded is not None:
            what = f"{len(offloaded.layer_bytes)} of {len(self._layers)} layers, {sum(offloaded.layer_bytes.values())}"
            how = f"{ROOM} are read at a time, and no decode step is computed as one program or graph"
            logger.info("%s bytes, are %s: %s", what, offloaded.where, how)
        return offloaded

    def _finish_layer(self) -> None:
        number, self._current = self._current, None
        if number is None:
            return
        if self._elsewhere is None:
            held_bytes = self._store.held_bytes
            element_bytes = held_bytes / self._num_elements[number]
            sizes = [round(element_bytes * each) for each in self._num_elements]
            stays_bytes = max(0, self._first_bytes - held_bytes) * len(self._layers)  # scales of quantized layers
            self._elsewhere = layers_elsewhere(sizes, self._other_bytes + stays_bytes, self._memory_bytes)
        if number in self._elsewhere:
            self._store.offload(number, self._layers[number])
