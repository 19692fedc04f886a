"""Processes in simulated time: an event loop on which the real code of all of them runs, one callback after the other.

A process can be killed, and then nothing of it ever runs again; or stopped for a while, and then what was to happen
meanwhile happens in the end. Its clock began somewhere else than those of others, and may be a little fast or slow.
"""

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Process:
    """One process, as the loop knows it."""

    name: str
    ahead_s: float = 0.0  # of its clock, when simulated time began
    pace: float = 1.0  # of its clock
    is_dead: bool = False
    resumes_s: float = 0.0  # until then it stands still
    tasks: list["asyncio.Task[Any]"] = field(default_factory=list)  # all that it ever began, so that none is collected


class Timer:
    """A callback that is due."""

    __slots__ = ("callback", "is_cancelled", "process")

    def __init__(self, process, callback):
        self.process, self.callback, self.is_cancelled = process, callback, False

    def cancel(self):
        self.is_cancelled = True

    def cancelled(self):
        return self.is_cancelled


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Enough of an event loop for tasks, futures, timeouts and threads, over the time of its own that it jumps through.

    What is due at one moment happens in the order in which it was planned, so a run can be repeated to the last step.
    What a process that stood still has missed happens in the order in which it was due.
    """

    def __init__(self):
        self.now = 0.0
        self.outside = self.current = Process("outside")
        self.network = None  # for who dials in this loop
        self.on_error = _raise
        self._due = []  # when it happens, when it was due, its place among those planned, and what
        self._order = itertools.count()

    # ---- what the code of a process sees ----

    def time(self):
        return self.now * self.current.pace + self.current.ahead_s

    def call_soon(self, callback, *args, context=None):
        return self.plan(self.current, self.now, callback, *args)

    call_soon_threadsafe = call_soon

    def call_later(self, delay, callback, *args, context=None):
        return self.plan(self.current, self.now + max(0.0, delay) / self.current.pace, callback, *args)

    def call_at(self, when, callback, *args, context=None):
        return self.call_later(when - self.time(), callback, *args)

    def create_future(self):
        return asyncio.Future(loop=self)

    def create_task(self, coro, *, name=None, context=None):
        task = asyncio.Task(coro, loop=self, name=name)
        self.current.tasks.append(task)
        return task

    def run_in_executor(self, executor, func, *args):
        """`func` gives a generator, which yields the seconds until it goes on, and returns the result."""
        future = self.create_future()
        self.call_soon(self._go_on, func(*args), future)
        return future

    def get_debug(self):
        return False

    def is_running(self):
        return True

    def is_closed(self):
        return False

    def call_exception_handler(self, context):
        self.on_error(self.current, context["message"], context.get("exception"))

    def _go_on(self, work, future):
        try:
            self.call_later(next(work), self._go_on, work, future)
        except StopIteration as end:
            if not future.cancelled():
                future.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits hears of it
            if not future.cancelled():
                future.set_exception(error)

    # ---- what the world does ----

    def plan(self, process, moment_s, callback, *args):
        """Something is to happen in a process."""
        timer = Timer(process, (lambda: callback(*args)) if args else callback)
        due_s = max(moment_s, self.now)
        heapq.heappush(self._due, (due_s, due_s, next(self._order), timer))
        return timer

    def start(self, process, coro):
        """Begins a task of a process."""
        before, self.current = self.current, process
        try:
            return self.create_task(coro)
        finally:
            self.current = before

    def run(self, is_over):
        """Lets things happen until `is_over`, which is asked after each, or nothing is left to happen."""
        asyncio._set_running_loop(self)
        try:
            while self._due and not is_over():
                self.now, due_s, order, timer = heapq.heappop(self._due)
                self._happen(due_s, order, timer)
        finally:
            self.current = self.outside
            asyncio._set_running_loop(None)

    def end(self, processes):
        """Ends all tasks of all processes, dead ones too, so that nothing of them is left to be collected."""
        self.on_error = lambda process, message, error: None
        for process in processes:
            process.is_dead, process.resumes_s = False, 0.0
        for _ in range(20):
            tasks = [task for process in processes for task in process.tasks if not task.done()]
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            last_s = self.now + 0.001
            self.run(lambda last_s=last_s: self.now > last_s)
        for process in processes:
            for task in process.tasks:
                if task.done() and not task.cancelled():
                    task.exception()  # has been looked at
            process.tasks.clear()
        self._due.clear()

    def _happen(self, due_s, order, timer):
        process = timer.process
        if timer.is_cancelled or process.is_dead:
            return
        if process.resumes_s > self.now:
            heapq.heappush(self._due, (process.resumes_s, due_s, order, timer))
            return
        self.current = process
        try:
            timer.callback()
        except Exception as error:  # noqa: BLE001 - as any loop does
            self.on_error(process, "a callback failed", error)


def _raise(process, message, error):
    raise error or AssertionError(f"{process.name}: {message}")
