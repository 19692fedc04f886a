"""Start the processes that a benchmark measures or asks with."""

import asyncio
import os
import sys

from serving_core.flags import without_flags


async def start_child(
    module: str, *arguments: str, limit: int, stdin: int | None = asyncio.subprocess.PIPE, **variables: str
) -> asyncio.subprocess.Process:
    """Start `python -m module` with these arguments and environment variables beside ours, but for those of flags and
    secrets. The child dies with this process, and Ctrl-C is for this process alone. A line that it writes to its pipe
    has `limit` bytes at most."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "serving_core.child", str(os.getpid())),
        *(sys.executable, "-m", module, *arguments),
        env=without_flags() | variables,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        limit=limit,
        process_group=0,
    )
