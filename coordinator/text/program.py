"""Run a computation that may not terminate in a process of its own, which can be stopped at any point.

Questions and answers are lines of JSON: the program's settings, then one question after the other, each answered by a
line (answering.py). The system ends the process when a question takes too much processor time. Askers take turns.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Final

from coordinator.text.answering import ended, line
from serving_core.errors import RequestError
from serving_core.process.child import bare_environment
from serving_core.reasons import QUEUE_FULL
from serving_core.tasks import Turns

logger = logging.getLogger(__name__)

START_S: Final = 20.0  # added to the limit of a process's first answer
CLOCK_PER_CPU_S: Final = 10.0  # wall-clock limit per processor second, for a process that gets no processor time


class Program:
    """A helper process, started on demand and restarted after it has ended. It has one question at a time."""

    def __init__(self, module: str, given: Mapping[str, object], max_cpu_s: float, max_bytes: int) -> None:
        """Create the program, which runs as `python -m module` with the settings `given`; nothing is started.

        `max_cpu_s` and `max_bytes` limit the processor time and the memory of each question.
        """
        self._module = module
        self._max_cpu_s = max_cpu_s
        self._max_bytes = max_bytes
        self._first = {"given": given, "max_cpu_s": max_cpu_s, "max_bytes": max_bytes}
        self._process: _Process | None = None
        self._thread = ThreadPoolExecutor(1, module)
        self._turns = Turns()

    async def ask(self, question: object, asker: str = "") -> dict[str, str]:
        """Send a question, and return the answer, or the result of answering.ended if the process has ended.

        Starts the process if none runs. Questions of one asker wait for each other, and for at most one question of
        each other asker. Cancellation does not stop a question, which is limited anyway. Raises RequestError when the
        machine has been too busy to answer.
        """
        async with self._turns.turn(asker):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, question)

    def begin(self) -> None:
        """Start the process in the background, so that the first question does not wait for its start."""
        self._thread.submit(lambda: self._running().begin())

    def _running(self) -> "_Process":
        if self._process is None or not self._process.is_running:
            self._process = _Process(self._module, self._first)
        return self._process

    def _ask(self, question: object) -> dict[str, str]:
        process = self._running()
        patience_s = CLOCK_PER_CPU_S * self._max_cpu_s + (0 if process.has_answered else START_S)
        answer = process.ask(question, patience_s)
        if answer is not None:
            return answer
        if process.is_given_up:
            logger.error("%s has not answered within %g s, and was ended", self._module, patience_s)
            raise RequestError(QUEUE_FULL, f"the machine is too busy: a question took more than {patience_s:g} s")
        return ended(process.returncode, self._max_cpu_s, self._max_bytes)


class _Process:
    """One process, which is killed when this object is garbage collected."""

    def __init__(self, module: str, first: Mapping[str, object]) -> None:
        """Start the process. `first` is sent before any question."""
        command = [sys.executable, "-m", "serving_core.process.child", str(os.getpid()), sys.executable, "-m", module]
        self._process = subprocess.Popen(command, env=bare_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._end = weakref.finalize(self, _end, self._process)
        given = line(first)
        self._unsent = b"%d\n" % len(given) + given
        self.has_answered = False
        self.is_given_up = False

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def returncode(self) -> int:
        """Exit code of an ended process."""
        return self._process.wait()

    def begin(self) -> None:
        """Send the settings. If the process ends instead, the next `ask` notices."""
        with self._watched(START_S):
            self._send(b"")

    def ask(self, question: object, patience_s: float) -> dict[str, str] | None:
        """Return the answer, or None when the process has ended instead."""
        assert self._process.stdout is not None, "it has pipes"
        answer = b""
        with self._watched(patience_s):
            self._send(line(question))
            answer = self._process.stdout.readline()
        if answer.endswith(b"\n"):
            self.has_answered = True
            answered: dict[str, str] = json.loads(answer)
            return answered
        self._end()
        return None

    @contextmanager
    def _watched(self, patience_s: float) -> Iterator[None]:
        """Kill the process if the block takes longer than `patience_s`; a broken pipe ends the block."""
        watchdog = threading.Timer(patience_s, self._give_up)
        watchdog.start()
        try:
            with suppress(BrokenPipeError):
                yield
        finally:
            watchdog.cancel()

    def _send(self, lines: bytes) -> None:
        assert self._process.stdin is not None, "it has pipes"
        self._process.stdin.write(self._unsent + lines)
        self._process.stdin.flush()
        self._unsent = b""

    def _give_up(self) -> None:
        self.is_given_up = True
        self._process.kill()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()
