"""Fields of a request that the server does not know: named to the client and in the log, or refused."""

import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protos import inference_pb2
from protos.inference_pb2 import GenerateRequest, SamplingParams
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

logger = logging.getLogger(__name__)

WARNING_HEADER: Final = "x-splitserve-warning"  # over HTTP a header, over gRPC trailing metadata
MAX_NAMED: Final = 8
MAX_PARTS: Final = 4096  # of a request, that are looked at
MAX_NAME_CHARS: Final = 40
MAX_LOGGED: Final = 256  # different lines: clients decide what is in them


class UnknownFields:
    """What becomes of unknown fields: by default a warning, when strict a refusal."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def check(self, names: Sequence[str]) -> str:
        """The warning for a request with these unknown fields, empty when there are none. Raises RequestError when
        strict."""
        if not names:
            return ""
        warning = f"unknown fields: {_listed(names)}"
        if self._strict:
            raise RequestError(BAD_PARAM, warning, field=_shown(names[0]))
        if warning not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(warning)
            logger.warning("ignored in requests, told once: %s", warning)
        return warning


def unknown_in_message(request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest) -> list[str]:
    """The numbers of the unknown fields of a request and of what is in it, behind the names of the fields that hold
    them, each once; that is all that protobuf knows of them. In the first MAX_PARTS messages."""
    parts = itertools.islice(_parts(request, ""), MAX_PARTS)
    return list(dict.fromkeys(name for part, prefix in parts for name in _numbers(part, prefix)))


def _parts(message: Message, prefix: str) -> Iterator[tuple[Message, str]]:
    """The message and those in it, with what stands before the names of their fields."""
    yield message, prefix
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in [value] if isinstance(value, Message) else value:
                yield from _parts(part, f"{prefix}{field.name}.")


def _numbers(message: Message, prefix: str) -> Iterator[str]:
    unknown = UnknownFieldSet(message)
    for number in sorted({unknown[index].field_number for index in range(len(unknown))}):
        yield f"{prefix}{number}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(map(_shown, names[:MAX_NAMED])) + (f" and {more} more" if more > 0 else "")


def _shown(name: str) -> str:
    """A name that may stand in a header and in a log: printable ASCII, cut short, with quotes where it has blanks at an
    end or nothing at all."""
    text = json.dumps(name).replace("\x7f", "\\u007f")
    if name.strip() == name != "":
        text = text[1:-1]
    return text if len(text) <= MAX_NAME_CHARS else text[: MAX_NAME_CHARS - 3] + "..."


# How many fields a request has, told from its bytes: protobuf parses at one go, and looks at what it does not know at
# one go too.

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
