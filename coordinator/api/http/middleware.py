"""ASGI middlewares around every HTTP call.

`Counting` counts calls. `Access` authenticates them, limits how many there are at once, adds the common headers, and
turns errors into responses.
"""

import logging
import re
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.authentication import ASKER, NO_ADMIN_KEY, NO_API_KEY, BearerSecrets
from coordinator.api.http.errors import error_response, http_error_response, internal_error
from coordinator.api.http.page import OVERVIEW_PATH, PAGE_PATHS, ROOT_PATH
from coordinator.api.unknown_fields import WARNING_HEADER
from coordinator.api.validation import REQUEST_ID
from coordinator.control.request_log import CallRecord
from coordinator.traces.carrier import CARRIER, carrier_of
from serving_core.errors import RequestError
from serving_core.figures import Figure, Histogram, counter, histogram
from serving_core.process.telemetry import CURRENT_REQUEST
from serving_core.reasons import QUEUE_FULL, UNAUTHENTICATED

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER: Final = "x-request-id"
OPENAPI_PATH, DOCS_PATH = "/openapi.json", "/docs"
LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
OPERATOR_PATHS: Final = (
    OVERVIEW_PATH,
    LOAD_ADAPTER_PATH,
    UNLOAD_ADAPTER_PATH,
)  # under the admin key, if any
OPEN_PATHS: Final = ("/health", "/ready", "/ping", OPENAPI_PATH, DOCS_PATH, ROOT_PATH, *PAGE_PATHS)
_OWN_HOST: Final = re.compile(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


class Access:
    """ASGI middleware that authenticates calls.

    With secrets, a call needs `authorization: Bearer SECRET` or `x-api-key: SECRET`. Without secrets, calls from web
    pages are accepted only from the allowed origins and the server's own page. The data of the page and changes of
    adapters need the admin key if there is one. Health checks and the static files of the page need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        secrets: BearerSecrets | None,
        admin_key: BearerSecrets | None,
        allowed_origins: Collection[str],
        max_calls: int,
        noting_refusal: Callable[[CallRecord], AbstractContextManager[None]],
    ) -> None:
        self._app = app
        self._noting_refusal = noting_refusal
        self._secrets = secrets
        self._admin_key = admin_key
        self._allowed_origins = allowed_origins
        self._max_calls = max_calls
        self._num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _Response(send, scope)
        CURRENT_REQUEST.set(response.request_id)
        CARRIER.set(carrier_of(Headers(scope=scope).items()))
        self._num_calls += 1
        try:
            self._admit(scope)
            with self._noting_refusal(CallRecord(response.request_id, ASKER.get())):
                self._check_room(scope)
            await self._app(scope, receive, response.send)
        except RequestError as error:
            await error_response(error, scope["path"])(scope, receive, response.send)
        except HTTPException as error:
            refusal = http_error_response(error.status_code, error.detail, scope["path"])
            await refusal(scope, receive, response.send)
        except ClientDisconnect:  # while it sent its request
            logger.debug("the client has left", extra={"request_id": response.request_id})
        except Exception:
            logger.exception("a call failed", extra={"request_id": response.request_id})
            if not response.has_begun:  # otherwise the connection breaks without the end of a whole response
                await error_response(internal_error(), scope["path"])(scope, receive, response.send)
        finally:
            self._num_calls -= 1

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["path"] in OPEN_PATHS:
            return
        is_operators = scope["path"] in OPERATOR_PATHS and self._admin_key is not None
        keys = self._admin_key if is_operators else self._secrets
        if keys is None:
            self._check_origin(headers.get("origin"), f"{scope['scheme']}://{headers.get('host', '')}")
        elif (asker := keys.holder(_authorizations(headers))) is None:
            raise RequestError(UNAUTHENTICATED, NO_ADMIN_KEY if is_operators else NO_API_KEY)
        else:
            ASKER.set(asker)

    def _check_room(self, scope: Scope) -> None:
        if self._num_calls > self._max_calls and scope["path"] not in OPEN_PATHS:
            raise RequestError(QUEUE_FULL, f"{self._num_calls} calls at once, the limit is {self._max_calls}")

    def _check_origin(self, origin: str | None, own: str) -> None:
        """Refuse calls from web pages of other origins.

        Browsers send the origin of the calling page, even if DNS resolves its name to this server. The server's own
        page therefore counts as its own only under an IP address or localhost, which no other party can redirect.
        """
        if origin == own and _OWN_HOST.fullmatch(own.partition("://")[2]):
            return
        if origin is not None and "*" not in self._allowed_origins and origin not in self._allowed_origins:
            detail = f"web pages of {origin[:80]} may not call this server: see --allowed-origins"
            raise HTTPException(HTTPStatus.FORBIDDEN, detail)


def _authorizations(headers: Headers) -> list[str]:
    """Return the authorization values; `x-api-key`, which Anthropic's clients send, counts as a bearer secret."""
    return [*headers.getlist("authorization"), *(f"Bearer {key}" for key in headers.getlist("x-api-key"))]


class _Response:
    """Add the common headers to a response."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send = send
        self._state = scope.setdefault("state", {})
        self.request_id = request_id_for(scope)
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            added = [(b"date", formatdate(usegmt=True)), (REQUEST_ID_HEADER.encode(), self.request_id)]
            if warning := self._state.get("warning"):
                added.append((WARNING_HEADER.encode(), warning))
            message["headers"] = [*message["headers"], *((name, value.encode()) for name, value in added)]
        await self._send(message)


def request_id_for(scope: Scope) -> str:
    """Return the id of a call: the client's own if valid, else a new one. One scope always has the same id."""
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        state["request_id"] = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
    request_id: str = state["request_id"]
    return request_id


# ---- Counts of calls, by endpoint, status and duration ----

METHODS: Final = ("GET", "POST")
OTHER: Final = "other"  # any other method or path
UNCOUNTED: Final = ("/health", "/ready", "/ping", "/metrics")  # polled by probes
CLIENT_LEFT: Final = 499  # before a status was sent; nginx's code

CountCall = Callable[[str, str, int, float], None]
"""Record a finished call: endpoint, method, status and seconds."""


class HttpCounts:
    """Count calls by endpoint, method and status class. Labels never contain client input."""

    def __init__(self) -> None:
        self._ended = Counter[tuple[str, str, str]]()
        self._seconds = defaultdict[tuple[str, str], Histogram](Histogram)

    def ended(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a finished call by endpoint, method and class of its status, and its seconds by endpoint and method."""
        self._ended[handler, method, f"{status // 100}xx"] += 1
        self._seconds[handler, method].observe(seconds)

    def figures(self) -> Iterator[Figure]:
        """Yield the figures, under the names of instrumented FastAPI servers, vLLM included."""
        ended = [
            ({"handler": handler, "method": method, "status": status}, count)
            for (handler, method, status), count in self._ended.items()
        ]
        yield counter("http_requests", "HTTP calls by endpoint, probes left out.", ended)
        seconds = [({"handler": handler, "method": method}, each) for (handler, method), each in self._seconds.items()]
        yield histogram("http_request_duration_seconds", "Time of a whole HTTP call, its response included.", seconds)


class Counting:
    """ASGI middleware around all others, which counts calls."""

    def __init__(self, app: ASGIApp, *, count_call: CountCall, routes: Sequence[Route]) -> None:
        self._app = app
        self._count_call = count_call
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in UNCOUNTED:
            await self._app(scope, receive, send)
            return
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began_s = time.monotonic()
        try:
            await self._app(scope, receive, noting)
            status = status or CLIENT_LEFT
        finally:
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._count_call(self._handler(scope["path"]), method, status or 500, time.monotonic() - began_s)

    def _handler(self, path: str) -> str:
        return next((route.path_format for route in self._routes if route.path_regex.fullmatch(path)), OTHER)
