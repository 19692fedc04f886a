"""Models that are made for embeddings: what a model folder says of the vectors that they make. Torch-free.

A folder says so by its architecture, a decoder without a head (Qwen3Model), or as sentence-transformers does: by a
modules.json with a module that pools.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields, read_json_object
from serving_core.requests import LAST, MEAN, Pooling

GENERATE, POOLING = "generate", "pooling"  # values of --runner, beside auto
MODULES_FILE: Final = "modules.json"
POOLING_FOLDER: Final = re.compile(r"[\w-]{1,64}")  # beside config.json
MOST_MODULES: Final = 16
_KINDS: Final = {"mean_tokens": MEAN, "mean": MEAN, "lasttoken": LAST}
_MODE: Final = "pooling_mode"


@dataclass(frozen=True, slots=True)
class Embedder:
    """How a model makes one vector of a text, where a request does not say otherwise."""

    kind: str = LAST  # one of serving_core.requests.POOLINGS
    normalizes: bool = True
    may_be_cut: bool = False  # to its leading numbers, which such models are trained for (Matryoshka)
    lengths: tuple[int, ...] = ()  # to one of these; empty: to any

    @property
    def pooling(self) -> Pooling:
        """What a request gets that asks for nothing in particular."""
        return Pooling(self.kind, self.normalizes)


def read_embedder(folder: Path, config: JsonFields, runner: str, *, is_headless: bool) -> Embedder | None:
    """What the folder says; None where its model is to write answers. `runner` is a value of --runner. Raises
    ModelError."""
    if runner == GENERATE:
        if is_headless:
            raise ModelError(f"--runner {GENERATE}: the checkpoint has no head, and its model makes embeddings alone")
        return None
    modules = _modules(folder)
    found = _pooling(folder, modules)
    if found is None and not is_headless and runner != POOLING:
        return None
    lengths = config.raw("matryoshka_dimensions")
    if lengths is not None and not _are_lengths(lengths):
        raise config.error("matryoshka_dimensions", "a list of integers above 0")
    return Embedder(
        kind=LAST if found is None else found,
        normalizes=found is None or "Normalize" in [name for name, _ in modules],
        may_be_cut=config.boolean("is_matryoshka", False) or bool(lengths),
        lengths=tuple(lengths or ()),
    )


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each > 0 for each in value)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The kinds of the modules of sentence-transformers, and where their own files are; empty without any."""
    path = folder / MODULES_FILE
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {str(error)[:200]}") from error
    if not isinstance(entries, list) or len(entries) > MOST_MODULES:
        raise ModelError(f"{path} must hold a list of at most {MOST_MODULES} modules")
    return list(_described(entries, path))


def _described(entries: list[Any], path: Path) -> Iterator[tuple[str, str]]:
    for entry in entries:
        kind, place = (entry.get(name) for name in ("type", "path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str):
            raise ModelError(f"{path} must hold modules with a type and a path, not {entry!r:.80}")
        yield kind.rpartition(".")[2], place


def _pooling(folder: Path, modules: list[tuple[str, str]]) -> str | None:
    """How the hidden states behind the tokens of a text become one vector; None where no module says."""
    found = None
    for kind, place in modules:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ModelError(f"module {kind!r:.80} of {MODULES_FILE} is not supported")
        if kind == "Pooling":
            if not POOLING_FOLDER.fullmatch(place):
                raise ModelError(f"{MODULES_FILE} names {place!r:.80}, which is not a folder beside it")
            found = _kind(read_json_object(folder / place / "config.json"))
    return found


def _kind(pooling: JsonFields) -> str:
    if not pooling.boolean("include_prompt", True):
        raise pooling.unsupported("include_prompt")
    named = pooling.raw(_MODE)
    flags = [name for name in pooling.names if name.startswith(f"{_MODE}_") and pooling.raw(name) is True]
    asked = [named] if isinstance(named, str) else [name.removeprefix(f"{_MODE}_") for name in flags]
    if len(asked) != 1 or asked[0] not in _KINDS:
        what = " and ".join(asked) or "nothing"
        raise ModelError(f"pooling of {what:.200} is not supported; supported are mean_tokens and lasttoken")
    return _KINDS[asked[0]]
