"""Stand-ins for processes that commands start: the same work, done in the test's own process.

Starting an interpreter and its imports is most of what such a process costs in a test. What is about the processes
themselves, their start, their death and their signals, uses the real ones. `fork_process` is for those that have to be
processes: it forks them from a server that has their imports.
"""

import asyncio
import dataclasses
import importlib
import json
import subprocess
import sys
from contextlib import asynccontextmanager

from serving_core.errors import SplitServeError
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.generator import (
    failure_line,
    order_line,
    read_line,
    read_plan,
    run_order,
)
from splitserve_bench.serve.records import Outcome, Progress, pack_request
from tests import forked


async def run_load_here(order, planned, on_progress, on_outcome=None):
    """Do as `run_load`, with the load generator in this event loop. Plan, progress and outcomes are written and read
    as between two processes."""
    plan = [order_line(dataclasses.replace(order, num_requests=len(planned))), *map(pack_request, planned)]
    outcomes = {request.index: [] for request in planned}

    def write(line):
        match read_line(line):
            case Progress() as progress:
                on_progress(progress)
            case Outcome() as outcome:
                outcomes[outcome.index].append(outcome)
                if on_outcome is not None:
                    on_outcome(outcome)

    try:
        await run_order(*read_plan(plan), write)
    except SplitServeError as error:
        raise BenchError(read_line(failure_line(str(error)))) from error
    return [outcome for each in outcomes.values() for outcome in each]


async def run_crew_here(module, asked, num_workers, next_job, on_done):
    """Do as `run_crew`, with one worker that is in this process. Jobs and results are written and read as JSON."""
    do = importlib.import_module(module).prepare(asked)
    while chosen := next_job():
        key, job = chosen
        on_done(key, json.loads(json.dumps(do(json.loads(json.dumps(job))))))


@asynccontextmanager
async def worker_here(module, asked, name, tell=str):
    """Do as `crew.worker`, in this process and with the CPUs that it has."""
    do = importlib.import_module(module).prepare(json.dumps(json.loads(asked) | {"cpus": ""}))
    yield WorkerHere(do)


class WorkerHere:
    """It has nobody to go on beside."""

    def __init__(self, do):
        self._do = do

    async def started(self):
        pass

    async def begin(self, job):
        pass

    async def done(self, job):
        return json.loads(json.dumps(self._do(json.loads(json.dumps(job)))))


async def fork_process(*command, stdin=None, stdout=None, limit=2**16, env=None, process_group=None):
    """Do as `asyncio.create_subprocess_exec` with the command of a child of ours, whose module runs in a forked
    process. It does not die with its parent, and has the CPUs that it sets itself."""
    wrapper, _, *child = command[2:]
    assert wrapper == "serving_core.process.child"
    assert child[:2] == [sys.executable, "-m"]
    options = {"stdin": stdin, "stdout": stdout, "env": env, "process_group": process_group}
    process = ForkedProcess(forked.popen(*child[2:], bufsize=0, **options))
    await process.connect(limit)
    return process


class ForkedProcess:
    """Of an asyncio.subprocess.Process what our commands use."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self.stdin = self.stdout = None

    async def connect(self, limit):
        loop = asyncio.get_running_loop()
        if self._process.stdin is not None:
            transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, self._process.stdin)
            self.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
        if self._process.stdout is not None:
            self.stdout = asyncio.StreamReader(limit)
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self.stdout), self._process.stdout)

    @property
    def returncode(self):
        return self._process.poll()

    def kill(self):
        self._process.kill()

    async def wait(self):
        return await asyncio.to_thread(self._process.wait)
