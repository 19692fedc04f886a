"""Convert failures to gRPC statuses.

A RequestError becomes the status of its reason with google.rpc details: always ErrorInfo, BadRequest for a wrong field,
RetryInfo when a retry can help. Any other exception is logged and becomes INTERNAL without a message.
"""

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, Final, TypeAlias, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from coordinator.api.exchange import read, write
from coordinator.api.health import OPEN_METHODS
from coordinator.api.unknown_fields import check_num_fields, check_num_score_fields
from serving_core import reasons
from serving_core.errors import RequestError

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"

DOMAIN: Final = "splitserve"
MAX_UNARY_BYTES: Final = 2**18  # of requests of unary methods; only prompts may be larger
SCORE: Final = "/splitserve.v1.Inference/Score"
RETRY_DELAY_S: Final = 1

Code = grpc.StatusCode
CODES: Final = {
    reasons.BAD_PARAM: Code.INVALID_ARGUMENT,
    reasons.PROMPT_TOO_LONG: Code.INVALID_ARGUMENT,
    reasons.MALFORMED_REQUEST: Code.INVALID_ARGUMENT,
    reasons.MODEL_NOT_FOUND: Code.NOT_FOUND,
    reasons.NODE_NOT_FOUND: Code.NOT_FOUND,
    reasons.NO_OTHER_NODE: Code.FAILED_PRECONDITION,
    reasons.DRAIN_ENDED: Code.FAILED_PRECONDITION,
    reasons.DUPLICATE_REQUEST_ID: Code.ALREADY_EXISTS,
    reasons.QUEUE_FULL: Code.RESOURCE_EXHAUSTED,
    reasons.WOULD_BE_LATE: Code.RESOURCE_EXHAUSTED,
    reasons.SLOW_READER: Code.RESOURCE_EXHAUSTED,
    reasons.NO_PREFILL_WORKER: Code.UNAVAILABLE,
    reasons.NO_DECODE_WORKER: Code.UNAVAILABLE,
    reasons.ABORTED: Code.ABORTED,
    reasons.DRAINING: Code.UNAVAILABLE,
    reasons.WORKER_LOST: Code.UNAVAILABLE,
    reasons.KV_CHECKSUM_MISMATCH: Code.DATA_LOSS,
    reasons.PAIRING_MISMATCH: Code.FAILED_PRECONDITION,
    reasons.ENGINE_ERROR: Code.INTERNAL,
    reasons.DEADLINE_EXCEEDED: Code.DEADLINE_EXCEEDED,
    reasons.UNAUTHENTICATED: Code.UNAUTHENTICATED,
}


def to_status(error: RequestError) -> grpc.Status:
    """Return the status of an error whose reason is in CODES. The metadata key `field` names the wrong field."""
    code = CODES[error.reason]
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)]
    if field := error.metadata.get("field"):
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if is_for_later(error):
        delay = duration_pb2.Duration(seconds=retry_after_s(error))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    rich = status_pb2.Status(code=code.value[0], message=str(error), details=[_packed(part) for part in details])
    status: grpc.Status = rpc_status.to_status(rich)
    return status


def from_status(error: grpc.aio.AioRpcError) -> RequestError:
    """Return the error of a call that `to_status` has ended; DRAINING for a call that has found no server."""
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        detail.Unpack(info)
    if info.reason in CODES:
        return RequestError(info.reason, error.details() or "", **info.metadata)
    if error.code() is Code.UNAVAILABLE:
        return RequestError(reasons.DRAINING, "the coordinator cannot be reached")
    return RequestError(reasons.ENGINE_ERROR, "internal error")


def is_for_later(error: RequestError) -> bool:
    """Return whether the same request may succeed later: its status is UNAVAILABLE, or it was refused for load."""
    return CODES[error.reason] is Code.UNAVAILABLE or error.reason in (reasons.QUEUE_FULL, reasons.WOULD_BE_LATE)


def retry_after_s(error: RequestError) -> int:
    """Return the whole seconds to wait before a retry: the error's `retry_after_s` rounded up, else RETRY_DELAY_S."""
    return math.ceil(float(error.metadata.get("retry_after_s", RETRY_DELAY_S)))


async def abort(context: Any, error: RequestError) -> None:
    """End the call with the status of the error, by raising gRPC's AbortError."""
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)


@asynccontextmanager
async def failures_as_statuses(context: Any, request: Message | None = None) -> AsyncIterator[None]:
    """End the call with the status of any exception raised inside.

    Cancellation and gRPC's own exceptions (the client is gone, the call is aborted) pass through.
    """
    try:
        yield
    except RequestError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:
        logger.debug("the client has left", extra={"request_id": getattr(request, "request_id", "")})
    except Exception:
        logger.exception("a call failed", extra={"request_id": getattr(request, "request_id", "")})
        await abort(context, RequestError(reasons.ENGINE_ERROR, "internal error"))


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Parse the request of every call with a single request, and turn failures into statuses.

    Without it, gRPC answers a request that does not parse with UNKNOWN and the exception's text.
    """

    def __init__(self, place: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Create the interceptor. `place()` is a context manager around each call, except calls that need no key.

        A RequestError that it raises refuses the call.
        """
        self._place = place

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return cast("Handler", handler)
        details: Any = handler_call_details
        place = nullcontext if details.method in OPEN_METHODS else self._place
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        check = check_num_fields if handler.response_streaming else _check_size
        if details.method == SCORE:
            check = check_num_score_fields
        # Registered as streams on both sides, which look the same on the wire: so reading and writing have deadlines,
        # and the place is held from the beginning.
        return grpc.stream_stream_rpc_method_handler(
            _guarded(behaviour, handler.request_deserializer, check, place),
            response_serializer=handler.response_serializer,
        )


def parse(parser: Callable[[bytes], Any], message: bytes) -> Any:
    """Return `parser(message)`. Raises RequestError when the bytes are not the protobuf message that `parser` reads."""
    try:
        return parser(message)
    except DecodeError as error:
        raise RequestError(
            reasons.MALFORMED_REQUEST, "the request is not the protobuf message of this method"
        ) from error


def _guarded(
    behaviour: Callable[..., Any],
    parser: Callable[[bytes], Any],
    check: Callable[[bytes], None],
    place: Callable[[], AbstractContextManager[None]],
) -> Any:
    async def call(_messages: Any, context: Any) -> None:
        async with failures_as_statuses(context):
            with place():
                message = await read(context)
                check(message)
                request = parse(parser, message)
                async with failures_as_statuses(context, request):
                    if (response := await behaviour(request, context)) is not None:
                        await write(context, response)

    return call


def _check_size(message: bytes) -> None:
    if len(message) > MAX_UNARY_BYTES:
        problem = f"the request has {len(message)} bytes, the limit of this method is {MAX_UNARY_BYTES}"
        raise RequestError(reasons.BAD_PARAM, problem)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
