"""Wait for coroutines, and take turns among them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


async def first_to_end(*parts: Coroutine[Any, Any, object]) -> None:
    """Run the coroutines concurrently until one ends, and cancel the others.

    Raises the exception of the one that ended.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Turns:
    """Let one task at a time have the turn. Owned by one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the asker whose turn is next comes first

    @asynccontextmanager
    async def turn(self, asker: str) -> AsyncIterator[None]:
        """Return a context manager that waits for a turn of this asker, and has it within the block.

        Each waiting asker has one turn before any has a second; turns of one asker come in order of arrival.
        """
        if self._is_taken:
            await self._next_of(asker)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _next_of(self, asker: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(asker, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn came at the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next asker that still waits."""
        while self._waiting:
            asker = next(iter(self._waiting))
            turns = self._waiting.pop(asker)
            turn = turns.popleft()
            if turns:
                self._waiting[asker] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
