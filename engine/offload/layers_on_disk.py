"""Offload weights to disk: a thread reads the weights of a layer while the layers before it compute."""

import contextlib
import ctypes
import logging
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import psutil
import torch
from torch import nn

from engine.model.layers import Layer
from engine.native.huge_memory import ALIGNMENT, CHUNK_BYTES, huge_chunk, weights_in
from engine.offload.residence import Residence
from serving_core.errors import SettingsError

IN_MEMORY: Final = ("tmpfs", "ramfs")
PIECE_BYTES: Final = 8 * 2**20  # read or written at once
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class LayerMemory:
    """Allocates the tensors of one layer, in chunks that hold no other layer's."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._used_bytes: list[int] = []  # by chunk

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return num_bytes uninitialized bytes (1-D uint8), aligned to ALIGNMENT. Raises OSError if memory is short."""
        reserved = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if not self._chunks or self._used_bytes[-1] + reserved > self._chunks[-1].nbytes:
            self._chunks.append(huge_chunk(max(reserved, CHUNK_BYTES)))
            self._used_bytes.append(0)
        start = self._used_bytes[-1]
        self._used_bytes[-1] += reserved
        return self._chunks[-1][start : start + num_bytes]

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the tensor in this memory."""
        copy = self.empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)

    @property
    def num_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.pages())

    def pages(self) -> Iterator[torch.Tensor]:
        """Yield all allocated memory, in runs of whole pages."""
        for chunk, used_bytes in zip(self._chunks, self._used_bytes, strict=True):
            yield chunk[: min(chunk.nbytes, -(-used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)]

    def let_go(self) -> None:
        """Give the memory's pages back to the system; their content is lost, and they may be written again.

        Raises OSError if the system refuses.
        """
        for pages in self.pages():
            if _LIBC.madvise(pages.data_ptr(), pages.nbytes, mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "memory cannot be let go")


def folder_on_disk(given: str) -> str:
    """Return a folder for offloaded layers that is on a disk.

    It is `given`, or if that is empty the folder for temporary files, or /var/tmp if that folder is in memory, as in
    many containers. Raises SettingsError if `given` is in memory, or if none of the others is on a disk.
    """
    if given:
        if _is_in_memory(given):
            raise SettingsError(f"--weights-disk-path {given} is in memory: name a folder on a disk")
        return given
    for folder in (tempfile.gettempdir(), "/var/tmp"):
        if os.access(folder, os.W_OK) and not _is_in_memory(folder):
            return folder
    raise SettingsError("--weights-disk-path is needed: folders for temporary files are in memory here")


def _is_in_memory(folder: str) -> bool:
    place = Path(folder).resolve()
    above = [each for each in psutil.disk_partitions(all=True) if place.is_relative_to(each.mountpoint)]
    return bool(above) and max(above, key=lambda each: len(each.mountpoint)).fstype in IN_MEMORY


class LayerFile:
    """A temporary file of layers' weights without a name, which disappears with the process.

    It bypasses the page cache where the file system supports that: each byte is read once per step, and would take
    memory twice.
    """

    def __init__(self, folder: str) -> None:
        """Create the file. Raises SettingsError if the folder does not allow it."""
        self.folder: Final = folder
        try:
            self._file, path = tempfile.mkstemp(prefix="splitserve-weights-", dir=self.folder)
            try:
                with contextlib.suppress(OSError):  # memory file systems, and some others, do not support it
                    direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
                    os.close(self._file)
                    self._file = direct
            finally:
                os.unlink(path)
        except OSError as error:
            raise SettingsError(f"--weights-disk-path {self.folder}: {error.strerror}") from error
        self._end = 0

    def append(self, memory: LayerMemory) -> int:
        """Write a layer's memory at the end of the file; return its position in bytes.

        Raises SettingsError if the disk is full or fails.
        """
        start = at = self._end
        try:
            os.posix_fallocate(self._file, start, memory.num_bytes)
            for piece in _pieces(memory):
                _whole(os.pwritev(self._file, [piece], at), piece)
                at += len(piece)
            os.fsync(self._file)
        except OSError as error:
            said = f"--weights-disk-path {self.folder} does not take {self._end + memory.num_bytes} bytes of weights"
            raise SettingsError(f"{said}: {error.strerror}") from error
        self._end = at
        return start

    def read(self, memory: LayerMemory, start: int) -> None:
        """Fill a layer's memory with the bytes written at position `start`. Raises OSError."""
        at = start
        for piece in _pieces(memory):
            _whole(os.preadv(self._file, [piece], at), piece)
            at += len(piece)

    def close(self) -> None:
        os.close(self._file)


def _pieces(memory: LayerMemory) -> Iterator[memoryview]:
    for pages in memory.pages():
        view = memoryview(pages.numpy().data)
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _whole(num_bytes: int, piece: memoryview) -> None:
    if num_bytes != len(piece):
        raise OSError(0, f"{num_bytes} bytes of {len(piece)} were read or written")


logger = logging.getLogger(__name__)

READ_TIMEOUT_S: Final = 60.0  # for one layer


class WeightsLost(RuntimeError):
    """The offloaded weights cannot be read any more."""


class DiskStore:
    """A LayerStore that writes layers to a file, in the form in which kernels read them."""

    def __init__(self, folder: str) -> None:
        """Create the file. Raises SettingsError if the folder is not writable or is in memory."""
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
    """Reads the offloaded layers of one model from the file ahead of their use, by hooks at a layer's begin and end.

    The layers are in the file and not in memory at first.
    """

    where: Final = "on disk"

    def __init__(self, file: LayerFile, layers: Mapping[int, tuple[nn.Module, LayerMemory, int]]) -> None:
        """Register hooks on these layers, by number; each comes with its memory and its position in the file."""
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
        """Read all offloaded layers once as a measurement, between steps; return the bytes and the seconds taken.

        Raises OSError.
        """
        scratch = LayerMemory()
        scratch.empty(PIECE_BYTES)
        num_pieces = sum(self.layer_bytes.values()) // PIECE_BYTES
        began_s = time.perf_counter()
        for piece in range(num_pieces):
            self._file.read(scratch, piece * PIECE_BYTES)
        return num_pieces * PIECE_BYTES, time.perf_counter() - began_s

    def close(self) -> None:
        """End the thread that reads. No offloaded layer may compute afterwards."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _begin(self, layer: int) -> None:
        """Wait until the layer is in memory. Raises WeightsLost if it cannot be read."""
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
        except Exception as error:  # reported to the computing thread
            logger.debug("reading weights failed", exc_info=True)
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._file.close()

    def _next(self) -> int | None:
        """Free layers that are not wanted and wait for a layer to read; None after close."""
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
