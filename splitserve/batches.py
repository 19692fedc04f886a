"""Read files of requests in the format of OpenAI's batches, a JSON object a line, and write lines of results. Pure."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from serving_core.errors import SettingsError
from serving_core.json_fields import json_line
from serving_core.units import MIB, size_of

MAX_LINE_BYTES: Final = 4 * MIB + 4096  # what the server takes in one body, and what stands around it
LATER: Final = (429, 503, 529)  # statuses of a server that turns requests away for now


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of a file: path and body of an HTTP request, and the id that its result gets.

    `custom_id` is None for a line that cannot be read. `problem` says why the request cannot be sent, empty if it can.
    """

    custom_id: str | None
    path: str
    body: bytes
    problem: str = ""


def batch_requests(lines: Iterable[bytes]) -> Iterator[BatchRequest]:
    """Yield the requests of a file's lines; blank lines are skipped.

    Raises SettingsError, with the line's number, for a line that is too long or no request, and for a repeated
    custom_id.
    """
    numbers: dict[str | None, int] = {}
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_BYTES:
            raise SettingsError(f"line {number} has more than {size_of(MAX_LINE_BYTES)}, the most that is taken")
        if not line.strip():
            continue
        try:
            request = _parsed(line)
        except ValueError as error:
            raise SettingsError(f"line {number} {error}") from error
        except RecursionError:
            yield BatchRequest(None, "", b"", f"line {number} is nested too deeply to be read")
            continue
        if (first := numbers.setdefault(request.custom_id, number)) != number:
            raise SettingsError(f"line {number} has the custom_id of line {first}: {str(request.custom_id)[:80]!r}")
        yield request


def _parsed(line: bytes) -> BatchRequest:
    try:
        given = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError("is no JSON object")
    custom_id, path, body = (given.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("needs a custom_id, a text by which its answer is known")
    if given.get("method", "POST") != "POST":
        raise ValueError(f"must have the method POST, not {given['method']!r}")
    if not isinstance(path, str) or not (path.startswith("/") and path.isascii() and path.isprintable()):
        raise ValueError("needs a url such as /v1/chat/completions")
    if not isinstance(body, dict):
        raise ValueError("needs a body, the JSON object that is sent")
    if body.get("stream"):
        raise ValueError("asks for a stream: the answers of a batch come whole")
    try:
        return BatchRequest(custom_id, path, json_line(body).encode())
    except (ValueError, RecursionError) as error:
        return BatchRequest(custom_id, path, b"", f"the body is no JSON that can be sent: {error}")


def answered(request: BatchRequest, status: int, request_id: str, body: Any) -> str:
    """Return the result line, as JSON, of a request that the server answered, with an error status or not.

    If the body cannot be written as JSON, the line says that the request failed.
    """
    response = {"status_code": status, "request_id": request_id, "body": body}
    try:
        return _line(request, request_id, response, None)
    except (ValueError, RecursionError) as error:
        return failed(request, "invalid_response", f"status {status}, and no JSON that can be written down: {error}")


def failed(request: BatchRequest, code: str, message: str) -> str:
    """Return the result line, as JSON, of a request that got no answer."""
    return _line(request, "", None, {"code": code, "message": message})


def _line(request: BatchRequest, request_id: str, response: Any, error: Any) -> str:
    told = {"id": f"batch_req_{request_id}", "custom_id": request.custom_id, "response": response, "error": error}
    return json_line(told)
