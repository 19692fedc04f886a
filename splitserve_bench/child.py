"""Start the processes that a benchmark measures or asks with."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from serving_core.flags import without_flags

STOP_S: Final = 10.0


async def start_child(module: str, *arguments: str, limit: int, **variables: str) -> asyncio.subprocess.Process:
    """Start `python -m module` with these arguments and environment variables beside ours, but for those of flags and
    secrets. The child dies with this process, and Ctrl-C is for this process alone. A line that it writes to its pipe
    has `limit` bytes at most."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "serving_core.process.child", str(os.getpid())),
        *(sys.executable, "-m", module, *arguments),
        env=without_flags() | variables,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=limit,
        process_group=0,
    )


@asynccontextmanager
async def running_child(module: str, *arguments: str, limit: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield the child process of the block, and kill it at the end of the block unless it has ended."""
    process = await start_child(module, *arguments, limit=limit)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await _reap(process)


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a killed process, also when cancelled: workers that fail at once cancel each other."""
    end = asyncio.create_task(process.wait())
    try:
        await asyncio.wait([end], timeout=STOP_S)
    except asyncio.CancelledError:
        await asyncio.wait([end], timeout=STOP_S)
        raise
