"""Which files hold a model's weights. Torch-free."""

from pathlib import Path
from typing import BinaryIO, Final

from serving_core.errors import ModelError
from serving_core.gguf_weights import LINK
from serving_core.json_fields import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES: Final = 8  # a safetensors file starts with the length of the JSON behind it, little-endian


def is_gguf(folder: Path) -> bool:
    """Whether the weights of a model folder are a GGUF file."""
    return (folder / LINK).is_symlink()


def index_of(folder: Path) -> Path | None:
    """The index of a model folder; None where there is none, or a single file beside it: a model that is saved into one
    file over several may leave their index behind."""
    index = folder / INDEX_FILE
    return index if index.exists() and not (folder / SINGLE_FILE).exists() else None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted: the single one, or those of the index. Raises ModelError."""
    if (index := index_of(folder)) is not None:
        names = sorted(set(weight_map(index).values()))
    elif (folder / SINGLE_FILE).exists():
        names = [SINGLE_FILE]
    else:
        raise ModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; weights must be safetensors")
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{INDEX_FILE} names {file.name}, which is not in {folder}")
    return files


def read_header_bytes(stream: BinaryIO) -> int:
    """How long the header is that a safetensors file says it has, from its start; leaves the stream before its JSON."""
    return LENGTH_BYTES + int.from_bytes(stream.read(LENGTH_BYTES), "little")


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index says. Raises ModelError."""
    files = read_json_object(index).raw("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelError(f"{index} has no weight_map")
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names {name!r:.80}, which is not a file beside it")
    return files
