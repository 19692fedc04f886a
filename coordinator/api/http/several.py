"""Serve the requests of one call that only prefill, some of them at a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from coordinator.api.preprocess import Preprocessor
from serving_core.errors import RequestError

Q = TypeVar("Q")
R = TypeVar("R")

MAX_AT_ONCE: Final = 64  # of one call; a node queues at most --max-num-queued requests of all calls


async def each_of(
    preprocessor: Preprocessor,
    requests: Sequence[Q],
    serve: Callable[[Q, float], Awaitable[R]],
    named: Callable[[RequestError, int], RequestError],
) -> list[R]:
    """Return the results of all requests in order. `serve` has the seconds that are left as its second argument.

    Raises the RequestError of the first request that fails, as `named` words it for the request's index, and cancels
    the others.
    """
    ends_s = time.monotonic() + preprocessor.request_timeout_s
    found: dict[int, R] = {}
    left = iter(enumerate(requests))

    async def work() -> None:
        for index, request in left:
            try:
                found[index] = await serve(request, ends_s - time.monotonic())
            except RequestError as error:
                raise named(error, index) from error

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(MAX_AT_ONCE, preprocessor.max_sequences, len(requests))):
                group.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [found[index] for index in range(len(requests))]
