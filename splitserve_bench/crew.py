"""Simulations on several processes, each of which is given one at a time. Both ends of what they say to each other.

A worker says one JSON object a line: {"ready": true} when it is, and for each job that it is told, a JSON object a
line, {"done": result}; or {"error": text}, its last one.
"""

import asyncio
import gc
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

from serving_core.errors import SplitServeError
from splitserve_bench.child import running_child
from splitserve_bench.errors import BenchError

START_S: Final = 120.0  # until it has read model, profile and trace
JOB_S: Final = 1800.0  # of the largest of fleets
MOST_LINE_BYTES: Final = 2**20  # two times of each of 10,000 requests

Key = TypeVar("Key")
Job = Mapping[str, Any]


class Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def started(self) -> None:
        """Raises BenchError when it cannot simulate."""
        await self._said(START_S)

    async def done(self, job: Job) -> Any:
        """What came of it. Raises BenchError."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(job)}\n".encode())
        await self._process.stdin.drain()
        return (await self._said(JOB_S))["done"]

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


async def run_crew(
    module: str,
    asked: str,
    num_workers: int,
    next_job: Callable[[], tuple[Key, Job] | None],
    on_done: Callable[[Key, Any], None],
) -> None:
    """Until no job is left. `module` is run with `asked`, and calls `work`. `on_done` is told what came of each job;
    the next one is asked for after that. The processes are gone at the end. Raises BenchError."""
    async with AsyncExitStack() as stack:
        children = [running_child(module, asked, limit=MOST_LINE_BYTES) for _ in range(num_workers)]
        workers = [Worker(await stack.enter_async_context(child)) for child in children]
        for worker in workers:
            await worker.started()
        idle, tasks = workers, {}
        try:
            while True:
                while idle and (chosen := next_job()):
                    worker, (key, job) = idle.pop(), chosen
                    tasks[asyncio.create_task(worker.done(job))] = worker, key
                if not tasks:
                    return
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # each has a deadline
                for task in done:
                    worker, key = tasks.pop(task)
                    on_done(key, task.result())
                    idle.append(worker)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def work(prepare: Callable[[str], Callable[[dict[str, Any]], Any]]) -> None:
    """The life of a worker, until its input ends: `prepare` takes what was asked, and gives what does a job."""
    try:
        do = prepare(sys.argv[1])
        gc.freeze()  # what a worker knows stays, and is much to look through
        _say(ready=True)
        for line in sys.stdin:
            _say(done=do(json.loads(line)))
    except SplitServeError as error:
        _say(error=str(error))


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)
