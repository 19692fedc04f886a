"""The attempts of one node, and how each of them ends: once, with nothing left held.

An attempt is ended by its own success, by failure, by cancel or by a lost coordinator, and may at that moment be in
a running step or in a transfer. Its blocks are freed when neither touches them any more, and only then does the
coordinator hear of the end.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from protos import fleet_pb2
from protos.convert import attempt_of
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.requests import Request


class Attempt(Protocol):
    """What one request holds on its node."""

    @property
    def request(self) -> Request: ...

    @property
    def is_busy(self) -> bool:
        """Whether a step or a transfer still touches the blocks."""

    def stop(self) -> None:
        """No further step takes the request; a transfer under way is cancelled. Called once."""

    def release(self) -> None:
        """Frees the blocks. Called once, when not busy."""


A = TypeVar("A", bound=Attempt)


class Attempts(Generic[A]):
    """Live and ending attempts by (request id, epoch)."""

    def __init__(self, send: Callable[..., None], on_release: Callable[[], None]) -> None:
        self._send = send
        self._on_release = on_release
        self._attempts: dict[tuple[str, int], A] = {}
        self._endings: dict[tuple[str, int], dict[str, Any]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def check_new(self, wire: fleet_pb2.Attempt) -> None:
        """Raises RequestError for an attempt that is here already."""
        if (wire.request_id, wire.epoch) in self._attempts:
            raise RequestError(reasons.DUPLICATE_REQUEST_ID, f"attempt {wire.epoch} of the request was announced twice")

    def refuse(self, wire: fleet_pb2.Attempt, error: RequestError) -> None:
        """Answers an attempt that is not taken in."""
        self._send(failed=fleet_pb2.Failed(attempt=wire, reason=error.reason, message=str(error)))

    def add(self, attempt: A) -> None:
        """Takes in an attempt that is new."""
        key = _key(attempt.request)
        assert key not in self._attempts
        self._attempts[key] = attempt
        self._idle.clear()

    def of(self, request: Request) -> A:
        """The attempt, alive or ending, that holds this request."""
        return self._attempts[_key(request)]

    def live(self, wire: fleet_pb2.Attempt) -> A | None:
        """The attempt of this name, unless it is unknown or ending."""
        key = (wire.request_id, wire.epoch)
        return None if key in self._endings else self._attempts.get(key)

    def is_ending(self, attempt: A) -> bool:
        return _key(attempt.request) in self._endings

    def cancel(self, wire: fleet_pb2.Attempt) -> None:
        """Ends an attempt at the coordinator's wish. Every cancel is answered, that of an unknown attempt at once."""
        attempt = self._attempts.get((wire.request_id, wire.epoch))
        if attempt is None:
            self._send(cancelled=fleet_pb2.Cancelled(attempt=wire))
        else:
            self.end(attempt, cancelled=fleet_pb2.Cancelled(attempt=wire))

    def fail(self, attempt: A, reason: str, message: str) -> None:
        """Ends an attempt with a reason of serving_core.reasons."""
        wire = attempt_of(attempt.request)
        self.end(attempt, failed=fleet_pb2.Failed(attempt=wire, reason=reason, message=message))

    def end(self, attempt: A, **event: Any) -> None:
        """Ends an attempt, unless it is ending already. `event`, if any, is sent once nothing is held."""
        key = _key(attempt.request)
        if key in self._attempts and key not in self._endings:
            self._endings[key] = event
            attempt.stop()
        self.settle(attempt)

    def end_all(self) -> None:
        """Ends every attempt without a word: the coordinator is gone and has given them up."""
        for attempt in list(self._attempts.values()):
            self.end(attempt)

    def settle(self, attempt: A) -> None:
        """Frees the attempt if it is ending and nothing touches it. Call when a step or a transfer lets go."""
        key = _key(attempt.request)
        if key not in self._endings or attempt.is_busy:
            return
        event = self._endings.pop(key)
        del self._attempts[key]
        attempt.release()
        if event:
            self._send(**event)
        if not self._attempts:
            self._idle.set()
        self._on_release()

    def settle_all(self, requests: Iterable[Request]) -> None:
        """Settles those of a finished step that are still here."""
        for request in requests:
            if attempt := self._attempts.get(_key(request)):
                self.settle(attempt)

    async def idle(self) -> None:
        """Returns when no attempt is left."""
        await self._idle.wait()


def _key(request: Request) -> tuple[str, int]:
    return request.request_id, request.epoch
