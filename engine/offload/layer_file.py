"""The memory of a layer's weights, and the file that it is put into and read from again, at the same addresses."""

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import torch

from engine.native.huge_memory import ALIGNMENT, CHUNK_BYTES, huge_chunk
from serving_core.errors import SettingsError

IN_MEMORY: Final = ("tmpfs", "ramfs")
PIECE_BYTES: Final = 8 * 2**20  # that are read or written at once
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class LayerMemory:
    """Gives out tensors, in chunks that nothing else is in."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._used_bytes: list[int] = []  # of each

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Bytes of any content, which start at a multiple of ALIGNMENT. Raises OSError when there is no memory."""
        reserved = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if not self._chunks or self._used_bytes[-1] + reserved > self._chunks[-1].nbytes:
            self._chunks.append(huge_chunk(max(reserved, CHUNK_BYTES)))
            self._used_bytes.append(0)
        start = self._used_bytes[-1]
        self._used_bytes[-1] += reserved
        return self._chunks[-1][start : start + num_bytes]

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in this memory."""
        copy = self.empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)

    @property
    def num_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.pages())

    def pages(self) -> Iterator[torch.Tensor]:
        """All that was given out, in whole pages."""
        for chunk, used_bytes in zip(self._chunks, self._used_bytes, strict=True):
            yield chunk[: min(chunk.nbytes, -(-used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)]

    def let_go(self) -> None:
        """Its content is lost, and it takes no memory until it is written again."""
        for pages in self.pages():
            if _LIBC.madvise(pages.data_ptr(), pages.nbytes, mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "memory cannot be let go")


def folder_on_disk(given: str) -> str:
    """The folder for layers: the one given, or that for temporary files, or /var/tmp where that is in memory, as it is
    in many containers. Raises SettingsError where there is none on a disk."""
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
    """A file without a name, gone with the process. Past the page cache, where the file system can do that: what is
    read is read once a step, and would take memory twice."""

    def __init__(self, folder: str) -> None:
        """Raises SettingsError when there can be none in this folder."""
        self.folder: Final = folder
        try:
            self._file, path = tempfile.mkstemp(prefix="splitserve-weights-", dir=self.folder)
            try:
                with contextlib.suppress(OSError):  # of memory file systems, and some others
                    direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
                    os.close(self._file)
                    self._file = direct
            finally:
                os.unlink(path)
        except OSError as error:
            raise SettingsError(f"--weights-disk-path {self.folder}: {error.strerror}") from error
        self._end = 0

    def append(self, memory: LayerMemory) -> int:
        """Writes it; gives where. Raises SettingsError when the disk is full."""
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
        """Fills it again with what was written at `start`. Raises OSError."""
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
