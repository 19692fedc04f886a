"""Fills a model from its safetensors files."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from engine.errors import ModelError
from engine.layers import Layer, Linear
from engine.sharding import Extent
from engine.weight_files import weight_files

MAPPED_BYTES: Final = 32 * 2**20  # mapped pages count as our memory, so mappings are let go this often
STORED_DTYPES: Final = ("F32", "F16", "BF16")
MOST_STORED_BYTES: Final = 4
EMBEDDING: Final = "model.embed_tokens.weight"
TIED_HEAD: Final = "lm_head.weight"
HARMLESS_SUFFIX: Final = ".rotary_emb.inv_freq"  # older checkpoints store what we compute
MOST_NAMES: Final = 3


class _Source(NamedTuple):
    """A tensor of the checkpoint, its shape as the model wants it, and the part of it that is wanted."""

    name: str
    extents: tuple[Extent, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(extent.total for extent in self.extents)


class _Target(NamedTuple):
    """A parameter of the model and the tensors that fill it, one below the other."""

    module: Layer
    attribute: str
    sources: list[_Source]


def load_weights(model: nn.Module, folder: Path, dtype: torch.dtype, device: torch.device) -> int:
    """Gives every parameter of a model built on the meta device its values, cast to dtype, and packs them; gives
    their bytes.

    Reads of the files what the parameters take, and takes little memory beyond them. Raises ModelError, before
    anything is loaded, when a tensor is missing, unknown, of another shape or of a dtype that is not a float of 16
    or 32 bits.
    """
    checkpoint = _Checkpoint(weight_files(folder))
    targets = list(_targets(model))
    sources = [source for target in targets for source in target.sources]
    _check(checkpoint, sources)
    num_bytes = sum(_fill(target, checkpoint, dtype, device) for target in targets)
    if TIED_HEAD in checkpoint.names() and TIED_HEAD not in {source.name for source in sources}:
        (embedding,) = (source for source in sources if source.name == EMBEDDING)
        _check_tied_head(checkpoint, embedding._replace(name=TIED_HEAD), model.get_parameter("embed_tokens.weight"))
    return num_bytes


def _fill(target: _Target, checkpoint: "_Checkpoint", dtype: torch.dtype, device: torch.device) -> int:
    module, attribute, sources = target
    filled = torch.empty(getattr(module, attribute).shape, dtype=dtype, device=device)
    first_row = 0
    for source in sources:
        for row, part in checkpoint.read(source):
            filled[first_row + row : first_row + row + part.shape[0]] = part
        first_row += len(source.extents[0].held)
    setattr(module, attribute, nn.Parameter(filled, requires_grad=False))
    if isinstance(module, Linear) and attribute == "weight":
        module.pack()
    return filled.nbytes


def _targets(model: nn.Module) -> Iterator[_Target]:
    for path, module in model.named_modules():
        for attribute, _ in module.named_parameters(recurse=False):
            assert isinstance(module, Layer), path
            sources = [
                _Source(f"{_in_checkpoint(path, name)}.{attribute}", extents)
                for name, extents in module.sources(attribute)
            ]
            yield _Target(module, attribute, sources)


def _in_checkpoint(path: str, name: str) -> str:
    if name:
        path = f"{path.rpartition('.')[0]}.{name}".removeprefix(".")
    return path if path == "lm_head" else f"model.{path}"


def _check(checkpoint: "_Checkpoint", sources: Sequence[_Source]) -> None:
    wanted = {source.name for source in sources}
    present = checkpoint.names()
    if missing := sorted(wanted - present):
        raise ModelError(f"the weights lack {_spell(missing)}")
    harmless = {name for name in present if name.endswith(HARMLESS_SUFFIX)}
    if unknown := sorted(present - wanted - harmless - {TIED_HEAD}):
        raise ModelError(f"the weights hold {_spell(unknown)}, which the model has no use for")
    for source in sources:
        shape, dtype = checkpoint.describe(source.name)
        if shape != source.shape:
            raise ModelError(f"{source.name} has shape {list(shape)}, and the model wants {list(source.shape)}")
        if dtype not in STORED_DTYPES:
            raise ModelError(f"{source.name} is stored as {dtype}; supported are {', '.join(STORED_DTYPES)}")


def _check_tied_head(checkpoint: "_Checkpoint", head: _Source, embedding: torch.Tensor) -> None:
    same = checkpoint.describe(head.name)[0] == head.shape and all(
        torch.equal(part.to(embedding), embedding[row : row + part.shape[0]]) for row, part in checkpoint.read(head)
    )
    if not same:
        raise ModelError(f"{head.name} differs from the embedding, though config.json says tie_word_embeddings")


def _spell(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


class _Checkpoint:
    """The tensors of several safetensors files. Files are mapped as needed and let go every MAPPED_BYTES."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._open: dict[Path, Any] = {}
        self._mapped_bytes = 0
        self._file_of = {name: file for file in files for name in self._handle(file).keys()}  # noqa: SIM118

    def names(self) -> set[str]:
        return set(self._file_of)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and stored dtype."""
        tensor = self._slice(name)
        return tuple(tensor.get_shape()), tensor.get_dtype()

    def read(self, source: _Source) -> Iterator[tuple[int, torch.Tensor]]:
        """The wanted rows of a tensor in order, some at a time: the first one's index among them and their wanted
        columns, mapped from the file."""
        rows, *columns = (slice(extent.held.start, extent.held.stop) for extent in source.extents)
        row_bytes = MOST_STORED_BYTES * math.prod(source.shape[1:])  # gaps between columns may be mapped as well
        num_rows = max(1, MAPPED_BYTES // row_bytes)
        for row in range(rows.start, rows.stop, num_rows):
            part = self._slice(source.name)[(slice(row, min(row + num_rows, rows.stop)), *columns)]
            yield row - rows.start, part
            self._mapped_bytes += part.shape[0] * row_bytes
            if self._mapped_bytes >= MAPPED_BYTES:
                self._open.clear()
                self._mapped_bytes = 0

    def _slice(self, name: str) -> Any:
        return self._handle(self._file_of[name]).get_slice(name)

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} is not a safetensors file: {error}") from error
        return self._open[file]
