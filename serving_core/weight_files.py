"""Which files hold a model's weights, and which tensors are in them. Torch-free."""

import json
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from safetensors import SafetensorError, safe_open

from serving_core.errors import ModelError
from serving_core.gguf_weights import LINK, gguf_weights
from serving_core.json_fields import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS: Final = ("F32", "F16", "BF16")
_LENGTH_BYTES: Final = 8  # a safetensors file starts with the length of the JSON behind it, little-endian


class StoredTensor(NamedTuple):
    """A tensor as the header of its file describes it; of a GGUF file as what it is read as, F32."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


def is_gguf(folder: Path) -> bool:
    """Whether the weights of a model folder are a GGUF file."""
    return (folder / LINK).is_symlink()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted: those of the index, or the single one. Raises ModelError."""
    if (folder / INDEX_FILE).exists():
        names = sorted(set(_weight_map(folder / INDEX_FILE).values()))
    elif (folder / SINGLE_FILE).exists():
        names = [SINGLE_FILE]
    else:
        raise ModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; weights must be safetensors")
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{INDEX_FILE} names {file.name}, which is not in {folder}")
    return files


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder by name, from the headers of its files. Raises ModelError when a file is missing,
    broken or cut short, or lacks a tensor that the index says it has."""
    if is_gguf(folder):
        return {name: StoredTensor(tensor.shape, "F32") for name, tensor in gguf_weights(folder).tensors.items()}
    stored = {file.name: file_tensors(file) for file in weight_files(folder)}
    if (folder / INDEX_FILE).exists():
        for name, file_name in _weight_map(folder / INDEX_FILE).items():
            if name not in stored[file_name]:
                raise ModelError(f"{INDEX_FILE} says that {name} is in {file_name}, and it is not")
    return {name: tensor for tensors in stored.values() for name, tensor in tensors.items()}


def file_tensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name, from its header. Raises ModelError when it is broken or cut short."""
    try:
        with safe_open(file, framework="numpy") as header:
            slices = {name: header.get_slice(name) for name in header.keys()}  # noqa: SIM118  it is no mapping
            return {name: StoredTensor(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is not a whole safetensors file: {error}") from error


def read_header_bytes(stream: BinaryIO) -> int:
    """How long the header is that a safetensors file says it has, from its start; leaves the stream before its JSON."""
    return _LENGTH_BYTES + int.from_bytes(stream.read(_LENGTH_BYTES), "little")


def tensor_places(file: Path) -> dict[str, range]:
    """The bytes of each tensor of a safetensors file that has been opened as one."""
    with file.open("rb") as stream:
        first = read_header_bytes(stream)
        header = json.loads(stream.read(first - _LENGTH_BYTES))
    places = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
    return {name: range(first + start, first + stop) for name, (start, stop) in places.items()}


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).raw("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names {name!r:.80}, which is not a file beside it")
    return weight_map
