"""Read and check the fields of a JSON object from a client."""

import asyncio
import json
import math
import re
import zlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, TypeGuard, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM, MALFORMED_REQUEST

INT32: Final = (-(2**31), 2**31 - 1)
INT64: Final = (-(2**63), 2**63 - 1)
UINT32: Final = (0, 2**32 - 1)
TEXT: Final = "a string of valid Unicode"
MAX_VALUES: Final = 2**18  # of a body: JSON parsing cannot be interrupted; so many take tens of milliseconds
MAX_STRINGS: Final = 2**16
INDEX: Final = re.compile(r"\[\d+\]")


class Fields:
    """Check the values of a JSON object as they are read.

    A null counts as missing, and a missing value is returned as None. A value of the wrong type raises RequestError
    with the field and the value; a value with too many entries raises it with their number and the limit. `unread`
    returns the fields that no caller has read, since clients send fields of other servers.
    """

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()
        self._within: list[Fields] = []

    @property
    def place(self) -> str:
        """Path of the object in the body; empty for the body itself."""
        return self._prefix.removesuffix(".")

    def __contains__(self, name: str) -> bool:
        return self.raw(name) is not None

    def raw(self, name: str) -> Any:
        """Return the unchecked value, or None when missing."""
        self._read.add(name)
        return self._values.get(name)

    def unread(self) -> list[str]:
        """Return the dotted names, each once, of the fields that are not null and have not been read.

        Nested objects are included; objects of one list share a name, as in messages[].role.
        """
        prefix = INDEX.sub("[]", self._prefix)
        names = [prefix + name for name, value in self._values.items() if value is not None and name not in self._read]
        names += [name for part in self._within for name in part.unread()]
        return list(dict.fromkeys(names))

    def integer(self, name: str, within: tuple[int, int] = INT32) -> int | None:
        value: int | None = self.raw(name)
        if value is None or _is_integer(value, within):
            return value
        raise self.error(name, _integer_kind(value, within))

    def number(self, name: str) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        try:
            if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
                return float(value)
        except OverflowError:
            pass
        raise self.error(name, "a finite number")

    def boolean(self, name: str) -> bool | None:
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.error(name, "true or false")

    def text(self, name: str) -> str | None:
        value: str | None = self.raw(name)
        if value is None or _is_text(value):
            return value
        raise self.error(name, TEXT)

    def texts(self, name: str, limit: int) -> list[str]:
        """Return a list of strings, or a single string as a list; empty when missing."""
        value = self._counted(name, limit)
        if value is None:
            return []
        if isinstance(value, list):
            return self._entries(name, value, _is_text, TEXT)
        if not isinstance(value, str):
            raise self.error(name, "a string or a list of strings")
        return [self.text(name) or ""]

    def integers(self, name: str, limit: int = MAX_VALUES, within: tuple[int, int] = UINT32) -> list[int]:
        """Return a list of integers; empty when missing."""
        value = self._counted(name, limit)
        if value is None:
            return []
        bounds = f"within [{within[0]}, {within[1]}]"
        if not isinstance(value, list):
            raise self.error(name, f"a list of integers {bounds}")
        return self._entries(name, value, lambda item: _is_integer(item, within), f"an integer {bounds}")

    def mapping(self, name: str, limit: int = MAX_VALUES) -> dict[str, Any] | None:
        """Return a nested object as a dict, with unchecked values."""
        value = self._counted(name, limit)
        if value is None or isinstance(value, dict):
            return value
        raise self.error(name, "an object")

    def nested(self, name: str, limit: int = MAX_VALUES) -> "Fields | None":
        """Return a nested object."""
        value = self.mapping(name, limit)
        return None if value is None else self._part(value, f"{self._prefix}{name}.")

    def objects(self, name: str, limit: int) -> "list[Fields]":
        """Return a list of objects; empty when missing."""
        value = self._counted(name, limit)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(name, "a list of objects")
        objects = self._entries(name, value, lambda item: isinstance(item, dict), "an object")
        return [self._part(item, f"{self._prefix}{name}[{index}].") for index, item in enumerate(objects)]

    def lists(self, name: str, limit: int) -> "list[Fields]":
        """Return a list of lists, each as the field "" of its own object; empty when missing."""
        value = self._counted(name, limit)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(name, "a list of lists")
        lists = self._entries(name, value, lambda item: isinstance(item, list), "a list")
        return [self._part({"": item}, f"{self._prefix}{name}[{index}]") for index, item in enumerate(lists)]

    def as_json(self, name: str, value: Any) -> str:
        """Return a value of this field as JSON text; empty for a falsy value."""
        try:
            text = json.dumps(value, ensure_ascii=False) if value else ""
            text.encode()
        except (RecursionError, UnicodeEncodeError) as error:
            problem = "is nested too deeply, or has strings that are no valid Unicode"
            raise self.problem(name, problem) from error
        return text

    def _entries(self, name: str, entries: list[Any], is_right: Callable[[Any], bool], expected: str) -> list[Any]:
        """Return the entries of a list if all are valid; otherwise raise RequestError for the first invalid entry."""
        for index, entry in enumerate(entries):
            if not is_right(entry):
                raise self.problem(f"{name}[{index}]", f"must be {expected}, not {shown(entry)}")
        return entries

    def _counted(self, name: str, limit: int) -> Any:
        """Return the value; raise RequestError when a list or object has more entries than `limit`."""
        value = self.raw(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise self.problem(name, f"has {len(value)} entries, the limit is {limit}")
        return value

    def _part(self, values: dict[str, Any], prefix: str) -> "Fields":
        self._within.append(Fields(values, prefix))
        return self._within[-1]

    def error(self, name: str, expected: str) -> RequestError:
        """Return the error for a value that is not as expected."""
        return self.problem(name, f"must be {expected}, not {shown(self._values.get(name))}")

    def problem(self, name: str, problem: str) -> RequestError:
        """Return the error for a field."""
        field = f"{self._prefix}{name}"
        return RequestError(BAD_PARAM, f"{field} {problem}", field=field)


def read_fields(body: bytes) -> Fields:
    """Return the JSON object in a request's body. Raises RequestError for anything else."""
    try:
        text = body.decode("utf-8-sig")
        check_num_values(body)
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(MALFORMED_REQUEST, f"the body is not JSON: {str(error)[:100]}") from error
    if not isinstance(values, dict):
        raise RequestError(MALFORMED_REQUEST, f"the body must be a JSON object, not {shown(values)}")
    return Fields(values)


def check_num_values(body: bytes) -> None:
    """Raise RequestError for JSON with so many values that parsing would block all other threads for long."""
    delimited = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the remaining quotes begin or end a string
    num_strings = delimited.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise RequestError(BAD_PARAM, f"the body has {num_strings} strings, the limit is {MAX_STRINGS}")
    num_values = 1 + sum(part.count(b",") for part in delimited.split(b'"')[::2])
    if num_values > MAX_VALUES:
        raise RequestError(BAD_PARAM, f"the body has {num_values} values, the limit is {MAX_VALUES}")


def shown(value: Any) -> str:
    """Return a value for an error message: JSON, shortened."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 2**64 else "an integer beyond 64 bits"
    return text if len(text) <= 80 else text[:77] + "..."


def _is_integer(value: Any, within: tuple[int, int]) -> bool:
    return _is_whole(value) and within[0] <= value <= within[1]


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer_kind(value: Any, within: tuple[int, int]) -> str:
    """Return what the value must be. The bounds of the protobuf type are named only for an integer beyond them."""
    if within in (INT32, INT64) and not _is_whole(value):
        return "an integer"
    return f"an integer within [{within[0]}, {within[1]}]"


def _is_text(value: Any) -> bool:
    """Return whether a value is a string of valid Unicode. JSON can express a lone surrogate, which is not."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- Body of a call: JSON by its Content-Type, limited in size and time ----

R = TypeVar("R")

MAX_BODY_BYTES: Final = 4 * 2**20  # as at the gRPC API
LONG_BODY_BYTES: Final = 2**16  # about a millisecond of work; longer bodies are parsed off the event loop
BODY_TIMEOUT_S: Final = 30.0


async def read_json(request: Request, parse: Callable[[Fields], R]) -> R:
    """Return `parse` of the JSON object in the body. `parse` must perform no I/O, since it may run in a thread.

    Raises HTTPException or RequestError. A body over the limit is not kept.
    """
    _check_type(request.headers.get("content-type", ""))
    is_gzip = _is_gzip(request.headers.get("content-encoding", ""))
    _check_size(int(request.headers.get("content-length", 0)))
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                _check_size(len(body))
    except TimeoutError as error:
        detail = f"the body was not there within {BODY_TIMEOUT_S:g} s"
        raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, detail) from error
    if is_gzip:
        return await asyncio.to_thread(lambda: parse(read_fields(gunzipped(body))))
    if len(body) <= LONG_BODY_BYTES:
        return parse(read_fields(bytes(body)))
    return await asyncio.to_thread(lambda: parse(read_fields(bytes(body))))


