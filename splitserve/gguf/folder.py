"""Create the model folder of a GGUF file: config, tokenizer and defaults from its header, and links to its parts."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from coordinator.text.tokenizer import read_tokenizer
from serving_core.errors import ModelError
from serving_core.model_files.config import MODEL_TYPES, NATIVE, TRANSFORMERS, read_model_config
from serving_core.model_files.gguf_header import GgufModel, open_parts, parts_of, read_model
from serving_core.model_files.gguf_weights import SOURCE, link_name
from splitserve.gguf.config import ARCHITECTURES, config_of, generation_config_of, modules_of
from splitserve.gguf.tokenizer import tokenizer_config_of, tokenizer_of

VERSION: Final = 4  # of the derived files; a change invalidates existing folders
NAME_CHARS: Final = 32  # of a digest, in the folder's name


def gguf_folder(file: Path, root: Path, defaults: Mapping[str, Any] | None = None) -> Path:
    """Return the model folder of a GGUF file below `root`, and create it if necessary.

    `defaults` are added to its generation_config.json. The folder's name depends on the paths of the files and all
    bytes of their headers, so a replaced file gets another folder, even with the same size and time. Weights stay in
    the files. Raises ModelError for an unsupported file, and when the folder cannot be written.
    """
    name, parts, defaults = file.name, parts_of(file), defaults or {}
    files = [part.resolve() for part in parts]
    with open_parts(files) as streams:
        model = read_model(streams, [part.name for part in parts])
    folder = root / _key(VERSION, [os.fsencode(each) for each in files], model.digest, json.dumps(defaults))
    if folder.is_dir():
        return folder
    contents = {**_contents(model, name, defaults), SOURCE: model.digest}
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix="making-") as scratch:
            made = Path(scratch) / name
            made.mkdir()
            for file_name, content in contents.items():
                (made / file_name).parent.mkdir(exist_ok=True)
                (made / file_name).write_text(content, encoding="utf-8")
            for part, target in enumerate(files):
                (made / link_name(part)).symlink_to(target)
            architecture, _ = ARCHITECTURES[model.metadata["general.architecture"]]
            # Refuses an unsupported model before the folder is kept.
            read_model_config(made, NATIVE if architecture in MODEL_TYPES else TRANSFORMERS)
            read_tokenizer(made)
            _move(made, folder)
    except OSError as error:
        raise ModelError(f"what {file} says cannot be stored in {root}: {error.strerror}") from error
    return folder


def _key(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:NAME_CHARS]


def _contents(model: GgufModel, name: str, defaults: Mapping[str, Any]) -> dict[str, str]:
    """Return the files of the folder that are derived from the headers."""
    config = config_of(model, name)
    tokenizer = tokenizer_of(model.metadata, name)
    objects = {
        "config.json": config,
        "generation_config.json": {**generation_config_of(model.metadata, name), **defaults},
        "tokenizer_config.json": tokenizer_config_of(model.metadata, name),
        **modules_of(model.metadata, name),
    }
    texts = {file_name: json.dumps(values, indent=2) + "\n" for file_name, values in objects.items()}
    return {**texts, "tokenizer.json": tokenizer.to_str()}


def _move(made: Path, folder: Path) -> None:
    """Move the folder to its place, unless another process has put an identical one there."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
