"""Read the headers of GGUF files: metadata, and the place of each tensor, over one file or the several of a split
model.

The reader is strict, since other readers trust the lengths and counts in a file: this one checks each length against
the remaining bytes before it allocates anything, and limits a header to MOST_HEADER_BYTES.

The parts of a split model are NAME-00001-of-00003.gguf and so on. The first part has the model's metadata, the others
only their part number; each part's header lists its own tensors.
"""

import hashlib
import itertools
import math
import os
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MOST_HEADER_BYTES: Final = 64 * 2**20
USUAL_HEADER_BYTES: Final = 8 * 2**20  # read first: a few hundred thousand tokens and merges
MOST_ENTRIES: Final = 2**16  # metadata pairs, and tensors
MOST_ELEMENTS: Final = 2**22  # of all arrays together
MOST_NAME_BYTES: Final = 256
MOST_DIMENSIONS: Final = 4
MOST_ALIGNMENT: Final = 2**16
DEFAULT_ALIGNMENT: Final = 32
SMALLEST_PAIR_BYTES: Final = 8 + 4 + 1  # the length of an empty key, a type and a byte
SMALLEST_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8

STRING: Final = 8
ARRAY: Final = 9
BOOLEAN: Final = 7
NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOLEAN: "B", 10: "Q", 11: "q", 12: "d"}
LENGTH: Final = struct.Struct("<Q")
LITTLE_ENDIAN: Final = {code: struct.Struct(f"<{code}") for code in NUMBERS.values()}


class TensorType(NamedTuple):
    """A storage format: blocks of `block` elements, each of a fixed number of bytes."""

    name: str
    block: int
    block_bytes: int


# Formats that the gguf package converts to floats, by their number in the file.
TENSOR_TYPES: Final = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
}
UNREADABLE: Final = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its shape, rows first, and its place in the file."""

    shape: tuple[int, ...]
    type_id: int
    start: int
    part: int = 0  # index of the file that holds it

    @property
    def type(self) -> TensorType:
        return TENSOR_TYPES[self.type_id]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block * self.type.block_bytes

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    def slices(self) -> Iterator["GgufTensor"]:
        """Yield the tensor's slices along its first dimension as tensors. It must have at least two dimensions."""
        shape, size_bytes = self.shape[1:], self.num_bytes // self.shape[0]
        for index in range(self.shape[0]):
            yield GgufTensor(shape, self.type_id, self.start + index * size_bytes, self.part)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a file. Arrays of numbers are `array`s, all other values plain Python values."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    content: bytes  # the header's bytes


def read_header(stream: BinaryIO, name: str) -> GgufHeader:
    """Read the header from the start of a file, wherever the stream is; `name` is the file's name in errors.

    Raises ModelError unless the header is complete, known and within the file.
    """
    size_bytes = stream.seek(0, os.SEEK_END)
    most_bytes = min(size_bytes, MOST_HEADER_BYTES)
    for num_bytes in sorted({min(most_bytes, USUAL_HEADER_BYTES), most_bytes}):
        stream.seek(0)
        data = stream.read(num_bytes)
        try:
            return _parse(_Cursor(data, is_all=len(data) == size_bytes), size_bytes)
        except _Broken as error:
            broken = error
    raise ModelError(f"{name} is not a GGUF file that can be served: {broken}") from broken


