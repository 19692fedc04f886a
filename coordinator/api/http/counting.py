"""Count HTTP calls by endpoint, status and duration."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving_core.figures import Figure, Histogram, counter, histogram

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
        """Count a finished call."""
        self._ended[handler, method, f"{status // 100}xx"] += 1
        self._seconds[handler, method].observe(seconds)

    def figures(self) -> Iterator[Figure]:
        """Yield the figures, under the names of instrumented FastAPI servers, vLLM included."""
        ended = [
            ({"handler": handler, "method": method, "status": status}, count)
            for (handler, method, status), count in self._ended.items()
        ]
        yield counter("http_requests", "HTTP calls but those of probes, by endpoint.", ended)
        seconds = [({"handler": handler, "method": method}, each) for (handler, method), each in self._seconds.items()]
        yield histogram("http_request_duration_seconds", "Of a whole HTTP call, with all of its answer.", seconds)


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
