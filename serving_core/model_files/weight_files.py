"""Find the files of a model's weights. Torch-free."""

from pathlib import Path
from typing import BinaryIO, Final

from serving_core.errors import ModelError
from serving_core.json_fields import read_json_object
from serving_core.model_files.gguf_weights import LINK

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES: Final = 8  # a safetensors file starts with the length of its JSON header, little-endian


def is_gguf(folder: Path) -> bool:
    """Return whether a model folder was made from a GGUF file: it has a link to one."""
    return (folder / LINK).is_symlink()


def index_of(folder: Path) -> Path | None:
    """Return the path of the index of a model folder; None without one, or beside a single weights file.

    A model saved as a single file over a sharded one may leave the old index behind.
    """
    index = folder / INDEX_FILE
    return index if index.exists() and not (folder / SINGLE_FILE).exists() else None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder, sorted: the single file, or those that the index names.

    Raises ModelError if there is neither, or one of them is missing.
    """
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
    """Return the number of bytes before the tensor data of a safetensors file: the length field and the JSON.

    Reads the length field (LENGTH_BYTES) at the start of the stream, and leaves the stream before the JSON.
    """
    return LENGTH_BYTES + int.from_bytes(stream.read(LENGTH_BYTES), "little")


def weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor, as the index lists them. Raises ModelError for an index of another form."""
    files = read_json_object(index).raw("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelError(f"{index} has no weight_map")
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names {name!r:.80}, which is not a file beside it")
    return files
