"""Which files hold a model's weights. Torch-free."""

from pathlib import Path

from engine.errors import ModelError
from engine.json_fields import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted: those of the index, or the single one. Raises ModelError."""
    index = folder / INDEX_FILE
    if index.exists():
        names = _indexed_files(index)
    elif (folder / SINGLE_FILE).exists():
        names = [SINGLE_FILE]
    else:
        raise ModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; weights must be safetensors")
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{INDEX_FILE} names {file.name}, which is not in {folder}")
    return files


def _indexed_files(index: Path) -> list[str]:
    weight_map = read_json_object(index).raw("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names {name!r:.80}, which is not a file beside it")
    return sorted(set(weight_map.values()))
