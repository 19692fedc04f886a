"""Read and write the messages of a gRPC call with deadlines."""

import asyncio
import logging
from typing import Any, Final, Self

import grpc

from serving_core.errors import RequestError
from serving_core.reasons import DEADLINE_EXCEEDED, MALFORMED_REQUEST

logger = logging.getLogger(__name__)

READ_TIMEOUT_S: Final = 30.0  # for the one message of a request, as for the body of an HTTP call
WRITE_TIMEOUT_S: Final = 30.0  # for a client that has stopped reading, at every API server


async def read(context: Any) -> bytes:
    """Return the one message of a call.

    Raises RequestError when no message comes within READ_TIMEOUT_S, or the client sends none.
    """
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            message = await context.read()
    except TimeoutError as error:
        raise RequestError(DEADLINE_EXCEEDED, f"the request was not there within {READ_TIMEOUT_S:g} s") from error
    if message is grpc.aio.EOF:
        raise RequestError(MALFORMED_REQUEST, "the call has no message")
    request: bytes = message
    return request


async def write(context: Any, response: Any) -> None:
    """Send a message to the client, waiting only while the client does not read.

    Raises CancelledError after WRITE_TIMEOUT_S, which ends the call without a status: gRPC still holds the message, so
    that no status can follow and the connection ends.
    """
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(response)
    except TimeoutError:
        raise client_stalled() from None


class WriteTimer:
    """Limit each write of one call to WRITE_TIMEOUT_S, by one timer for the whole call.

    A context manager, which cancels the task within it where `write` raises. The task sets `since_s` around each write.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.since_s: float | None = None  # when the write that is under way began, in the loop's time

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(WRITE_TIMEOUT_S, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        since_s = now if self.since_s is None else self.since_s
        if now - since_s < WRITE_TIMEOUT_S:
            self._timer = self._loop.call_at(since_s + WRITE_TIMEOUT_S, self._look)
            return
        client_stalled()
        if self._task is not None:
            self._task.cancel()


def client_stalled() -> asyncio.CancelledError:
    """Log that a client has read nothing for WRITE_TIMEOUT_S, and return the CancelledError that ends its call."""
    logger.warning("a client has read nothing for %g s", WRITE_TIMEOUT_S)
    return asyncio.CancelledError()
