"""Start the Python processes that a benchmark measures, or sends its load from."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from serving_core.flags import without_flags

STOP_S: Final = 10.0


async def start_child(module: str, *arguments: str, limit: int, **variables: str) -> asyncio.subprocess.Process:
    """Start `python -m module` with these arguments, and return the process, whose stdin and stdout are pipes.

    Its environment is this process's without SplitServe's flags and secrets, plus `variables`. The child ends when this
    process ends; Ctrl-C does not reach it. A line read from its stdout may have at most `limit` bytes.
    """
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
    """Return an async context manager that starts a child process as `start_child` does, and yields it.

    At its end the child is killed unless it has ended, and waited for.
    """
    process = await start_child(module, *arguments, limit=limit)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await _reap(process)


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Wait at most STOP_S for the end of a killed process, also when cancelled.

    Of children that fail at once, each cancels the wait for the others.
    """
    end = asyncio.create_task(process.wait())
    try:
        await asyncio.wait([end], timeout=STOP_S)
    except asyncio.CancelledError:
        await asyncio.wait([end], timeout=STOP_S)
        raise
