"""Server-sent events: how a stream of JSON objects travels."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.types import Scope, Send

from serving_core.json_fields import json_line

BREAK_OFF: Final = "break_off"  # of the state of a call's scope: what ends its response as one that is not whole
DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy in between shall pass every event on at once
]


def event(value: Any) -> bytes:
    """One event that carries a JSON value."""
    return b"data: " + json_line(value).encode() + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """One event that also bears the type of its JSON object as its name."""
    return f"event: {value['type']}\n".encode() + event(value)


class EventStream:
    """The events of one response. The headers go out with the first."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.has_begun = False

    async def write(self, events: bytes) -> None:
        """Waits while the client reads too slowly."""
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def break_off(self, events: bytes) -> None:
        """End a response that is not whole with these events. As the last chunk is missing, a client that knows none of
        them does not take it for a whole one either."""
        await self.write(events)
        self._scope["state"][BREAK_OFF]()

    async def end(self) -> None:
        """End a response that is whole."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
