"""Work that a signal may end."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any


def run_until_signal(work: Coroutine[Any, Any, None]) -> signal.Signals | None:
    """Runs work to its end. SIGINT and SIGTERM cancel it, a second one also its clean-up; gives the one that did."""
    received: list[signal.Signals] = []

    async def main() -> signal.Signals | None:
        task = asyncio.create_task(work)

        def cancel(number: signal.Signals) -> None:
            received.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, cancel, number)
        await asyncio.wait([task])
        if task.cancelled():
            return received[0]
        task.result()
        return None

    return asyncio.run(main())


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end; where a signal ends it, this process exits with 128 + the signal's number."""
    if number := run_until_signal(work):
        sys.exit(128 + number)
