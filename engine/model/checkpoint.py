"""Read parts of tensors from a model's files: safetensors and GGUF."""

import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open

from engine.model.linear_attention_files import LinearAttentionFiles
from serving_core.errors import ModelError
from serving_core.json_fields import read_json_object
from serving_core.model_files.config import read_model_config, text_names
from serving_core.model_files.gguf_header import GgufTensor
from serving_core.model_files.gguf_weights import gguf_weights
from serving_core.model_files.stored_tensors import FLOATS, tensor_places
from serving_core.sharding import Extent, whole

AHEAD_BYTES: Final = 256 * 2**20  # in the page cache, which may count as this process's memory
PIECE_BYTES: Final = 2**20  # a kernel handles at most this much of one advice

T = TypeVar("T")


class Span(NamedTuple):
    """The bytes `start` to `stop` of a file."""

    file: Path
    start: int
    stop: int

    def of_rows(self, rows: Extent) -> "Span":
        """Return the bytes of the rows that `rows` holds, of a span that covers all `rows.total` rows."""
        row_bytes = (self.stop - self.start) // max(1, rows.total)
        return Span(self.file, self.start + rows.held.start * row_bytes, self.start + rows.held.stop * row_bytes)


def read_ahead(items: Sequence[T], spans_of: Callable[[T], Iterable[Span]]) -> Generator[T]:
    """Yield the items in order while the kernel reads the files of the following items ahead.

    `spans_of` gives the file ranges of an item. AHEAD_BYTES are read ahead, or at least one item. Close the generator
    unless it is exhausted.
    """
    coming, sizes, ahead_bytes = iter(items), deque[int](), 0
    reader = ThreadPoolExecutor(1, "read ahead")
    try:
        for item in items:
            while ahead_bytes < AHEAD_BYTES and (following := next(coming, None)) is not None:
                spans = list(spans_of(following))
                sizes.append(sum(span.stop - span.start for span in spans))
                ahead_bytes += sizes[-1]
                reader.submit(_advise, spans)
            yield item
            ahead_bytes -= sizes.popleft()
    finally:
        reader.shutdown(cancel_futures=True)


