"""Reads parts of tensors from the files of a model."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from engine.model.read_ahead import Span
from serving_core.errors import ModelError
from serving_core.sharding import Extent, whole
from serving_core.stored_tensors import FLOATS, tensor_places
from serving_core.text_parts import text_names

MAPPED_BYTES: Final = 32 * 2**20  # mapped pages count as our memory, so mappings are let go this often
INTEGERS: Final = ("I32",)
MOST_STORED_BYTES: Final = 4


class Part(NamedTuple):
    """A tensor of the checkpoint, its shape as the model wants it, and the part of it that is wanted."""

    name: str
    extents: tuple[Extent, ...]
    dtypes: tuple[str, ...] = FLOATS  # one of which it must have

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(extent.total for extent in self.extents)


def whole_tensor(name: str, shape: Sequence[int], dtypes: tuple[str, ...]) -> Part:
    """All of a tensor."""
    return Part(name, tuple(map(whole, shape)), dtypes)


class Checkpoint(ABC):
    """The tensors of a model, by their names."""

    @abstractmethod
    def names(self) -> set[str]:
        """Those of all tensors."""

    @abstractmethod
    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape, and the dtype that `read` gives."""

    @abstractmethod
    def read(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        """The wanted rows of a tensor in order, some at a time: the first one's index among them and their wanted
        columns."""

    def spans(self, part: Part) -> Iterator[Span]:
        """What of which files `read` will read, where that is known."""
        yield from ()

    def stored_bytes(self, part: Part) -> int:
        """How many bytes `read` will read, where that is known."""
        return sum(span.stop - span.start for span in self.spans(part))

    def check(self, part: Part) -> None:
        """Raises ModelError unless a tensor that is there has the shape and one of the dtypes."""
        shape, dtype = self.describe(part.name)
        if shape != part.shape:
            raise ModelError(f"{part.name} has shape {list(shape)}, and the model wants {list(part.shape)}")
        if dtype not in part.dtypes:
            raise ModelError(f"{part.name} is stored as {dtype}; supported are {', '.join(part.dtypes)}")

    def read_all(self, part: Part) -> torch.Tensor:
        """The wanted part, copied."""
        return torch.cat([tensor for _, tensor in self.read(part)])


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of several safetensors files. Files are mapped as needed and let go every MAPPED_BYTES."""

    def __init__(self, files: Sequence[Path], root: str = "") -> None:
        """Names begin with `root`, where none of the files' does: so a decoder is stored that lacks its head. Raises
        ModelError when a file is not a safetensors file."""
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
        """Mapped from the file."""
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
        """Whole rows, whatever columns are wanted."""
        file = self._file_of[part.name]
        if file not in self._places:
            self._places[file] = tensor_places(file)
        place = self._places[file][part.name.removeprefix(self._missing)]
        rows = part.extents[0] if part.extents else whole(1)
        yield Span(file, place.start, place.stop).of_rows(rows)

    def read_all(self, part: Part) -> torch.Tensor:
        """The wanted part, copied."""
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
    """Of the tensors of a model that sees pictures those of its text, as a decoder alone has them."""

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
