"""One timer that can be moved."""

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls back at a time of the running loop's clock, perhaps a little early."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """Moves the alarm; None switches it off."""
        if at == self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = at
        self._timer = None if at is None else self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._at = self._timer = None  # so that a callback which comes early can set the same time again
        self._callback()
