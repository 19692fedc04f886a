"""Processes that work for a command, each on one job at a time. Both ends of what they say to each other.

A worker is `python -m MODULE ASKED`. It says one JSON object a line: {"ready": true} when it is, and for each job that
it is told, a JSON object a line, {"done": result}; {"progress": text} in between; or {"error": text}, its last one.
"""

import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, TypeVar

from serving_core.errors import SettingsError, SplitServeError
from splitserve_bench.child import running_child
from splitserve_bench.errors import BenchError

START_S: Final = 120.0  # until it has read what it was asked
JOB_S: Final = 1800.0  # of the largest of fleets, or of models
MOST_LINE_BYTES: Final = 2**20  # two times of each of 10,000 requests

Key = TypeVar("Key")
Job = Mapping[str, Any]
Tell = Callable[[str], object]


class Worker:
    """One process. What it cannot use raises SettingsError, and its end or a deadline that it misses BenchError."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, tell: Tell) -> None:
        self._process, self._name, self._tell = process, name, tell

    async def started(self) -> None:
        """Wait until it is ready."""
        await self._said("ready", START_S)

    async def begin(self, job: Job) -> None:
        """Tell it a job, and leave it to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(job)}\n".encode())
        await self._process.stdin.drain()

    async def done(self, job: Job) -> Any:
        """Tell it a job, and return what came of it."""
        await self.begin(job)
        return await self._said("done", JOB_S)

    async def _said(self, name: str, patience_s: float) -> Any:
        """Return what it says by this name; what it says before is told."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(patience_s):
                async for line in self._process.stdout:
                    said = json.loads(line)
                    if "error" in said:
                        raise SettingsError(said["error"])
                    if name in said:
                        return said[name]
                    self._tell(f"{self._name}: {said['progress']}")
        except TimeoutError as error:
            raise BenchError(f"the {self._name} was not done after {patience_s:g} s") from error
        raise BenchError(f"the {self._name} has ended before it was done")


@asynccontextmanager
async def worker(module: str, asked: str, name: str, tell: Tell = str) -> AsyncIterator[Worker]:
    """Start a worker; `tell` hears of its progress. The process is gone at the end."""
    async with running_child(module, asked, limit=MOST_LINE_BYTES) as process:
        yield Worker(process, name, tell)


async def run_crew(
    module: str,
    asked: str,
    num_workers: int,
    next_job: Callable[[], tuple[Key, Job] | None],
    on_done: Callable[[Key, Any], None],
) -> None:
    """Work until no job is left. `on_done` is told what came of each job; the next one is asked for after that. Raises
    as a Worker does."""
    async with AsyncExitStack() as stack:
        starting = [worker(module, asked, "process that simulates") for _ in range(num_workers)]
        idle, tasks = [await stack.enter_async_context(each) for each in starting], {}
        for each in idle:
            await each.started()
        try:
            while True:
                while idle and (chosen := next_job()):
                    free, (key, job) = idle.pop(), chosen
                    tasks[asyncio.create_task(free.done(job))] = free, key
                if not tasks:
                    return
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # each has a deadline
                for task in done:
                    free, key = tasks.pop(task)
                    on_done(key, task.result())
                    idle.append(free)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def work(prepare: Callable[[str], Callable[[dict[str, Any]], Any]]) -> None:
    """Live as a worker, until the input ends: `prepare` takes what was asked, and returns what does a job."""
    try:
        do = prepare(sys.argv[1])
        gc.freeze()  # what a worker knows stays, and is much to look through
        say(ready=True)
        for line in sys.stdin:
            say(done=do(json.loads(line)))
    except SplitServeError as error:
        say(error=str(error))


def say(**line: Any) -> None:
    """Say something as a worker."""
    print(json.dumps(line), flush=True)
