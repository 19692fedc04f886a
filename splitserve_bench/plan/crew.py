"""Runs a race on several processes, each of which simulates one probe at a time."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from splitserve_bench.compare.search import Probe
from splitserve_bench.errors import BenchError
from splitserve_bench.plan.asked import Asked
from splitserve_bench.plan.fleets import Played
from splitserve_bench.plan.race import Race

MODULE: Final = "splitserve_bench.plan.worker"
START_S: Final = 120.0  # until it has read model, profile and trace
PROBE_S: Final = 1800.0  # of the largest of fleets
STOP_S: Final = 10.0
MOST_LINE_BYTES: Final = 2**16


class Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def started(self) -> None:
        """Raises BenchError when it cannot search."""
        await self._said(START_S)

    async def played(self, index: int, probe: Probe) -> Played:
        """Raises BenchError."""
        assert self._process.stdin is not None
        line = json.dumps({"index": index, "rate": probe.rate, "seed": probe.seed})
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()
        return Played(**(await self._said(PROBE_S))["played"])

    async def _said(self, patience_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(patience_s):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise BenchError(f"a simulation was not over after {patience_s:g} s") from error
        said: dict[str, Any] = json.loads(line) if line else {"error": "a process that simulates has ended"}
        if "error" in said:
            raise BenchError(said["error"])
        return said


async def run_race(race: Race, asked: Asked, num_workers: int, on_played: Callable[[int], None]) -> None:
    """Until nothing is left to probe. `on_played` is told the plan after each probe. The processes are gone at the end.
    Raises BenchError."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(_worker(asked)) for _ in range(num_workers)]
        for worker in workers:
            await worker.started()
        idle, tasks = workers, {}
        try:
            while True:
                while idle and (chosen := race.next()):
                    worker = idle.pop()
                    tasks[asyncio.create_task(worker.played(*chosen))] = worker, chosen[0]
                if not tasks:
                    return
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # each has a deadline
                for task in done:
                    worker, index = tasks.pop(task)
                    race.record(index, task.result())
                    idle.append(worker)
                    on_played(index)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _worker(asked: Asked) -> AsyncIterator[Worker]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "serving_core.child", str(os.getpid())),
        *(sys.executable, "-m", MODULE, asked.to_json()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MOST_LINE_BYTES,
        process_group=0,  # Ctrl-C is for this process, which ends the child
    )
    try:
        yield Worker(process)
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(STOP_S):
            await process.wait()
