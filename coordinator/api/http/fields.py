"""Checked reading of the JSON object that a client sends."""

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
MAX_VALUES: Final = 2**18  # in a body: JSON is parsed at one go, in tens of milliseconds
MAX_STRINGS: Final = 2**16
INDEX: Final = re.compile(r"\[\d+\]")


class Fields:
    """A JSON object whose values are checked as they are read. A null counts as missing; what is missing is None. A
    value of the wrong kind raises RequestError with the field's name and the value, and one of too many entries with
    their number and the limit. `unread` names what nobody has asked for: clients send what other servers know."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()
        self._within: list[Fields] = []

    @property
    def place(self) -> str:
        """Where in the body the object stands; empty for the body itself."""
        return self._prefix.removesuffix(".")

    def __contains__(self, name: str) -> bool:
        return self.raw(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it stands, None when it is missing."""
        self._read.add(name)
        return self._values.get(name)

    def unread(self) -> list[str]:
        """The fields that are there but have not been read, also in the objects within that have been; those of all
        objects of a list by one name."""
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
        """A list of strings, or one string alone; empty when it is missing."""
        value = self._counted(name, limit)
        if value is None:
            return []
        if isinstance(value, list):
            return self._entries(name, value, _is_text, TEXT)
        if not isinstance(value, str):
            raise self.error(name, "a string or a list of strings")
        return [self.text(name) or ""]

    def integers(self, name: str, limit: int = MAX_VALUES, within: tuple[int, int] = UINT32) -> list[int]:
        """A list of integers; empty when it is missing."""
        value = self._counted(name, limit)
        if value is None:
            return []
        bounds = f"within [{within[0]}, {within[1]}]"
        if not isinstance(value, list):
            raise self.error(name, f"a list of integers {bounds}")
        return self._entries(name, value, lambda item: _is_integer(item, within), f"an integer {bounds}")

    def mapping(self, name: str, limit: int = MAX_VALUES) -> dict[str, Any] | None:
        """An object within this one, as it stands."""
        value = self._counted(name, limit)
        if value is None or isinstance(value, dict):
            return value
        raise self.error(name, "an object")

    def nested(self, name: str, limit: int = MAX_VALUES) -> "Fields | None":
        """An object within this one."""
        value = self.mapping(name, limit)
        return None if value is None else self._part(value, f"{self._prefix}{name}.")

    def objects(self, name: str, limit: int) -> "list[Fields]":
        """A list of objects; empty when it is missing."""
        value = self._counted(name, limit)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(name, "a list of objects")
        objects = self._entries(name, value, lambda item: isinstance(item, dict), "an object")
        return [self._part(item, f"{self._prefix}{name}[{index}].") for index, item in enumerate(objects)]

    def lists(self, name: str, limit: int) -> "list[Fields]":
        """A list of lists, each of which is the field "" of its own object; empty when it is missing."""
        value = self._counted(name, limit)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(name, "a list of lists")
        lists = self._entries(name, value, lambda item: isinstance(item, list), "a list")
        return [self._part({"": item}, f"{self._prefix}{name}[{index}]") for index, item in enumerate(lists)]

    def as_json(self, name: str, value: Any) -> str:
        """JSON text of a value that came with this field; empty for one that asks for nothing."""
        try:
            text = json.dumps(value, ensure_ascii=False) if value else ""
            text.encode()
        except (RecursionError, UnicodeEncodeError) as error:
            problem = "is nested too deeply, or has strings that are no valid Unicode"
            raise self.problem(name, problem) from error
        return text

    def _entries(self, name: str, entries: list[Any], is_right: Callable[[Any], bool], expected: str) -> list[Any]:
        """The entries of a list, if all are as expected; else the first that is not is named."""
        for index, entry in enumerate(entries):
            if not is_right(entry):
                raise self.problem(f"{name}[{index}]", f"must be {expected}, not {shown(entry)}")
        return entries

    def _counted(self, name: str, limit: int) -> Any:
        """The value, of which a list or an object has no more entries than the limit."""
        value = self.raw(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise self.problem(name, f"has {len(value)} entries, the limit is {limit}")
        return value

    def _part(self, values: dict[str, Any], prefix: str) -> "Fields":
        self._within.append(Fields(values, prefix))
        return self._within[-1]

    def error(self, name: str, expected: str) -> RequestError:
        """What to raise about a value that is not as expected."""
        return self.problem(name, f"must be {expected}, not {shown(self._values.get(name))}")

    def problem(self, name: str, problem: str) -> RequestError:
        """What to raise about a field."""
        field = f"{self._prefix}{name}"
        return RequestError(BAD_PARAM, f"{field} {problem}", field=field)


def read_fields(body: bytes) -> Fields:
    """The JSON object in the body of a request. Raises RequestError for anything else."""
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
    """Raises RequestError for JSON that takes long to parse: no other thread runs meanwhile."""
    delimited = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin or end a string
    num_strings = delimited.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise RequestError(BAD_PARAM, f"the body has {num_strings} strings, the limit is {MAX_STRINGS}")
    num_values = 1 + sum(part.count(b",") for part in delimited.split(b'"')[::2])
    if num_values > MAX_VALUES:
        raise RequestError(BAD_PARAM, f"the body has {num_values} values, the limit is {MAX_VALUES}")


def shown(value: Any) -> str:
    """A value for an error message: as JSON, cut short."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 2**64 else "an integer beyond 64 bits"
    return text if len(text) <= 80 else text[:77] + "..."


def _is_integer(value: Any, within: tuple[int, int]) -> bool:
    return _is_whole(value) and within[0] <= value <= within[1]


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer_kind(value: Any, within: tuple[int, int]) -> str:
    """What is asked for in the place of a value. The wire's own bounds are told only where they are the matter."""
    if within in (INT32, INT64) and not _is_whole(value):
        return "an integer"
    return f"an integer within [{within[0]}, {within[1]}]"


def _is_text(value: Any) -> bool:
    """JSON can write half of a surrogate pair, which is no text."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- Reads the body of a call, which must be JSON by its header, and may be neither large nor slow ----

R = TypeVar("R")

MAX_BODY_BYTES: Final = 4 * 2**20  # as at the gRPC API
LONG_BODY_BYTES: Final = 2**16  # about a millisecond of work; longer bodies are parsed off the event loop
BODY_TIMEOUT_S: Final = 30.0


async def read_json(request: Request, parse: Callable[[Fields], R]) -> R:
    """What `parse`, which is pure, makes of the JSON object that a client sends. Raises HTTPException or RequestError;
    what is too large is not kept."""
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
    """Raise HTTPException for another encoding of a body than gzip or none."""
    name = encoding.strip().lower()
    if name not in ("", "identity", "gzip", "x-gzip"):
        detail = f"the body must be as it is, or gzip, not of Content-Encoding: {name[:80]}"
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail, {"accept-encoding": "gzip"})
    return name.endswith("gzip")


def gunzipped(body: bytes | bytearray) -> bytes:
    """Return what was compressed; no more than the limit is ever made of it. Raises HTTPException or RequestError."""
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
    """Any web page can make a browser send plain text, a form, or bytes of no type at all to a server that it cannot
    otherwise reach; for JSON the browser asks that server first."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    detail = f"the body must be JSON: send Content-Type: application/json, not {kind[:80] or 'none'}"
    raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        detail = f"the body has {num_bytes} bytes or more, the limit is {MAX_BODY_BYTES}"
        raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
