"""Format and send server-sent events."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.types import Scope, Send

from serving_core.json_fields import json_line

CONNECTION: Final = "connection"  # key of the call's connection in the state of its scope
SEND: Final = "send"  # key of the server's own `send`, behind all middlewares
DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells proxies to pass on every event at once
]


def event(value: Any) -> bytes:
    """Return one event with a JSON value."""
    return b"data: " + json_line(value).encode() + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """Return one event with a JSON object, named after the object's `type`."""
    return f"event: {value['type']}\n".encode() + event(value)


class EventStream:
    """Send the events of one response. The headers go out with the first event.

    Middlewares see the beginning and the end of the response; the events between go to the server at once.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._send_events: Send = scope["state"].get(SEND, send)
        self._connection = scope["state"].get(CONNECTION)
        self.has_begun = False

    async def write(self, events: bytes) -> None:
        """Send events. Waits while the client reads too slowly."""
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send_events({"type": "http.response.body", "body": events, "more_body": True})

    @property
    def is_writable(self) -> bool:
        """Return whether `write_at_once` may be called: the headers are sent, and the client has read all of it."""
        return self.has_begun and self._connection is not None and not self._connection.is_unread

    def write_at_once(self, events: bytes) -> None:
        """Send events, outside the call's task. `is_writable` must be True."""
        self._connection.write_chunk(events)

    async def break_off(self, events: bytes) -> None:
        """End an incomplete response with these events.

        The last chunk is missing, so that a client that ignores the events does not take the response for a whole one.
        """
        await self.write(events)
        self._connection.break_off()

    async def end(self) -> None:
        """Send the end of a complete response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
