"""Exceptions that a client's calls raise.

SplitServeError
└── ClientError              code, reason, message, field, retry_after_s, metadata
    ├── Refused              the request cannot be served as it is: change it
    ├── Unauthenticated      the API key is missing or wrong
    ├── Overloaded           a queue is full, or an SLO could not be met: try again later
    ├── Unavailable          no server, no node, draining, a node was lost, or the server cancelled: try again later
    ├── DeadlineExceeded     the call's deadline has passed
    ├── Cancelled            this client was closed during the call
    └── ServerFault          anything else
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from serving_core import reasons
from serving_core.errors import SplitServeError
from serving_core.net.channels import why_no_handshake
from serving_core.net.tls import SCHEME


class ClientError(SplitServeError):
    """A failed call.

    `reason` is one of `serving_core.reasons`, or empty when the server did not answer; `field` is the request's wrong
    field, or empty; `retry_after_s` are the seconds to wait before a retry, or None; `metadata` has all other details
    from the server.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        reason: str = "",
        field: str = "",
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata = metadata


class Refused(ClientError):
    """The request cannot be served as it is; the same request will fail again."""


class Unauthenticated(ClientError):
    """The API key is missing or wrong."""


class Overloaded(ClientError):
    """A queue is full, or an SLO could not be met; try again after retry_after_s."""


class Unavailable(ClientError):
    """No server answers, no node can serve, a node was lost, or the server or a proxy cancelled; try again later."""


class DeadlineExceeded(ClientError):
    """The call's deadline has passed."""


class Cancelled(ClientError):
    """The client was closed during the call."""


class ServerFault(ClientError):
    """A fault of the server."""


_CLASSES: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: Refused,
    grpc.StatusCode.NOT_FOUND: Refused,
    grpc.StatusCode.ALREADY_EXISTS: Refused,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Unavailable,  # the server's or a proxy's: the client's own is no RpcError
}


def bad_argument(message: str, *, field: str) -> Refused:
    """Return the error for an argument, named `field`, that a protobuf message cannot hold."""
    return Refused(message, code=grpc.StatusCode.INVALID_ARGUMENT, reason=reasons.BAD_PARAM, field=field)


def from_rpc_error(error: Any, target: str) -> ClientError:
    """Return the exception for a failed call to the server at `target`.

    `error` is an instance of grpc.RpcError or grpc.aio.AioRpcError.
    """
    info, retry_after_s = _details(error)
    reason, field = info.reason, info.metadata.get("field", "")
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and not reason:
        message = _transport_sentence(message, target)
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED and not reason:
        message = f"{target} did not finish the call before its deadline"
    error_class = _CLASSES.get(code, ServerFault)
    told = {"reason": reason, "field": field, "retry_after_s": retry_after_s, "metadata": dict(info.metadata)}
    return error_class(message or code.name, code=code, **told)


def _details(error: Any) -> tuple[error_details_pb2.ErrorInfo, float | None]:
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # inconsistent details, as a proxy may leave them: the status counts
        status = None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details if status is not None else ():
        detail.Unpack(info)
        detail.Unpack(retry)
    return info, _seconds(retry.retry_delay) if retry.HasField("retry_delay") else None


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _transport_sentence(details: str, target: str) -> str:
    over_tls = target.startswith(SCHEME)
    if "failed to connect" in details and (why := why_no_handshake(details, over_tls=over_tls)):
        hint = "" if over_tls else f"; {SCHEME}{target} asks over TLS"
        return f"no connection to {target}: {why}{hint}"
    if "Failed parsing HTTP/2" in details:
        return f"what listens at {target} does not speak gRPC, as a server's HTTP port; gRPC's is 50051 by default"
    if "before receiving SETTINGS" in details:
        return f"{target} takes connections, but does not answer: it is busy, or hangs"
    if "failed to connect" in details or "Connection refused" in details:
        # gRPC reports the last of several addresses: another address may have a server that does not speak gRPC.
        in_grpc = " in gRPC, whose port is 50051 by default" if target.startswith("localhost") else ""
        return f"no server answers at {target}{in_grpc}; start one with: splitserve up"
    if "DNS" in details or "errors resolving" in details:
        return f"{target} is not an address that can be resolved"
    return f"the connection to {target} was lost: {details}"
