"""How many HTTP calls came to which endpoint, how they ended and how long they took."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving_core.figures import Figure, Histogram, counter, histogram

METHODS: Final = ("GET", "POST")
OTHER: Final = "other"  # the method or the path of a call that we have no word for
UNCOUNTED: Final = ("/health", "/ready", "/ping", "/metrics")  # what asks by the clock
CLIENT_LEFT: Final = 499  # before there was a status: nginx's word for it

CountCall = Callable[[str, str, int, float], None]
"""Is told of every call that is over: its endpoint, its method, its status and its seconds."""


class HttpCounts:
    """By endpoint, method and class of status: names of ours, and never a client's."""

    def __init__(self) -> None:
        self._ended = Counter[tuple[str, str, str]]()
        self._seconds = defaultdict[tuple[str, str], Histogram](Histogram)

    def ended(self, handler: str, method: str, status: int, seconds: float) -> None:
        """A call is over."""
        self._ended[handler, method, f"{status // 100}xx"] += 1
        self._seconds[handler, method].observe(seconds)

    def figures(self) -> Iterator[Figure]:
        """Under the names that instrumented FastAPI servers have, vLLM's too."""
        ended = [
            ({"handler": handler, "method": method, "status": status}, count)
            for (handler, method, status), count in self._ended.items()
        ]
        yield counter("http_requests", "HTTP calls but those of probes, by endpoint.", ended)
        seconds = [({"handler": handler, "method": method}, each) for (handler, method), each in self._seconds.items()]
        yield histogram("http_request_duration_seconds", "Of a whole HTTP call, with all of its answer.", seconds)


class Counting:
    """ASGI middleware, around everything else."""

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
