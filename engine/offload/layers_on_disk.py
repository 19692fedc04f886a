"""Layers whose weights are on disk: read by a thread while the layers before them compute, and let go behind them."""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Final

from torch import nn

from engine.model.layers import Layer
from engine.native.huge_memory import weights_in
from engine.offload.layer_file import PIECE_BYTES, LayerFile, LayerMemory, folder_on_disk
from engine.offload.residence import Residence

logger = logging.getLogger(__name__)

READ_TIMEOUT_S: Final = 60.0  # for one layer


class WeightsLost(RuntimeError):
    """They cannot be read any more."""


class DiskStore:
    """Writes layers to a file, in the form in which kernels read them."""

    def __init__(self, folder: str) -> None:
        """Raises SettingsError when the folder cannot be written, or is in memory."""
        self._file = LayerFile(folder_on_disk(folder))
        self._memory = LayerMemory()
        self._written: dict[int, tuple[nn.Module, LayerMemory, int]] = {}

    def begin(self) -> None:
        self._memory = LayerMemory()

    @contextlib.contextmanager
    def holding(self, module: Layer) -> Iterator[None]:
        with weights_in(self._memory):
            yield
        for parameter in module.parameters(recurse=False):
            parameter.data = self._memory.moved(parameter.data)

    @property
    def held_bytes(self) -> int:
        return self._memory.num_bytes

    def offload(self, number: int, layer: nn.Module) -> None:
        self._written[number] = layer, self._memory, self._file.append(self._memory)
        self._memory.let_go()

    def finish(self) -> "LayersOnDisk | None":
        if self._written:
            return LayersOnDisk(self._file, self._written)
        self._file.close()
        return None


class LayersOnDisk:
    """Reads ahead for one model, whose layers say when they begin and end. Made of layers that were written to the file
    and are not in memory."""

    where: Final = "on disk"

    def __init__(self, file: LayerFile, layers: Mapping[int, tuple[nn.Module, LayerMemory, int]]) -> None:
        """Each with its memory and its place in the file."""
        self.layer_bytes: Final = {number: memory.num_bytes for number, (_, memory, _) in layers.items()}
        self.num_read_bytes = 0
        self.read_s = 0.0
        self._file = file
        self._places = {number: (memory, start) for number, (_, memory, start) in layers.items()}
        self._residence = Residence(list(layers))
        self._loaded: set[int] = set()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._is_closed = False
        for number, (module, _, _) in layers.items():
            module.register_forward_pre_hook(lambda *_, number=number: self._begin(number))
            module.register_forward_hook(lambda *_, number=number: self._end(number))
            weakref.finalize(module, self.close)
        threading.Thread(target=self._read_ahead, name="weights", daemon=True).start()

    def read_alone(self) -> tuple[int, float]:
        """Reads all of them once, for nothing; to be called between steps. Gives bytes and seconds. Raises OSError."""
        scratch = LayerMemory()
        scratch.empty(PIECE_BYTES)
        num_pieces = sum(self.layer_bytes.values()) // PIECE_BYTES
        began_s = time.perf_counter()
        for piece in range(num_pieces):
            self._file.read(scratch, piece * PIECE_BYTES)
        return num_pieces * PIECE_BYTES, time.perf_counter() - began_s

    def close(self) -> None:
        """Ends the thread, soon. No layer is to compute any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _begin(self, layer: int) -> None:
        """Waits until it is there. Raises WeightsLost when it cannot be read."""
        with self._changed:
            self._residence.begin(layer)
            self._changed.notify_all()
            is_there = self._changed.wait_for(lambda: layer in self._loaded or self._error, READ_TIMEOUT_S)
        if self._error is not None:
            raise WeightsLost(f"weights cannot be read from {self._file.folder}: {self._error}") from self._error
        if not is_there:
            raise WeightsLost(f"weights were not read from {self._file.folder} within {READ_TIMEOUT_S:g} s")

    def _end(self, layer: int) -> None:
        with self._changed:
            self._residence.end(layer)
            self._changed.notify_all()

    def _read_ahead(self) -> None:
        try:
            while (layer := self._next()) is not None:
                memory, start = self._places[layer]
                began_s = time.perf_counter()
                self._file.read(memory, start)
                with self._changed:
                    self.read_s += time.perf_counter() - began_s
                    self.num_read_bytes += self.layer_bytes[layer]
                    self._loaded.add(layer)
                    self._changed.notify_all()
        except Exception as error:  # for the thread that computes
            logger.debug("reading weights failed", exc_info=True)
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._file.close()

    def _next(self) -> int | None:
        """Lets layers go that are not wanted, and waits for one that is; None: it is over."""
        with self._changed:
            while not self._is_closed:
                to_let_go, to_read = self._residence.next_move(self._loaded)
                for layer in to_let_go:
                    self._places[layer][0].let_go()
                    self._loaded.discard(layer)
                if to_read is not None:
                    return to_read
                self._changed.wait()
        return None
