"""How many fields a request has, told from its bytes: protobuf parses at one go, and looks at what it does not know at
one go too."""

from collections.abc import Iterator
from typing import Final

from protos.inference_pb2 import GenerateRequest, SamplingParams
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

MAX_FIELDS: Final = 4096
_WHOLE: Final = "request"
_PARTS: Final = {
    (within, message.DESCRIPTOR.fields_by_name[name].number): name
    for within, message, name in (
        (_WHOLE, GenerateRequest, "chat"),
        (_WHOLE, GenerateRequest, "sampling_params"),
        ("sampling_params", SamplingParams, "choice"),
    )
}


def check_num_fields(message: bytes) -> None:
    """Raises RequestError when a GenerateRequest, its chat and its sampling_params with their choice have more fields
    together than the limit; each entry of a list is one. What is no protobuf is left to the parser."""
    num_fields, parts = 0, [(_WHOLE, 0, len(message))]
    while parts:
        part, start, end = parts.pop()
        for number, value_start, value_end in _fields(message, start, end):
            num_fields += 1
            if num_fields > MAX_FIELDS:
                problem = f"{part} has more fields and list entries than the limit, {MAX_FIELDS}"
                raise RequestError(BAD_PARAM, problem, field=part)
            if (part, number) in _PARTS:
                parts.append((_PARTS[part, number], value_start, value_end))


def _fields(message: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number of every field, and where its value begins and ends. The marks of groups count as fields."""
    while at < end:
        tag, at = _varint(message, at, end)
        start = at
        match tag & 7:
            case 0:
                _, at = _varint(message, at, end)
            case 1:
                at += 8
            case 2:
                length, start = _varint(message, at, end)
                at = start + length
            case 5:
                at += 4
        yield tag >> 3, start, min(at, end)


def _varint(message: bytes, at: int, end: int) -> tuple[int, int]:
    """A number, and where it ends; one that does not end takes all that is left."""
    value = 0
    for index, byte in enumerate(message[at : min(at + 10, end)]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    return value, end
