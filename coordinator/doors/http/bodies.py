"""Reads the body of a call, which must be JSON by its header, and may be neither large nor slow."""

import asyncio
import zlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from coordinator.doors.http.fields import Fields, read_fields
from serving_core.errors import RequestError
from serving_core.reasons import MALFORMED_REQUEST

R = TypeVar("R")

MAX_BODY_BYTES: Final = 4 * 2**20  # as at the gRPC door
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
