"""Programs of ours for what may go on for ever: each is a process of its own, since only a process can be stopped
whatever it does.

Lines of JSON go in and come out: what the program is given, then one question after the other, each answered by a line
(answering.py). The system ends it when one question takes too much processor time. Askers have their turns one after
the other.
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
from serving_core.child import bare_environment
from serving_core.errors import RequestError
from serving_core.reasons import QUEUE_FULL
from serving_core.turns import Turns

logger = logging.getLogger(__name__)

START_S: Final = 20.0  # more that a process has for its first answer
CLOCK_PER_CPU_S: Final = 10.0  # of an answer, before a process that is kept from working is given up


class Program:
    """One of them, started when it is needed and again when it has ended. It has one question at a time."""

    def __init__(self, module: str, given: Mapping[str, object], max_cpu_s: float, max_bytes: int) -> None:
        """`max_cpu_s` and `max_bytes` of a question."""
        self._module = module
        self._max_cpu_s = max_cpu_s
        self._max_bytes = max_bytes
        self._first = {"given": given, "max_cpu_s": max_cpu_s, "max_bytes": max_bytes}
        self._process: _Process | None = None
        self._thread = ThreadPoolExecutor(1, module)
        self._turns = Turns()

    async def ask(self, question: object, asker: str = "") -> dict[str, str]:
        """Its answer, or what answering.ended says. Questions of one asker wait for each other, and for one of each
        other asker at most. A client that leaves meanwhile changes nothing: it is soon done, or ended. Raises
        RequestError where the machine had no time for it."""
        async with self._turns.turn(asker):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, question)

    def begin(self) -> None:
        """Starts it in the background, so that the first question need not wait for that."""
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
    """The program, until it has ended or nobody knows it any more."""

    def __init__(self, module: str, first: Mapping[str, object]) -> None:
        """`first`: what it is told before any question."""
        command = [sys.executable, "-m", "serving_core.child", str(os.getpid()), sys.executable, "-m", module]
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
        """Of one that has ended."""
        return self._process.wait()

    def begin(self) -> None:
        """Sends what it is given. One that ends instead is found when it is asked."""
        with self._watched(START_S):
            self._send(b"")

    def ask(self, question: object, patience_s: float) -> dict[str, str] | None:
        """Its answer; None when it has ended instead."""
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
        """Around what may wait for it, and ends where it has ended."""
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
