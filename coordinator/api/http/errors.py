"""Convert failures to HTTP statuses and error objects: OpenAI's, and Anthropic's under its own paths.

`reason` is the gRPC reason. `code` is OpenAI's code, or the reason where OpenAI has none. `param` is the wrong field.
The statuses are those of gateways between HTTP and gRPC. An exception without a reason becomes 500 without a message.
"""

from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any, Final

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from coordinator.api.statuses import CODES, is_for_later, retry_after_s
from coordinator.api.validation import BESIDE
from serving_core import reasons
from serving_core.errors import RequestError

# Statuses that clients would retry, in vain or against another client's request to abort.
FOR_NEVER: Final = (reasons.ABORTED, reasons.DUPLICATE_REQUEST_ID, reasons.SLOW_READER, reasons.DEADLINE_EXCEEDED)

_STATUSES: Final[dict[grpc.StatusCode, HTTPStatus]] = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}
_CODES: Final = {
    reasons.PROMPT_TOO_LONG: "context_length_exceeded",
    reasons.MODEL_NOT_FOUND: "model_not_found",
    reasons.UNAUTHENTICATED: "invalid_api_key",
    reasons.QUEUE_FULL: "rate_limit_exceeded",
    reasons.WOULD_BE_LATE: "rate_limit_exceeded",
}
# Client libraries recognize an overflow, and switch to a model with a longer context, by these words alone.
_OVERFLOW: Final = "This model's maximum context length is exceeded: "
_ANTHROPIC_OVERFLOW: Final = "prompt is too long: "  # likewise

ANTHROPIC_PATH: Final = "/v1/messages"
_ANTHROPIC_TYPES: Final = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def status_of(error: RequestError) -> HTTPStatus:
    """Return the HTTP status of an error; 500 without a better one."""
    return _STATUSES.get(CODES[error.reason], HTTPStatus.INTERNAL_SERVER_ERROR)


def error_object(error: RequestError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    message = _OVERFLOW + str(error) if error.reason == reasons.PROMPT_TOO_LONG else str(error)
    code = _CODES.get(error.reason, error.reason)
    return _object(message, status_of(error), error.metadata.get("field"), code, error.reason)


def anthropic_error_object(error: RequestError) -> dict[str, Any]:
    """Return Anthropic's error object."""
    message = _ANTHROPIC_OVERFLOW + str(error) if error.reason == reasons.PROMPT_TOO_LONG else str(error)
    return _anthropic_object(message, status_of(error))


def error_response(error: RequestError, path: str = "") -> JSONResponse:
    """Return the response for a call of `path` that failed before its response began."""
    status = status_of(error)
    told = anthropic_error_object(error) if _is_anthropic(path) else error_object(error)
    headers = {"retry-after": str(retry_after_s(error))} if is_for_later(error) else {}
    if error.reason in FOR_NEVER:
        headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients obey this header
    if status is HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(told, status, headers)


async def on_request_error(request: Request, error: Exception) -> JSONResponse:
    """Handle a RequestError for starlette."""
    assert isinstance(error, RequestError), error
    return error_response(error, request.scope["path"])


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Handle starlette's HTTPException, such as a wrong method or a body that is too large."""
    assert isinstance(error, HTTPException), error
    status, detail = HTTPStatus(error.status_code), error.detail
    if status is HTTPStatus.NOT_FOUND:
        detail = f"there is no {request.url.path[:80]}"
        if meant := _meant(request.url.path, {route.path for route in request.app.routes}):
            detail += f"; there is {meant}"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method[:20]} is not a method of {request.url.path[:80]}"
    return http_error_response(status, detail, request.scope["path"], error.headers)


def _meant(path: str, paths: Collection[str]) -> str:
    """Return the existing path that a client probably meant; empty without one.

    Corrects a missing or doubled /v1, as clients write base URLs, and a trailing slash; / in a browser means the page.
    """
    bare = path.rstrip("/").removeprefix("/v1").removeprefix("/v1")
    candidates = ("/ui",) if path == "/" else (f"/v1{bare}", bare)
    return next((each for each in candidates if each in paths), "")


def http_error_response(status: int, message: str, path: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the response for an error that has an HTTP `status`, but no reason.

    `path` is that of the call: under /v1/messages the error object is Anthropic's, elsewhere OpenAI's. `headers` are
    those of the response. Raises ValueError for an unknown status.
    """
    make = _anthropic_object if _is_anthropic(path) else _object
    return JSONResponse(make(message, HTTPStatus(status)), status, headers)


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return the error with the field names of an endpoint.

    `names` maps the field names of the error to those of the endpoint, also for fields within them.
    """
    field, message = error.metadata.get("field", ""), str(error)
    for ours, theirs in names.items():
        message = message.replace(f" {BESIDE} {ours},", f" {BESIDE} {theirs},")
    known = max((name for name in names if _is_within(field, name)), key=len, default=None)
    if known is None:
        return error if message == str(error) else RequestError(error.reason, message, **error.metadata)
    told = names[known] + field.removeprefix(known)
    if message.startswith(f"{field} "):
        message = told + message.removeprefix(field)
    return RequestError(error.reason, message, **{**error.metadata, "field": told})


def _is_within(field: str, name: str) -> bool:
    return field == name or field.startswith((f"{name}.", f"{name}["))


def internal_error() -> RequestError:
    """Return the error that clients get for an internal fault."""
    return RequestError(reasons.ENGINE_ERROR, "internal error")


def _object(
    message: str, status: HTTPStatus, param: str | None = None, code: str | None = None, reason: str | None = None
) -> dict[str, Any]:
    if status is HTTPStatus.TOO_MANY_REQUESTS:
        kind = "requests"  # OpenAI's type for a rate limit
    else:
        kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "reason": reason}}


def _anthropic_object(message: str, status: HTTPStatus) -> dict[str, Any]:
    is_clients = status < HTTPStatus.INTERNAL_SERVER_ERROR
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if is_clients else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
