"""Measures something in a process of its own, on its own cores, and tells how far it is.

The process is `python -m MODULE TASK`, TASK a JSON object. It says one JSON object a line on stdout: {"progress": text}
and at the end {"figures": object} or, when the model or the sizes cannot be used, {"error": text}. It may go on with
work then, for others to be measured beside it, until it is killed.
"""

import asyncio
import dataclasses
import json
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from serving_core.errors import SettingsError
from splitserve.launch.models import Report
from splitserve_bench.child import start_child
from splitserve_bench.errors import BenchError

MEASURE_S: Final = 1800.0  # of one node, for the largest of models
STOP_S: Final = 10.0
MAX_LINE_BYTES: Final = 2**16

One = TypeVar("One")
Other = TypeVar("Other")


async def figures_of(
    module: str, task: Any, name: str, report: Report, together: asyncio.Barrier | None = None
) -> dict[str, Any]:
    """What the module's process finds; `task` is a dataclass. The process is gone at the end; one that is measured
    `together` with others goes on until the last of them has been. Raises BenchError, and SettingsError for what it
    cannot use."""
    process = await start_child(module, json.dumps(dataclasses.asdict(task)), limit=MAX_LINE_BYTES, stdin=None)
    try:
        async with asyncio.timeout(MEASURE_S):
            figures = await _figures(process, name, report)
            if together is not None:
                await together.wait()
            return figures
    except TimeoutError as error:
        raise BenchError(f"the {name} was not measured within {MEASURE_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
        await _reap(process)


async def both(one: Coroutine[Any, Any, One], other: Coroutine[Any, Any, Other], *, at_once: bool) -> tuple[One, Other]:
    """Two measurements, at the same time or one after the other. When one fails, the other is stopped."""
    if not at_once:
        try:
            first = await one
        except BaseException:
            other.close()
            raise
        return first, await other
    try:
        async with asyncio.TaskGroup() as group:
            of_one, of_other = group.create_task(one), group.create_task(other)
    except* (BenchError, SettingsError) as failures:
        failed: BaseException = failures
        while isinstance(failed, BaseExceptionGroup):
            failed = failed.exceptions[0]
        raise failed from None
    return of_one.result(), of_other.result()


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Waits for the end of a killed process, whatever cancels that: two nodes that fail at once cancel each other."""
    end = asyncio.create_task(process.wait())
    try:
        await asyncio.wait([end], timeout=STOP_S)
    except asyncio.CancelledError:
        await asyncio.wait([end], timeout=STOP_S)
        raise


async def _figures(process: asyncio.subprocess.Process, name: str, report: Report) -> dict[str, Any]:
    assert process.stdout is not None
    async for line in process.stdout:
        said: dict[str, Any] = json.loads(line)
        if "progress" in said:
            report(f"{name}: {said['progress']}")
        elif "error" in said:
            raise SettingsError(said["error"])
        else:
            figures: dict[str, Any] = said["figures"]
            return figures
    raise BenchError(f"the {name} has ended before it was measured")
