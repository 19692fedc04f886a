"""Waiting for the first of several things."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_to_end(*parts: Coroutine[Any, Any, object]) -> None:
    """Runs the parts side by side until one ends; cancels the others; raises what the ended one raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
