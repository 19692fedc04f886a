"""Fields of a request that the server does not know: named to the client and in the log, or refused."""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

logger = logging.getLogger(__name__)

WARNING_HEADER: Final = "x-splitserve-warning"  # over HTTP a header, over gRPC trailing metadata
MAX_NAMED: Final = 8
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
    """The numbers of the unknown fields of a request and of its sampling_params, which is all that protobuf knows of
    them."""
    if isinstance(request, inference_pb2.EmbedRequest):
        return list(_numbers(request, ""))
    return [*_numbers(request, ""), *_numbers(request.sampling_params, "sampling_params.")]


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
