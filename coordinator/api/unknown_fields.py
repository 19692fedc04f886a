"""Report the fields of a request that the server does not know, to the client and in the log, or refuse the request."""

import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protos.inference_pb2 import EmbedRequest, GenerateRequest, SamplingParams, ScoreRequest
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

logger = logging.getLogger(__name__)

WARNING_HEADER: Final = "x-splitserve-warning"  # an HTTP header, or gRPC trailing metadata
MAX_NAMED: Final = 8
MAX_PARTS: Final = 4096  # submessages of a request that are checked
MAX_NAME_CHARS: Final = 40
MAX_LOGGED: Final = 256  # distinct log lines: clients determine their text


class UnknownFields:
    """Handle unknown fields: a warning by default, an error when strict."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def check(self, names: Sequence[str]) -> str:
        """Return a warning that lists the unknown fields `names`, or an empty string without any.

        Each distinct warning is also logged once, up to MAX_LOGGED. When strict, raises RequestError instead.
        """
        if not names:
            return ""
        warning = f"unknown fields: {_listed(names)}"
        if self._strict:
            raise RequestError(BAD_PARAM, warning, field=_shown(names[0]))
        if warning not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(warning)
            logger.warning("ignored in requests, told once: %s", warning)
        return warning


ClientRequest = GenerateRequest | EmbedRequest | ScoreRequest


def unknown_in_message(request: ClientRequest) -> list[str]:
    """Return the unknown fields of a request and its submessages, each once.

    A field is named by the path of known fields and its number, since protobuf keeps only the number. At most MAX_PARTS
    messages are checked.
    """
    parts = itertools.islice(_parts(request, ""), MAX_PARTS)
    return list(dict.fromkeys(name for part, prefix in parts for name in _numbers(part, prefix)))


def _parts(message: Message, prefix: str) -> Iterator[tuple[Message, str]]:
    """Yield the message and its submessages, each with the prefix of its field names."""
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
    """Return a name as printable ASCII for a header or the log: shortened, and quoted if it is empty or has outer
    blanks."""
    text = json.dumps(name).replace("\x7f", "\\u007f")
    if name.strip() == name != "":
        text = text[1:-1]
    return text if len(text) <= MAX_NAME_CHARS else text[: MAX_NAME_CHARS - 3] + "..."


# Field count of a request, from its bytes: protobuf parses a message, and lists its unknown fields, in one
# uninterruptible call.

MAX_FIELDS: Final = 4096
MAX_SCORE_FIELDS: Final = 2**15  # of which each label is one
_WHOLE: Final = "request"
_SCORES: Final = "score request"
_PARTS: Final = {
    (within, message.DESCRIPTOR.fields_by_name[name].number): name
    for within, message, name in (
        (_WHOLE, GenerateRequest, "chat"),
        (_WHOLE, GenerateRequest, "sampling_params"),
        ("sampling_params", SamplingParams, "choice"),
        (_SCORES, ScoreRequest, "chat"),
        (_SCORES, ScoreRequest, "items"),
    )
}


def check_num_fields(message: bytes) -> None:
    """Raise RequestError when a GenerateRequest has more than MAX_FIELDS fields.

    Counts the fields of the request, its chat, its sampling_params and their choice together; each list entry is a
    field. Bytes that are not protobuf are left to the parser.
    """
    _check_fields(message, _WHOLE, MAX_FIELDS)


def check_num_score_fields(message: bytes) -> None:
    """Raise RequestError when a ScoreRequest, with its chat and items, has more than MAX_SCORE_FIELDS fields."""
    _check_fields(message, _SCORES, MAX_SCORE_FIELDS)


def _check_fields(message: bytes, whole: str, most: int) -> None:
    num_fields, parts = 0, [(whole, 0, len(message))]
    while parts:
        part, start, end = parts.pop()
        for number, value_start, value_end in _fields(message, start, end):
            num_fields += 1
            if num_fields > most:
                problem = f"{part} has more fields and list entries than the limit, {most}"
                raise RequestError(BAD_PARAM, problem, field=part)
            if (part, number) in _PARTS:
                parts.append((_PARTS[part, number], value_start, value_end))


def _fields(message: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of every field and the start and end of its value. Group tags count as fields."""
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
    """Return a varint and its end; an unterminated varint takes all remaining bytes."""
    value = 0
    for index, byte in enumerate(message[at : min(at + 10, end)]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    return value, end
