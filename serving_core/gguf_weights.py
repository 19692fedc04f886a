"""The tensors of a model folder that was made of a GGUF file, under the names of a Hugging Face checkpoint.

Such a folder has what the file's header says, as splitserve.gguf.folder writes it, and a link to the file, or to each
of its parts, whose weights stay where they are. Torch-free.
"""

import functools
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Final

from serving_core.errors import ModelError
from serving_core.gguf_names import checkpoint_tensors
from serving_core.gguf_parts import MOST_PARTS, ROPE_FACTORS, open_parts, read_model

LINK: Final = "model.gguf"
SOURCE: Final = "model.gguf.source"  # the digest of what the folder was made of

GEMMAS: Final = ("gemma", "gemma2", "gemma3")
INTERLEAVED: Final = (".q_proj.weight", ".q_proj.bias", ".k_proj.weight", ".k_proj.bias")
Identity = tuple[int, ...]


class GgufWeights:
    """The tensors by name, and their bytes as they are stored. To be had from `gguf_weights`."""

    def __init__(self, folder: Path) -> None:
        self._links: Final = links_of(folder)
        with open_parts(self._links) as streams:
            self._identities = [_identity(os.fstat(stream.fileno())) for stream in streams]
            model = read_model(streams, [link.resolve().name for link in self._links])
            made_of = (folder / SOURCE).read_text(encoding="utf-8")
        if model.digest != made_of:
            raise _replaced(self._links[0])
        self.headers_bytes: Final = [len(header) for header in model.headers]
        self._architecture = str(model.metadata.get("general.architecture"))
        weights = {name: tensor for name, tensor in model.tensors.items() if name != ROPE_FACTORS}
        self.tensors: Final = checkpoint_tensors(model.metadata, weights)

    def is_interleaved(self, name: str) -> bool:
        """Whether the rows of each head alternate between its halves, as llama.cpp rotates Llama's."""
        return self._architecture == "llama" and name.endswith(INTERLEAVED)

    def addend(self, name: str) -> float:
        """What was added to a tensor when it was written: to Gemma's norms what a decoder of it adds by itself."""
        return 1.0 if self._architecture in GEMMAS and name.endswith("norm.weight") else 0.0

    def file_of(self, name: str) -> Path:
        """What the tensor is read from."""
        return self._links[self.tensors[name].part]

    @contextmanager
    def open(self) -> Iterator[list[BufferedReader]]:
        """The files, to read tensors from. Raises ModelError when one is no longer that whose header was read."""
        with open_parts(self._links) as streams:
            for link, stream, identity in zip(self._links, streams, self._identities, strict=True):
                if _identity(os.fstat(stream.fileno())) != identity:
                    raise _replaced(link)
            yield streams


def gguf_weights(folder: Path) -> GgufWeights:
    """Raises ModelError when a file is gone, broken or another than the folder was made of."""
    try:
        identities = tuple(_identity(link.stat()) for link in links_of(folder))
    except OSError as error:
        raise ModelError(f"{Path(error.filename).resolve()} cannot be read: {error.strerror}") from error
    return _read(folder, identities)


@functools.lru_cache(maxsize=1)  # a process asks several times, and a vocabulary takes a tenth of a second to skip
def _read(folder: Path, identities: tuple[Identity, ...]) -> GgufWeights:
    return GgufWeights(folder)


def link_name(part: int) -> str:
    """What the link to a part, counted from 0, is called in a folder."""
    return LINK if part == 0 else f"{LINK}.{part + 1}"


def links_of(folder: Path) -> list[Path]:
    """The links to all parts: the first always, and those that follow it."""
    links = (folder / link_name(part) for part in range(MOST_PARTS))
    return [folder / LINK, *itertools.takewhile(Path.is_symlink, itertools.islice(links, 1, None))]


def _identity(now: os.stat_result) -> Identity:
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns


def _replaced(link: Path) -> ModelError:
    return ModelError(
        f"{link.resolve()} is no longer the file that {link.parent} was made of; start again with the file as MODEL"
    )
