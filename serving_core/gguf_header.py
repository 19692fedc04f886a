"""The header of a GGUF file: metadata, and where each tensor lies.

Strict, and ours because the readers of others believe what a file says of its own lengths and counts. Here a length is
held against the bytes that are there before anything is made of it, and all that is read fits MOST_HEADER_BYTES.
"""

import itertools
import math
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NamedTuple

from serving_core.errors import ModelError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MOST_HEADER_BYTES: Final = 64 * 2**20
USUAL_HEADER_BYTES: Final = 8 * 2**20  # read first: a few hundred thousand tokens and merges
MOST_ENTRIES: Final = 2**16  # pairs of metadata, and tensors
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
    """How elements are stored: in blocks of so many, of so many bytes."""

    name: str
    block: int
    block_bytes: int


# What the gguf package turns into floats, by its number in the file.
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
    part: int = 0  # which of the model's files it is in

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
        """Those along its first dimension, one after the other; it must have two or more."""
        shape, size_bytes = self.shape[1:], self.num_bytes // self.shape[0]
        for index in range(self.shape[0]):
            yield GgufTensor(shape, self.type_id, self.start + index * size_bytes, self.part)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the tensors' data. Arrays of numbers are `array`s, all other values plain Python ones."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    content: bytes  # the header as it stands in the file


def read_header(stream: BinaryIO, name: str) -> GgufHeader:
    """Reads the header of a file, which may be open at any place; `name` is what it is called. Raises ModelError unless
    all of it is whole, known and lies within the file."""
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
    """What is wrong with a file."""


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: bytes, *, is_all: bool) -> None:
        self.data = data
        self.at = 0
        self._is_all = is_all
        self._elements_left = MOST_ELEMENTS

    def check(self, num_bytes: int) -> None:
        """Raises _Broken unless so many bytes are left."""
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
        """So many texts; there may be hundreds of thousands, so the steps of one are written out."""
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
    """As it is described: its start counts from that of all data."""
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
