"""The one place where failures become HTTP statuses and OpenAI's error objects.

`reason` is that of the gRPC door, `code` what OpenAI calls it, or the reason again where OpenAI has no word for it;
`param` is the field that is wrong. The statuses are those that gateways between HTTP and gRPC use. What has no reason
of ours becomes 500 without a text.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from coordinator.doors.statuses import CODES, retry_after_s
from serving_core import reasons
from serving_core.errors import RequestError

RETRIED: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)

_STATUSES: Final[dict[grpc.StatusCode, HTTPStatus]] = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
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
# Libraries around OpenAI's API know an overflow, and take a model with a longer context, by these words alone.
_OVERFLOW: Final = "This model's maximum context length is exceeded: "


def status_of(error: RequestError) -> HTTPStatus:
    """500 where HTTP has nothing better."""
    return _STATUSES.get(CODES[error.reason], HTTPStatus.INTERNAL_SERVER_ERROR)


def error_object(error: RequestError) -> dict[str, Any]:
    """What clients of OpenAI's API read."""
    message = _OVERFLOW + str(error) if error.reason == reasons.PROMPT_TOO_LONG else str(error)
    code = _CODES.get(error.reason, error.reason)
    return _object(message, status_of(error), error.metadata.get("field"), code, error.reason)


def error_response(error: RequestError) -> JSONResponse:
    """The answer to a call that has failed before its answer began."""
    status = status_of(error)
    headers = {"retry-after": str(retry_after_s(error))} if status in RETRIED else {}
    if status is HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_object(error), status, headers)


async def on_request_error(_: Request, error: Exception) -> JSONResponse:
    """For starlette."""
    assert isinstance(error, RequestError), error
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """For starlette: what only HTTP knows, such as a wrong method or a body that is too large."""
    assert isinstance(error, HTTPException), error
    status, detail = HTTPStatus(error.status_code), error.detail
    if status is HTTPStatus.NOT_FOUND:
        detail = f"there is no {request.url.path[:80]}"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method[:20]} is not a method of {request.url.path[:80]}"
    return http_error_response(status, detail, error.headers)


def http_error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """What has a status and no reason."""
    return JSONResponse(_object(message, HTTPStatus(status)), status, headers)


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error in the words of an endpoint: `names` are its fields by those of the gRPC door."""
    field = error.metadata.get("field", "")
    if field not in names:
        return error
    message = str(error)
    if message.startswith(f"{field} "):
        message = names[field] + message.removeprefix(field)
    return RequestError(error.reason, message, **{**error.metadata, "field": names[field]})


def internal_error() -> RequestError:
    """What clients hear of a fault of ours."""
    return RequestError(reasons.ENGINE_ERROR, "internal error")


def _object(
    message: str, status: HTTPStatus, param: str | None = None, code: str | None = None, reason: str | None = None
) -> dict[str, Any]:
    if status is HTTPStatus.TOO_MANY_REQUESTS:
        kind = "requests"  # of which there are too many
    else:
        kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "reason": reason}}
