"""Authenticate HTTP and gRPC calls by bearer secrets."""

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

ASKER: Final = ContextVar("asker", default="")  # name of the holder of the current call's secret; empty without a name
NO_API_KEY: Final = (
    "the API key is missing or wrong: --api-key or SPLITSERVE_API_KEY, sent as authorization: Bearer KEY"
)
NO_ADMIN_KEY: Final = "this is the operators': it takes --admin-key or SPLITSERVE_ADMIN_KEY in place of an API key"
NO_FLEET_SECRET: Final = "the fleet secret is missing or wrong: SPLITSERVE_FLEET_SECRET must be the coordinator's"


class BearerSecrets:
    """Hold the secrets that callers send as `authorization: Bearer SECRET`. The scheme is case-insensitive."""

    def __init__(self, holders: Mapping[str, str]) -> None:
        """Create the set from a map of secret to holder name; an empty string is no name."""
        self.replace(holders)

    def replace(self, holders: Mapping[str, str]) -> None:
        """Replace all secrets by those of a map of secret to holder name; an empty string is no name."""
        self._holders = {_digest(_normal(f"Bearer {secret}")): name for secret, name in holders.items()}

    def holder(self, authorizations: Iterable[str]) -> str | None:
        """Return the holder's name of a secret that matches a header value, or None when none matches.

        `authorizations` are the values of the call's `authorization` headers. A name may be empty. Comparison takes
        constant time.
        """
        found = None
        for digest in [_digest(_normal(value)) for value in authorizations]:
            # Digests have equal length and every known digest is compared, so that the time taken reveals nothing.
            for known, name in self._holders.items():
                if secrets.compare_digest(digest, known):
                    found = name
        return found


class BearerAuthentication(grpc.aio.ServerInterceptor):
    """Refuse gRPC calls without the metadata `authorization: Bearer SECRET`.

    Health checks need no secret, except Watch, which holds its call open. An unknown method is UNIMPLEMENTED for every
    caller.
    """

    def __init__(self, secrets: BearerSecrets, sentence: str, service: str = "") -> None:
        """Create the interceptor.

        `secrets` are accepted; `sentence` is the message of a refusal, status UNAUTHENTICATED. With `service`, its full
        name, only the calls of that service need a secret.
        """
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
        return grpc.stream_stream_rpc_method_handler(self._refuse)  # refused at once, without waiting for the request

    def _admits(self, metadata: Any) -> bool:
        holder = self._secrets.holder([value for key, value in metadata if key == "authorization"])
        ASKER.set(holder or "")
        return holder is not None

    async def _refuse(self, _: Any, context: Any) -> None:
        await abort(context, RequestError(UNAUTHENTICATED, self._sentence))


def _normal(authorization: str) -> str:
    """Normalize an authorization value: scheme in lower case, no blanks before the credentials (RFC 9110, 11.1)."""
    scheme, _, secret = authorization.partition(" ")
    return f"{scheme.lower()} {secret.lstrip(' ')}"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def check_admin_key(*, has_admin_key: bool) -> None:
    """Raise RequestError where there is no admin key: folders would be read for any client."""
    if not has_admin_key:
        raise RequestError(UNAUTHENTICATED, "adapters are loaded with an admin key, and the server has none")
