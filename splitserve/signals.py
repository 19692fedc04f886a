"""Run work that a signal may end."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any


def run_until_signal(
    work: Coroutine[Any, Any, None], on_hangup: Callable[[], bool] = lambda: False
) -> signal.Signals | None:
    """Run work to its end, or until a signal cancels it; return the signal, or None if there was none.

    SIGINT, SIGTERM and SIGHUP cancel the work, a second one also its clean-up. SIGHUP does not if `on_hangup` returns
    True, having handled it, or if this process was started to ignore it. Raises the exception of the work.
    """
    received: list[signal.Signals] = []

    async def main() -> signal.Signals | None:
        task = asyncio.create_task(work)

        def cancel(number: signal.Signals) -> None:
            received.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, cancel, number)

        def hang_up() -> None:
            if not on_hangup():
                cancel(signal.SIGHUP)

        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, hang_up)
        await asyncio.wait([task])
        if task.cancelled():
            return received[0]
        task.result()
        return None

    return asyncio.run(main())


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run work to its end; if a signal ends it, exit with code 128 plus the signal's number."""
    if number := run_until_signal(work):
        sys.exit(128 + number)
