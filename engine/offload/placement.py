"""Where each layer's weights go while a model is loaded: into memory, or through it onto disk."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Final

from torch import nn

from engine.model.layers import Layer
from engine.native.huge_memory import weights_in
from engine.offload.layer_file import LayerFile, LayerMemory
from engine.offload.offloaded_layers import OffloadedLayers
from engine.offload.residence import ROOM, layers_on_disk

logger = logging.getLogger(__name__)


class Placement:
    """To be told of every module of a model as it is loaded, in the model's order: what is before the layers, the
    layers, what is behind them. The sizes of layers are judged by that of the first one, once it is there."""

    def __init__(self, layers: Sequence[nn.Module], memory_bytes: int, folder: str) -> None:
        """Raises SettingsError when the folder cannot be written."""
        self._layers = layers
        self._number_of = {id(part): number for number, layer in enumerate(layers) for part in layer.modules()}
        self._num_elements = [sum(each.numel() for each in layer.parameters()) for layer in layers]
        self._memory_bytes: Final = memory_bytes
        self._other_bytes = self._first_bytes = 0  # of what is in no layer, and of the first one
        self._file = LayerFile(folder)
        self._on_disk: list[int] | None = None  # not known yet
        self._memory = LayerMemory()
        self._current: int | None = None
        self._written: dict[int, tuple[nn.Module, LayerMemory, int]] = {}

    @contextlib.contextmanager
    def of(self, module: Layer) -> Iterator[None]:
        """Where the module is to be filled and packed. Raises SettingsError when memory or disk are too small."""
        number = self._number_of.get(id(module))
        if number != self._current:
            self._finish_layer()
            self._current, self._memory = number, LayerMemory()
        if number is None or (self._on_disk is not None and number not in self._on_disk):
            yield
        else:
            with weights_in(self._memory):
                yield
            for parameter in module.parameters(recurse=False):
                parameter.data = self._memory.moved(parameter.data)
        if number is None:
            self._other_bytes += module.num_bytes
        elif self._on_disk is None:
            self._first_bytes += module.num_bytes

    def finish(self) -> OffloadedLayers | None:
        """To be called when all is loaded. None: all of it is in memory."""
        self._finish_layer()
        if not self._written:
            self._file.close()
            return None
        on_disk = OffloadedLayers(self._file, self._written)
        num_bytes = sum(on_disk.layer_bytes.values())
        where = f"{num_bytes} bytes, are on disk in {self._file.folder}, and {ROOM} in memory at a time"
        logger.info("%d of %d layers, %s", len(self._written), len(self._layers), where)
        return on_disk

    def _finish_layer(self) -> None:
        number, memory = self._current, self._memory
        self._current = None
        if number is None:
            return
        if self._on_disk is None:
            element_bytes = memory.num_bytes / self._num_elements[number]
            sizes = [round(element_bytes * each) for each in self._num_elements]
            stays_bytes = max(0, self._first_bytes - memory.num_bytes) * len(self._layers)  # scales, of quantized ones
            self._on_disk = layers_on_disk(sizes, self._other_bytes + stays_bytes, self._memory_bytes)
        if number in self._on_disk:
            self._written[number] = self._layers[number], memory, self._file.append(memory)
            memory.let_go()
