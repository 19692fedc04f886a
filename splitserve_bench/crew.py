"""Run worker processes, each of which does one job after the other. Both ends of their protocol are here.

A worker is `python -m MODULE SETUP`, where SETUP is a text that its module reads. It writes one JSON object a line:
`{"ready": true}` when it can begin; for each job, an object that it reads from a line of its stdin, `{"done": result}`;
in between `{"progress": text}`; and `{"error": text}` before it ends because of an error.
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

START_S: Final = 120.0  # until a worker has read its setup
JOB_S: Final = 1800.0  # of the largest of fleets, or of models
MOST_LINE_BYTES: Final = 2**20  # two times of each of 10,000 requests

Key = TypeVar("Key")
Job = Mapping[str, Any]
Report = Callable[[str], object]


class Worker:
    """One worker process.

    Its methods raise SettingsError with the worker's own error, and BenchError when it ends or misses a deadline.
    `name` is what errors and progress call the process; `report` is called with each line of its progress.
    """

    def __init__(self, process: asyncio.subprocess.Process, name: str, report: Report) -> None:
        self._process, self._name, self._report = process, name, report

    async def started(self) -> None:
        """Wait, at most START_S, until the worker can take jobs."""
        await self._said("ready", START_S)

    async def begin(self, job: Job) -> None:
        """Send a job, and do not wait for its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(job)}\n".encode())
        await self._process.stdin.drain()

    async def done(self, job: Job) -> Any:
        """Send a job, wait at most JOB_S, and return its result."""
        await self.begin(job)
        return await self._said("done", JOB_S)

    async def _said(self, name: str, patience_s: float) -> Any:
        """Return the value of the next line that has this key; report the progress that comes before it."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(patience_s):
                async for line in self._process.stdout:
                    said = json.loads(line)
                    if "error" in said:
                        raise SettingsError(said["error"])
                    if name in said:
                        return said[name]
                    self._report(f"{self._name}: {said['progress']}")
        except TimeoutError as error:
            raise BenchError(f"the {self._name} was not done after {patience_s:g} s") from error
        raise BenchError(f"the {self._name} has ended before it was done")


@asynccontextmanager
async def worker(module: str, setup: str, name: str, report: Report = str) -> AsyncIterator[Worker]:
    """Return an async context manager that starts `python -m module setup` and yields it as a Worker.

    Errors and progress call it `name`; `report` is called with each line of its progress. The process is gone at the
    end.
    """
    async with running_child(module, setup, limit=MOST_LINE_BYTES) as process:
        yield Worker(process, name, report)


async def run_crew(
    module: str,
    setup: str,
    num_workers: int,
    next_job: Callable[[], tuple[Key, Job] | None],
    on_done: Callable[[Key, Any], None],
) -> None:
    """Do jobs on `num_workers` processes of `python -m module setup` until `next_job` returns None and all have ended.

    `next_job` returns a job and a key for it; it is called when a process is free, and None may be followed by further
    jobs after another one has ended. `on_done` is called with the key and the result of each job that ends, before the
    next job is taken. Raises SettingsError with a worker's own error, and BenchError when one ends or is not done in
    time.
    """
    async with AsyncExitStack() as stack:
        starting = [worker(module, setup, "process that simulates") for _ in range(num_workers)]
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
    """Run this process as a worker until its stdin ends.

    `prepare` reads the SETUP argument and returns what does a job. A SplitServeError of either is written to stdout as
    the worker's error, and ends the process.
    """
    try:
        do = prepare(sys.argv[1])
        gc.freeze()  # what a worker knows stays, and is much to look through
        say(ready=True)
        for line in sys.stdin:
            say(done=do(json.loads(line)))
    except SplitServeError as error:
        say(error=str(error))


def say(**line: Any) -> None:
    """Write these fields as one line of JSON to stdout, for the process that started this worker."""
    print(json.dumps(line), flush=True)
