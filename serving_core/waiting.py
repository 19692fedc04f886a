"""Wait for the first of several coroutines."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_to_end(*parts: Coroutine[Any, Any, object]) -> None:
    """Run the parts concurrently until one ends; cancel the others; raise the exception of the ended one."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