def _is_gzip(encoding: str) -> bool:
    """Return whether the body is gzip. Raises HTTPException for any encoding but gzip or none."""
    name = encoding.strip().lower()
    if name not in ("", "identity", "gzip", "x-gzip"):
        detail = f"the body must be as it is, or gzip, not of Content-Encoding: {name[:80]}"
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail, {"accept-encoding": "gzip"})
    return name.endswith("gzip")


def gunzipped(body: bytes | bytearray) -> bytes:
    """Return the decompressed body, at most MAX_BODY_BYTES. Raises HTTPException or RequestError."""
    reader = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        text = reader.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise RequestError(MALFORMED_REQUEST, f"the body is no gzip: {error}") from error
    _check_size(len(text))
    if not reader.eof or reader.unused_data:
        raise RequestError(MALFORMED_REQUEST, "the body is no gzip: it ends too early, or goes on behind its end")
    return text


def _check_type(content_type: str) -> None:
    """Raise HTTPException unless the content type is JSON.

    Any web page can make a browser send plain text, a form or untyped bytes to a server that the page cannot read from;
    for JSON the browser asks that server first (CORS preflight).
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    detail = f"the body must be JSON: send Content-Type: application/json, not {kind[:80] or 'none'}"
    raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        detail = f"the body has {num_bytes} bytes or more, the limit is {MAX_BODY_BYTES}"
        raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
