"""A model's GGUF file, or the several ones that llama-gguf-split made of it, as one.

The parts of a model lie beside each other as NAME-00001-of-00003.gguf and so on. The first says all of the model, the
others which part they are; each has the header of its own tensors.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Final

from serving_core.errors import ModelError
from serving_core.gguf_header import MOST_ENTRIES, MOST_HEADER_BYTES, GgufHeader, GgufTensor, read_header
from serving_core.json_fields import JsonFields

PART_NAME: Final = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
MOST_PARTS: Final = 256
ROPE_FACTORS: Final = "rope_freqs.weight"
MOST_ROPE_BYTES: Final = 2**16
OF_A_PART: Final = ("split.", "general.alignment")  # may differ from what the first part says


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What all parts say together."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    headers: tuple[bytes, ...]  # of each part, as it stands in the file
    rope_factors: bytes  # the data of the one tensor that config comes from; none where there is none

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes that config and tokenizer come from."""
        return hashlib.sha256(b"".join(self.headers) + self.rope_factors).hexdigest()


def parts_of(file: Path) -> list[Path]:
    """The files of a model by the name of its first, which alone need be there. Raises ModelError for another part."""
    if (said := PART_NAME.fullmatch(file.name)) is None:
        return [file]
    name, number, count = said["name"], int(said["number"]), int(said["count"])
    if not 1 <= count <= MOST_PARTS:
        raise ModelError(f"{file.name} is one of {count} parts; 1 to {MOST_PARTS} are read")
    parts = [file.with_name(f"{name}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    if number != 1:
        raise ModelError(f"{file.name} is part {number} of a model: the first, {parts[0].name}, stands for all")
    return parts


def model_name(file: Path) -> str:
    """What a model is called by the name of its file, or of its first part."""
    said = PART_NAME.fullmatch(file.name)
    return said["name"] if said else file.stem


@contextmanager
def open_parts(files: Sequence[Path]) -> Iterator[list[BufferedReader]]:
    """Raises ModelError for one that cannot be opened, or not be read meanwhile."""
    try:
        with ExitStack() as opened:
            yield [opened.enter_context(file.open("rb")) for file in files]
    except OSError as error:
        raise ModelError(f"{Path(error.filename or files[0]).resolve()} cannot be read: {error.strerror}") from error


def read_model(streams: Sequence[BinaryIO], names: Sequence[str]) -> GgufModel:
    """Reads the headers of all parts; `names` is what the files are called. Raises ModelError unless they belong
    together and are whole."""
    headers, tensors = list[GgufHeader](), dict[str, GgufTensor]()
    for number, (stream, name) in enumerate(zip(streams, names, strict=True)):
        headers.append(header := read_header(stream, name))
        _check_part(header, number, len(names), name)
        if headers[0] is not header:
            _check_agreement(headers[0], header, name)
        for tensor_name, tensor in header.tensors.items():
            if tensor_name in tensors:
                raise ModelError(f"{name} has the tensor {tensor_name}, which an earlier part has too")
            tensors[tensor_name] = replace(tensor, part=number)
        _check_size(headers, len(tensors), name)
    said = JsonFields(headers[0].metadata, names[0]).integer("split.tensors.count", len(tensors), minimum=0)
    if said != len(tensors):
        raise ModelError(f"{names[0]} says that its parts have {said} tensors, and they have {len(tensors)}")
    return GgufModel(
        headers[0].metadata, tensors, tuple(header.content for header in headers), _rope_factors(streams, tensors)
    )


def _check_part(header: GgufHeader, number: int, count: int, name: str) -> None:
    fields = JsonFields(header.metadata, name)
    said_number, said_count = fields.integer("split.no", 0, minimum=0), fields.integer("split.count", 1, minimum=0)
    if (said_number, max(1, said_count)) != (number, count):
        said, read_as = f"part {said_number + 1} of {said_count}", f"part {number + 1} of {count}"
        raise ModelError(
            f"{name} says that it is {said}, and is read as {read_as}: parts are called NAME-00001-of-00003.gguf"
        )


def _check_agreement(first: GgufHeader, other: GgufHeader, name: str) -> None:
    for key, value in other.metadata.items():
        if not key.startswith(OF_A_PART) and (key not in first.metadata or first.metadata[key] != value):
            raise ModelError(f"{name} says {key}, and the first part does not say the same")


def _check_size(headers: Sequence[GgufHeader], num_tensors: int, name: str) -> None:
    size_bytes = sum(len(header.content) for header in headers)
    if size_bytes > MOST_HEADER_BYTES or num_tensors > MOST_ENTRIES:
        found = f"{size_bytes} bytes of headers with {num_tensors} tensors up to {name}"
        raise ModelError(f"{found}: at most {MOST_HEADER_BYTES} and {MOST_ENTRIES} are read")


def _rope_factors(streams: Sequence[BinaryIO], tensors: dict[str, GgufTensor]) -> bytes:
    if (tensor := tensors.get(ROPE_FACTORS)) is None:
        return b""
    if tensor.num_bytes > MOST_ROPE_BYTES:
        raise ModelError(f"{ROPE_FACTORS} has {tensor.num_bytes} bytes; at most {MOST_ROPE_BYTES} are read")
    stream = streams[tensor.part]
    stream.seek(tensor.start)
    return stream.read(tensor.num_bytes)
