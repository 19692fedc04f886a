"""Server-sent events: how a stream of JSON objects travels."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.types import Send

from coordinator.doors.http.json_text import dumped

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy in between shall pass every event on at once
]


def event(value: Any) -> bytes:
    """One event that carries a JSON value."""
    return b"data: " + dumped(value).encode() + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """One event that also bears the type of its JSON object as its name."""
    return f"event: {value['type']}\n".encode() + event(value)


class EventStream:
    """The events of one response. The headers go out with the first."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def write(self, events: bytes) -> None:
        """Waits while the client reads too slowly."""
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
