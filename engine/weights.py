"""Fills a model from its safetensors files."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from engine.errors import ModelError
from engine.layers import Linear
from engine.weight_files import weight_files

MAPPED_BYTES: Final = 32 * 2**20  # mapped pages count as our memory, so mappings are let go this often
STORED_DTYPES: Final = ("F32", "F16", "BF16")
TIED_HEAD: Final = "lm_head.weight"
HARMLESS_SUFFIX: Final = ".rotary_emb.inv_freq"  # older checkpoints store what we compute
MOST_NAMES: Final = 3


class _Source(NamedTuple):
    """A tensor of the checkpoint, and its shape as the model wants it."""

    name: str
    shape: tuple[int, ...]


class _Target(NamedTuple):
    """A parameter of the model and the tensors that fill it, one below the other."""

    module: nn.Module
    attribute: str
    sources: list[_Source]


def load_weights(model: nn.Module, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Gives every parameter of a model built on the meta device its values, cast to dtype, and packs them.

    Takes little memory beyond the weights themselves. Raises ModelError, before anything is loaded, when a tensor
    is missing, unknown, of another shape or of a dtype that is not a float of 16 or 32 bits.
    """
    checkpoint = _Checkpoint(weight_files(folder))
    targets = list(_targets(model))
    sources = [source for target in targets for source in target.sources]
    _check(checkpoint, sources)
    for target in targets:
        _fill(target, checkpoint, dtype, device)
    if TIED_HEAD in checkpoint.names() and TIED_HEAD not in {source.name for source in sources}:
        _check_tied_head(checkpoint, model.get_parameter("embed_tokens.weight"))


def _fill(target: _Target, checkpoint: "_Checkpoint", dtype: torch.dtype, device: torch.device) -> None:
    module, attribute, sources = target
    filled = torch.empty(getattr(module, attribute).shape, dtype=dtype, device=device)
    first_row = 0
    for source in sources:
        for row, part in checkpoint.read(source.name):
            filled[first_row + row : first_row + row + part.shape[0]] = part
        first_row += source.shape[0]
    setattr(module, attribute, nn.Parameter(filled, requires_grad=False))
    if isinstance(module, Linear) and attribute == "weight":
        module.pack()


def _targets(model: nn.Module) -> Iterator[_Target]:
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Linear):
                paths = {path.rpartition(".")[0] + "." + part: rows for part, rows in module.parts.items()}
            else:
                paths = {path: parameter.shape[0]}
            sources = [
                _Source(f"{_in_checkpoint(part)}.{attribute}", (rows, *parameter.shape[1:]))
                for part, rows in paths.items()
            ]
            yield _Target(module, attribute, sources)


def _in_checkpoint(path: str) -> str:
    path = path.removeprefix(".")
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


def _check_tied_head(checkpoint: "_Checkpoint", embedding: torch.Tensor) -> None:
    same = checkpoint.describe(TIED_HEAD)[0] == tuple(embedding.shape) and all(
        torch.equal(part.to(embedding), embedding[row : row + part.shape[0]])
        for row, part in checkpoint.read(TIED_HEAD)
    )
    if not same:
        raise ModelError(f"{TIED_HEAD} differs from the embedding, though config.json says tie_word_embeddings")


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

    def read(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """All rows of a tensor in order, some at a time: the first one's index and the rows, mapped from the file."""
        shape, _ = self.describe(name)
        num_rows = max(1, MAPPED_BYTES // (4 * math.prod(shape[1:])))
        for row in range(0, shape[0], num_rows):
            part = self._slice(name)[row : row + num_rows]
            yield row, part
            self._mapped_bytes += part.nbytes
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
