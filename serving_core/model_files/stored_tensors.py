"""List the tensors in the files of a model's weights, from their headers. Torch-free."""

import json
from pathlib import Path
from typing import Final, NamedTuple

from safetensors import SafetensorError, safe_open

from serving_core.errors import ModelError
from serving_core.model_files.gguf_weights import gguf_weights
from serving_core.model_files.weight_files import (
    INDEX_FILE,
    LENGTH_BYTES,
    index_of,
    is_gguf,
    read_header_bytes,
    weight_files,
    weight_map,
)

FLOATS: Final = ("F32", "F16", "BF16")


class StoredTensor(NamedTuple):
    """A tensor as its file's header describes it; a GGUF tensor has the dtype F32, to which it is converted."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model folder by name, from the headers of its files.

    Raises ModelError if a file is missing, broken or cut short, or lacks a tensor that the index lists.
    """
    if is_gguf(folder):
        return {name: StoredTensor(tensor.shape, "F32") for name, tensor in gguf_weights(folder).tensors.items()}
    stored = {file.name: file_tensors(file) for file in weight_files(folder)}
    if (index := index_of(folder)) is not None:
        for name, file_name in weight_map(index).items():
            if name not in stored[file_name]:
                raise ModelError(f"{INDEX_FILE} says that {name} is in {file_name}, and it is not")
    return {name: tensor for tensors in stored.values() for name, tensor in tensors.items()}


def file_tensors(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name, from its header. Raises ModelError if the file is broken or cut short."""
    try:
        with safe_open(file, framework="numpy") as header:
            slices = {name: header.get_slice(name) for name in header.keys()}  # noqa: SIM118  it is no mapping
            return {name: StoredTensor(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is not a whole safetensors file: {error}") from error


def tensor_places(file: Path) -> dict[str, range]:
    """Return, for each tensor of a safetensors file, the range of its bytes in the file.

    Requires that the file has been opened as a valid one.
    """
    with file.open("rb") as stream:
        first = read_header_bytes(stream)
        header = json.loads(stream.read(first - LENGTH_BYTES))
    places = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
    return {name: range(first + start, first + stop) for name, (start, stop) in places.items()}
