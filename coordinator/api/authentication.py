"""Lets only calls with the right secret through."""

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final

import grpc

from coordinator.api.health import OPEN_METHODS
from coordinator.api.statuses import Continuation, Handler, abort
from serving_core.errors import RequestError
from serving_core.reasons import UNAUTHENTICATED

ASKER: Final = ContextVar("asker", default="")  # whose secret the call at hand has brought, where it has a name
NO_API_KEY: Final = (
    "the API key is missing or wrong: --api-key or SPLITSERVE_API_KEY, sent as authorization: Bearer KEY"
)
NO_ADMIN_KEY: Final = "this is the operators': it takes --admin-key or SPLITSERVE_ADMIN_KEY in place of an API key"
NO_FLEET_SECRET: Final = "the fleet secret is missing or wrong: SPLITSERVE_FLEET_SECRET must be the coordinator's"


class BearerSecrets:
    """Secrets that callers bring as `authorization: Bearer SECRET`; the scheme may be written in any case."""

    def __init__(self, holders: Mapping[str, str]) -> None:
        """`holders` are the names of who has them, by secret; empty for no name."""
        self.replace(holders)

    def replace(self, holders: Mapping[str, str]) -> None:
        """Others take their place."""
        self._holders = {_digest(_normal(f"Bearer {secret}")): name for secret, name in holders.items()}

    def holder(self, authorizations: Iterable[str]) -> str | None:
        """The name of who brings one of them; None for a stranger."""
        found = None
        for digest in [_digest(_normal(value)) for value in authorizations]:
            # Digests are of one length, and all are compared: the time taken tells nothing.
            for known, name in self._holders.items():
                if secrets.compare_digest(digest, known):
                    found = name
        return found


class BearerAuthentication(grpc.aio.ServerInterceptor):
    """Asks every call for the metadata `authorization: Bearer SECRET`, and refuses others with the sentence. Health
    checks are exempt, but for Watch, which lasts. A method that is not there is UNIMPLEMENTED for everyone, since the
    secret would not help."""

    def __init__(self, secrets: BearerSecrets, sentence: str, service: str = "") -> None:
        """With a service, of the calls of that one alone."""
        self._secrets = secrets
        self._sentence = sentence
        self._prefix = f"/{service}/" if service else "/"

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        details: Any = handler_call_details
        handler = await continuation(handler_call_details)
        is_ours = details.method.startswith(self._prefix)
        is_open = handler is None or not is_ours or details.method in OPEN_METHODS
        if is_open or self._admits(details.invocation_metadata):
            return handler
        return grpc.stream_stream_rpc_method_handler(self._refuse)  # at once: nobody waits for the request

    def _admits(self, metadata: Any) -> bool:
        holder = self._secrets.holder([value for key, value in metadata if key == "authorization"])
        ASKER.set(holder or "")
        return holder is not None

    async def _refuse(self, _: Any, context: Any) -> None:
        await abort(context, RequestError(UNAUTHENTICATED, self._sentence))


def _normal(authorization: str) -> str:
    """RFC 9110, 11.1: a scheme without regard to case, blanks, and what it takes."""
    scheme, _, secret = authorization.partition(" ")
    return f"{scheme.lower()} {secret.lstrip(' ')}"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