def _advise(spans: Sequence[Span]) -> None:
    """Ask the kernel to read ahead. Errors are ignored here, as the read itself reports them."""
    for file, start, stop in spans:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset in range(start, stop, PIECE_BYTES):
                os.posix_fadvise(descriptor, offset, min(PIECE_BYTES, stop - offset), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


MAPPED_BYTES: Final = 32 * 2**20  # mapped pages count as this process's memory, so mappings are released this often
INTEGERS: Final = ("I32",)
MOST_STORED_BYTES: Final = 4


class Part(NamedTuple):
    """A tensor of the checkpoint by name, the shape that the model requires, and the part that this rank wants."""

    name: str
    extents: tuple[Extent, ...]
    dtypes: tuple[str, ...] = FLOATS  # of which the tensor must have one

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(extent.total for extent in self.extents)


def whole_tensor(name: str, shape: Sequence[int], dtypes: tuple[str, ...]) -> Part:
    """Return a Part that wants all of a tensor of this name, shape and one of these dtypes."""
    return Part(name, tuple(map(whole, shape)), dtypes)


class Checkpoint(ABC):
    """The tensors of a model, by name."""

    @abstractmethod
    def names(self) -> set[str]:
        """Return the names of all tensors."""

    @abstractmethod
    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape of a tensor, and the name of the dtype that `read` returns."""

    @abstractmethod
    def read(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the wanted part of a tensor in pieces of some rows, in order.

        Each piece comes with the index of its first row among the wanted rows, and has only the wanted columns.
        """

    def spans(self, part: Part) -> Iterator[Span]:
        """Yield the file ranges that `read` will read for this part; nothing if unknown."""
        yield from ()

    def stored_bytes(self, part: Part) -> int:
        """Return how many bytes `read` will read from files for this part; 0 if unknown."""
        return sum(span.stop - span.start for span in self.spans(part))

    def check(self, part: Part) -> None:
        """Raise ModelError unless the tensor has the shape of `part` and one of its dtypes.

        The tensor must exist: its name is one of `names`.
        """
        shape, dtype = self.describe(part.name)
        if shape != part.shape:
            raise ModelError(f"{part.name} has shape {list(shape)}, and the model wants {list(part.shape)}")
        if dtype not in part.dtypes:
            raise ModelError(f"{part.name} is stored as {dtype}; supported are {', '.join(part.dtypes)}")

    def read_all(self, part: Part) -> torch.Tensor:
        """Return a copy of the wanted part of a tensor."""
        return torch.cat([tensor for _, tensor in self.read(part)])


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of several safetensors files. Files are mapped as needed and released every MAPPED_BYTES."""

    def __init__(self, files: Sequence[Path], root: str = "") -> None:
        """Open the files.

        Names get the prefix `root` if none in the files has it, as in a decoder stored without its head. Raises
        ModelError if a file is not a safetensors file.
        """
        self._open: dict[Path, Any] = {}
        self._mapped_bytes = 0
        self._places: dict[Path, dict[str, range]] = {}
        file_of = {name: file for file in files for name in self._handle(file).keys()}  # noqa: SIM118
        self._missing = "" if any(name.startswith(root) for name in file_of) else root
        self._file_of = {self._missing + name: file for name, file in file_of.items()}

    def names(self) -> set[str]:
        return set(self._file_of)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        tensor = self._slice(name)
        return tuple(tensor.get_shape()), tensor.get_dtype()

    def read(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the wanted part of a tensor in pieces of some rows, in order, mapped from the file.

        Each piece comes with the index of its first row among the wanted rows, and has only the wanted columns.
        """
        rows, *columns = (slice(extent.held.start, extent.held.stop) for extent in part.extents)
        row_bytes = MOST_STORED_BYTES * math.prod(part.shape[1:])  # gaps between columns may be mapped as well
        num_rows = max(1, MAPPED_BYTES // row_bytes)
        for row in range(rows.start, rows.stop, num_rows):
            tensor = self._slice(part.name)[(slice(row, min(row + num_rows, rows.stop)), *columns)]
            yield row - rows.start, tensor
            self._mapped_bytes += tensor.shape[0] * row_bytes
            if self._mapped_bytes >= MAPPED_BYTES:
                self._open.clear()
                self._mapped_bytes = 0

    def spans(self, part: Part) -> Iterator[Span]:
        """Yield the file range of the rows that `part` wants, with all of their columns."""
        file = self._file_of[part.name]
        if file not in self._places:
            self._places[file] = tensor_places(file)
        place = self._places[file][part.name.removeprefix(self._missing)]
        rows = part.extents[0] if part.extents else whole(1)
        yield Span(file, place.start, place.stop).of_rows(rows)

    def read_all(self, part: Part) -> torch.Tensor:
        """Return a copy of the wanted part of a tensor, which may be a scalar."""
        if not part.extents:
            return torch.as_tensor(self._slice(part.name)[...]).clone()
        return super().read_all(part)

    def _slice(self, name: str) -> Any:
        return self._handle(self._file_of[name]).get_slice(name.removeprefix(self._missing))

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} is not a safetensors file: {error}") from error
        return self._open[file]


class TextPart(Checkpoint):
    """The text tensors of a multimodal model, under the names of a plain decoder."""

    def __init__(self, whole: Checkpoint) -> None:
        self._whole = whole
        self._stored = text_names(whole.names())

    def names(self) -> set[str]:
        return set(self._stored)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        return self._whole.describe(self._stored[name])

    def read(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        return self._whole.read(part._replace(name=self._stored[part.name]))

    def spans(self, part: Part) -> Iterator[Span]:
        return self._whole.spans(part._replace(name=self._stored[part.name]))

    def read_all(self, part: Part) -> torch.Tensor:
        return self._whole.read_all(part._replace(name=self._stored[part.name]))


PIECE_ELEMENTS: Final = 2**17  # converted to floats by a thread at once: about the size of its cache
PIECES_AHEAD: Final = 4  # most pieces per thread that wait to be consumed


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF model as float32, whatever format they are stored in.

    Reads some whole rows at a time, with as many threads as torch uses; only few rows are floats at any time.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises ModelError if the files differ from those that the folder was made of."""
        self._weights = gguf_weights(folder)
        self._head_dim = read_model_config(folder).head_dim
        config = read_json_object(folder / "config.json")
        self._linear = LinearAttentionFiles(config) if "linear_num_key_heads" in config else None
        num_threads = torch.get_num_threads()
        self._at_once = num_threads * PIECES_AHEAD
        # A single extra thread would only add switches.
        self._map = map if num_threads == 1 else ThreadPoolExecutor(num_threads, "gguf").map

    def names(self) -> set[str]:
        return set(self._weights.tensors)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        return self._weights.tensors[name].shape, "F32"

    def read(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        if self._linear is None or not self._linear.changes(part.name):
            yield from self._read(part)
            return
        stored = torch.cat([piece for _, piece in self._read(whole_tensor(part.name, part.shape, part.dtypes))])
        held = tuple(slice(extent.held.start, extent.held.stop) for extent in part.extents)
        yield 0, self._linear.restored(part.name, stored)[held]

    def _read(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        tensor, is_interleaved = self._weights.tensors[part.name], self._weights.is_interleaved(part.name)
        addend = self._weights.addend(part.name)
        is_vector = len(part.extents) == 1
        rows, columns = (whole(1), part.extents[0]) if is_vector else (part.extents[0], part.extents[-1])
        between = [extent.total for extent in part.extents[1:-1]]
        if math.prod(between) > 1:
            shape = f"{part.name} has shape {list(part.shape)} in the GGUF file"
            raise ModelError(f"{shape}; a dimension between the first and the last must be 1")
        step = max(1, PIECE_ELEMENTS // columns.total)
        if is_interleaved:  # whole heads
            step = self._head_dim * max(1, step // self._head_dim)
        pieces = [range(row, min(row + step, rows.held.stop)) for row in range(rows.held.start, rows.held.stop, step)]
        with self._weights.open() as streams:
            file = streams[tensor.part].fileno()

            def read(piece: range) -> torch.Tensor:
                floats = torch.from_numpy(_floats(file, tensor, piece, columns))
                floats = floats[0] - addend if is_vector else floats
                floats = _halves_of_heads(floats, self._head_dim) if is_interleaved else floats
                return floats.reshape(len(floats), *between, -1) if between else floats

            for first in range(0, len(pieces), self._at_once):
                some = pieces[first : first + self._at_once]
                for piece, floats in zip(some, self._map(read, some), strict=True):
                    yield piece.start - rows.held.start, floats

    def spans(self, part: Part) -> Iterator[Span]:
        """Yield the file range of the rows that `part` wants, with all of their columns."""
        tensor = self._weights.tensors[part.name]
        rows = whole(1) if len(part.extents) == 1 else part.extents[0]
        stored = Span(self._weights.file_of(part.name), tensor.start, tensor.start + tensor.num_bytes)
        yield stored.of_rows(rows)


def _floats(
    file: int, tensor: GgufTensor, rows: range, columns: Extent
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return rows of a tensor, with the held columns only."""
    kind, held = tensor.type, columns.held
    row_bytes = columns.total // kind.block * kind.block_bytes
    stored = bytearray(len(rows) * row_bytes)
    if os.preadv(file, [stored], tensor.start + rows.start * row_bytes) < len(stored):
        raise ModelError(f"the GGUF file ended within rows {rows.start} to {rows.stop} of a tensor while it was read")
    first, last = held.start // kind.block, -(-held.stop // kind.block)
    blocks = np.frombuffer(stored, np.uint8).reshape(len(rows), row_bytes)
    blocks = blocks[:, first * kind.block_bytes : last * kind.block_bytes]
    # As one long row, since the library processes few rows at a time.
    floats = dequantize(blocks.reshape(1, -1), GGMLQuantizationType(tensor.type_id)).reshape(len(rows), -1)
    return floats[:, held.start - first * kind.block : held.stop - first * kind.block]


def _halves_of_heads(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder rows that alternate between the halves of their head: the first half before the second."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