class _Broken(Exception):
    """A defect of a file."""


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: bytes, *, is_all: bool) -> None:
        self.data = data
        self.at = 0
        self._is_all = is_all
        self._elements_left = MOST_ELEMENTS

    def check(self, num_bytes: int) -> None:
        """Raise _Broken unless num_bytes bytes are left."""
        if num_bytes > len(self.data) - self.at:
            limit = "the file has" if self._is_all else "a header may have"
            raise _Broken(f"its header needs {self.at + num_bytes} bytes or more, and {limit} {len(self.data)}")

    def number(self, code: str) -> Any:
        kind = LITTLE_ENDIAN[code]
        self.check(kind.size)
        (value,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return value

    def text(self) -> str:
        (text,) = self.texts(1)
        return text

    def texts(self, count: int) -> list[str]:
        """Read `count` texts, with inlined steps, as there may be hundreds of thousands."""
        self.check(count * LENGTH.size)
        data, at, end, found = self.data, self.at, len(self.data), list[str]()
        read_length, size = LENGTH.unpack_from, LENGTH.size
        try:
            for _ in range(count):
                start = at + size
                at = start + read_length(data, at)[0]
                if at > end:
                    break
                found.append(data[start:at].decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise _Broken(f"what stands at byte {at} is no text of UTF-8") from error
        self.check(at - self.at)
        self.at = at
        return found

    def name(self) -> str:
        name = self.text()
        if not name or len(name.encode()) > MOST_NAME_BYTES or not name.isprintable():
            raise _Broken(f"a name of {len(name)} characters is not one of 1 to {MOST_NAME_BYTES} printable ones")
        return name

    def array(self) -> Sequence[Any]:
        kind, length = self.number("I"), self.number("Q")
        if length > self._elements_left:
            raise _Broken(f"its arrays have more than {MOST_ELEMENTS} elements")
        self._elements_left -= length
        if kind == STRING:
            return self.texts(length)
        if kind not in NUMBERS:
            raise _Broken(f"it has an array of elements of type {kind}, which is not known")
        found = array(NUMBERS[kind])
        self.check(length * found.itemsize)
        found.frombytes(self.data[self.at : self.at + length * found.itemsize])
        self.at += length * found.itemsize
        return found

    def value(self) -> Any:
        kind = self.number("I")
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        if kind not in NUMBERS:
            raise _Broken(f"it has a value of type {kind}, which is not known")
        number = self.number(NUMBERS[kind])
        return bool(number) if kind == BOOLEAN else number


def _parse(cursor: _Cursor, size_bytes: int) -> GgufHeader:
    _check_version(cursor)
    num_tensors, num_pairs = cursor.number("Q"), cursor.number("Q")
    for what, number in (("tensors", num_tensors), ("pairs of metadata", num_pairs)):
        if number > MOST_ENTRIES:
            raise _Broken(f"it says that it has {number} {what}, and at most {MOST_ENTRIES} are read")
    cursor.check(num_pairs * SMALLEST_PAIR_BYTES + num_tensors * SMALLEST_TENSOR_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.name()
        if key in metadata:
            raise _Broken(f"it has {key} twice")
        metadata[key] = cursor.value()
    alignment = _alignment(metadata)
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.name()
        if name in tensors:
            raise _Broken(f"it has the tensor {name} twice")
        tensors[name] = _tensor(cursor, name, alignment)
    data_start = -(-cursor.at // alignment) * alignment
    placed = {
        name: GgufTensor(tensor.shape, tensor.type_id, data_start + tensor.start) for name, tensor in tensors.items()
    }
    _check_places(placed, size_bytes)
    return GgufHeader(metadata, placed, cursor.data[: cursor.at])


def _check_version(cursor: _Cursor) -> None:
    cursor.check(len(MAGIC))
    if not cursor.data.startswith(MAGIC):
        raise _Broken("it does not begin with GGUF")
    cursor.at = len(MAGIC)
    version = cursor.number("I")
    if version in (int.from_bytes(known.to_bytes(4, "big"), "little") for known in VERSIONS):
        raise _Broken("its numbers are big-endian, and only little-endian ones are read")
    if version not in VERSIONS:
        raise _Broken(f"its version is {version}, and only {' and '.join(map(str, VERSIONS))} are read")


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
    if not is_power or alignment > MOST_ALIGNMENT:
        raise _Broken(f"its alignment is {alignment!r:.40}, not a power of two of at most {MOST_ALIGNMENT}")
    return int(alignment)


def _tensor(cursor: _Cursor, name: str, alignment: int) -> GgufTensor:
    """Read a tensor's description; its start counts from that of all data."""
    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= MOST_DIMENSIONS:
        raise _Broken(f"{name} has {num_dimensions} dimensions, not 1 to {MOST_DIMENSIONS}")
    shape = tuple(reversed([cursor.number("Q") for _ in range(num_dimensions)]))
    type_id, start = cursor.number("I"), cursor.number("Q")
    if (kind := TENSOR_TYPES.get(type_id)) is None:
        known = ", ".join(each.name for each in TENSOR_TYPES.values())
        raise _Broken(f"{name} is stored as {UNREADABLE.get(type_id, f'type {type_id}')}; supported are {known}")
    if 0 in shape or shape[-1] % kind.block:
        raise _Broken(f"{name} has shape {list(shape)}, and {kind.name} needs rows of a multiple of {kind.block}")
    if start % alignment:
        raise _Broken(f"{name} lies at {start}, which is no multiple of the alignment {alignment}")
    return GgufTensor(shape, type_id, start)


def _check_places(tensors: dict[str, GgufTensor], size_bytes: int) -> None:
    by_start = sorted(tensors.items(), key=lambda item: item[1].start)
    for name, tensor in by_start:
        if tensor.end > size_bytes:
            raise _Broken(f"{name} ends at byte {tensor.end}, and the file has {size_bytes}: it was cut short")
    for (name, tensor), (next_name, following) in itertools.pairwise(by_start):
        if tensor.end > following.start:
            raise _Broken(f"{name} and {next_name} overlap")


PART_NAME: Final = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
MOST_PARTS: Final = 256
ROPE_FACTORS: Final = "rope_freqs.weight"
MOST_ROPE_BYTES: Final = 2**16
OF_A_PART: Final = ("split.", "general.alignment")  # keys that may differ from the first part's


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The combined contents of all parts' headers."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    headers: tuple[bytes, ...]  # bytes of each part's header
    rope_factors: bytes  # the data of the only tensor that the config uses; empty without one

    @property
    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of all bytes that config and tokenizer come from."""
        return hashlib.sha256(b"".join(self.headers) + self.rope_factors).hexdigest()


def parts_of(file: Path) -> list[Path]:
    """Return the files of a model, given its first part or its only file. The others need not exist.

    Raises ModelError if `file` is a later part, or one of more than MOST_PARTS.
    """
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
    """Return a model's name, which is the name of its file or first part without part numbers and suffix."""
    said = PART_NAME.fullmatch(file.name)
    return said["name"] if said else file.stem


@contextmanager
def open_parts(files: Sequence[Path]) -> Iterator[list[BufferedReader]]:
    """Return a context manager that opens the files and yields their streams.

    Raises ModelError for a file that cannot be opened, and for an OSError within the block.
    """
    try:
        with ExitStack() as opened:
            yield [opened.enter_context(file.open("rb")) for file in files]
    except OSError as error:
        raise ModelError(f"{Path(error.filename or files[0]).resolve()} cannot be read: {error.strerror}") from error


def read_model(streams: Sequence[BinaryIO], names: Sequence[str]) -> GgufModel:
    """Read the headers of all parts of a model; `names` are the files' names in errors.

    Raises ModelError unless the parts are complete and belong together.
    """
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
