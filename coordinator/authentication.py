"""Lets only calls with the right secret through."""

import hashlib
import secrets
from collections.abc import Iterable
from typing import Any, Final

import grpc

from coordinator.statuses import Continuation, Handler, abort
from engine.errors import RequestError
from protos.reasons import UNAUTHENTICATED

HEALTH_PREFIX: Final = "/grpc.health.v1.Health/"


class BearerSecret:
    """A secret that callers bring as `authorization: Bearer SECRET`."""

    def __init__(self, secret: str) -> None:
        self._digest = _digest(f"Bearer {secret}")

    def is_among(self, authorizations: Iterable[str]) -> bool:
        # Digests are of one length, and all are compared: the time taken tells nothing.
        matches = [secrets.compare_digest(_digest(value), self._digest) for value in authorizations]
        return any(matches)


class BearerAuthentication(grpc.aio.ServerInterceptor):
    """Asks every call for the metadata `authorization: Bearer SECRET`; health checks are exempt."""

    def __init__(self, secret: str) -> None:
        self._secret = BearerSecret(secret)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        details: Any = handler_call_details
        if details.method.startswith(HEALTH_PREFIX) or self._admits(details.invocation_metadata):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)

    def _admits(self, metadata: Any) -> bool:
        return self._secret.is_among([value for key, value in metadata if key == "authorization"])


async def _refuse(_: bytes, context: Any) -> None:
    await abort(context, RequestError(UNAUTHENTICATED, "the metadata must hold authorization: Bearer SECRET"))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
