"""Read the JSON body of a call, limited in size, time and number of values."""

import asyncio
import json
import zlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from coordinator.api.http.field_types import shown
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM, MALFORMED_REQUEST

R = TypeVar("R")

MAX_VALUES: Final = 2**18  # of a body: JSON parsing cannot be interrupted; so many take tens of milliseconds
MAX_STRINGS: Final = 2**16
MAX_BODY_BYTES: Final = 4 * 2**20  # as at the gRPC API
LONG_BODY_BYTES: Final = 2**16  # about a millisecond of work; longer bodies are parsed off the event loop
BODY_TIMEOUT_S: Final = 30.0


async def read_json(request: Request, parse: Callable[[dict[str, Any]], R]) -> R:
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
        return await asyncio.to_thread(lambda: parse(json_object(gunzipped(body))))
    if len(body) <= LONG_BODY_BYTES:
        return parse(json_object(bytes(body)))
    return await asyncio.to_thread(lambda: parse(json_object(bytes(body))))


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises RequestError for anything else."""
    try:
        text = body.decode("utf-8-sig")
        check_num_values(body)
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(MALFORMED_REQUEST, f"the body is not JSON: {str(error)[:100]}") from error
    if not isinstance(values, dict):
        raise RequestError(MALFORMED_REQUEST, f"the body must be a JSON object, not {shown(values)}")
    return values


def check_num_values(body: bytes) -> None:
    """Raise RequestError for JSON with so many values that parsing would block all other threads for long."""
    delimited = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the remaining quotes begin or end a string
    num_strings = delimited.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise RequestError(BAD_PARAM, f"the body has {num_strings} strings, the limit is {MAX_STRINGS}")
    num_values = 1 + sum(part.count(b",") for part in delimited.split(b'"')[::2])
    if num_values > MAX_VALUES:
        raise RequestError(BAD_PARAM, f"the body has {num_values} values, the limit is {MAX_VALUES}")


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


def _is_gzip(encoding: str) -> bool:
    """Return whether the body is gzip. Raises HTTPException for any encoding but gzip or none."""
    name = encoding.strip().lower()
    if name not in ("", "identity", "gzip", "x-gzip"):
        detail = f"the body must be as it is, or gzip, not of Content-Encoding: {name[:80]}"
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail, {"accept-encoding": "gzip"})
    return name.endswith("gzip")


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
