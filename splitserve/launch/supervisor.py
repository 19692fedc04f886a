"""Start, watch and stop child processes in their own process groups.

A child's output goes to its log file; lines that report an error are echoed. On Linux children die with this process,
however it ends.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final, Protocol, Self

from serving_core.model_files.load_progress import progress_in
from serving_core.process.telemetry import parse_line
from splitserve.launch.cluster import COORDINATOR, Process
from splitserve.launch.fork_server import PID_OR_CODE, ForkServer
from splitserve.launch.models import Report

CHUNK_BYTES: Final = 2**16
LONGEST_LINE_BYTES: Final = 2**16
MAX_LOG_BYTES: Final = 32 * 2**20
LAST_WORDS_S: Final = 1.0  # to read the remaining output of a dead child
FORK_DEADLINE_S: Final = 60.0  # the server may still be importing
ECHOED_LEVEL: Final = "error"
ENDING_LEVEL: Final = "critical"  # level of a process's last log line


@dataclass(frozen=True, slots=True)
class Death:
    """A child that has ended: its exit code, or minus the signal that killed it, and the cause that it reported."""

    process: Process
    returncode: int
    refusal: str = ""  # the sentence with which it refused to start or to continue
    failure: str = ""  # the unexpected exception that ended it

    def __str__(self) -> str:
        if self.returncode < 0:
            return f"{self.process.name} was killed by {signal.Signals(-self.returncode).name}"
        return f"{self.process.name} ended: {self.refusal or self.failure or 'it did not say why'}"


class Handle(Protocol):
    """A running process, such as asyncio.subprocess.Process."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


class Forked:
    """A child process of the fork server."""

    def __init__(self, pid: int, numbers: socket.socket) -> None:
        self.pid: Final = pid
        self.returncode: int | None = None
        self._numbers = numbers

    @classmethod
    async def start(cls, server: ForkServer, process: Process, output: int) -> Self:
        """Let the server fork a process whose output goes to the file descriptor `output`; return it when it runs.

        Raises OSError, and TimeoutError after FORK_DEADLINE_S.
        """
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            numbers = server.start(
                process.argv[2:], [nothing, output, output], env=process.environment, process_group=0
            )
        finally:
            os.close(nothing)
        numbers.setblocking(False)
        try:
            async with asyncio.timeout(FORK_DEADLINE_S):
                return cls(await _next_number(numbers), numbers)
        except BaseException:
            numbers.close()
            raise

    async def wait(self) -> int:
        """Wait for the end of the child, and return its exit code, or minus the signal that killed it.

        SIGKILL is returned when the server is gone, since its children end with it.
        """
        if self.returncode is None:
            with self._numbers:
                try:
                    self.returncode = await _next_number(self._numbers)
                except ConnectionError:
                    self.returncode = -signal.SIGKILL
        return self.returncode


async def _next_number(numbers: socket.socket) -> int:
    data = await asyncio.get_running_loop().sock_recv(numbers, PID_OR_CODE.size)
    if not data:
        raise ConnectionResetError("the fork server has ended, or the system had no room for a process")
    (number,) = PID_OR_CODE.unpack(data)
    return int(number)


@dataclass(frozen=True, slots=True)
class _Child:
    handle: Handle
    watch: asyncio.Task[None]

    def signal(self, number: signal.Signals) -> None:
        if self.handle.returncode is None:
            _signal_group(self.handle.pid, number)


class Supervisor:
    """Start, watch and stop the child processes of one cluster.

    Use it on the event loop of a thread that lives as long as the process: children die with that thread.
    """

    def __init__(self, log_dir: Path, report: Report, fork_server: ForkServer | None = None) -> None:
        """Create the supervisor, which writes logs to `log_dir`, and passes lines that report an error to `report`.

        Nodes are forked from `fork_server` if given.
        """
        self._log_dir = log_dir
        self._report = report
        self._fork_server = fork_server
        self._children: dict[str, _Child] = {}
        self.loading: Final[dict[str, str]] = {}
        """Progress of loading weights, in words, by the name of each child that has reported it."""
        self._deaths: asyncio.Queue[Death] = asyncio.Queue()

    def pid(self, name: str) -> int:
        return self._children[name].handle.pid

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all processes that were started, whether they live or not."""
        return tuple(self._children)

    async def start(self, process: Process) -> None:
        """Start a child, write its output to its log, and watch it until it ends.

        Raises OSError when the system cannot start it, and TimeoutError when the fork server is late.
        """
        self.loading.pop(process.name, None)
        output, child_end = os.pipe()
        try:
            handle = await self._spawn(process, child_end)
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(child_end)
        watch = asyncio.create_task(self._watch(process, handle, output))
        self._children[process.name] = _Child(handle, watch)

    async def next_death(self) -> Death:
        """Wait for a child to end, and return how; ends are returned in their order, each once."""
        return await self._deaths.get()

    async def stop(self, names: Iterable[str], *, deadline_s: float) -> None:
        """Send SIGTERM to these children, and SIGKILL to those alive after `deadline_s` seconds or when canceled.

        Returns when all have ended.
        """
        children = [self._children[name] for name in names if name in self._children]
        try:
            for child in children:
                child.signal(signal.SIGTERM)
            if children:
                await asyncio.wait([child.watch for child in children], timeout=deadline_s)
        finally:
            for child in children:
                child.signal(signal.SIGKILL)
            if children:
                await asyncio.wait([child.watch for child in children])

    async def _spawn(self, process: Process, output: int) -> Handle:
        if self._fork_server is not None and process.role != COORDINATOR.role:
            try:
                return await Forked.start(self._fork_server, process, output)
            except OSError as error:
                self._fork_server = None  # each node then imports for itself
                self._report(f"Nodes start more slowly: {str(error) or f'no fork within {FORK_DEADLINE_S:.0f} s'}")
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "serving_core.process.child", str(os.getpid())),
            *process.argv,
            env=dict(process.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )

    async def _watch(self, process: Process, handle: Handle, output: int) -> None:
        words = LastWords(process.name)
        reading = asyncio.create_task(self._copy_log(process.name, output, words))
        returncode = await handle.wait()
        _signal_group(handle.pid, signal.SIGKILL)  # processes that the child started end with it
        await asyncio.wait([reading], timeout=LAST_WORDS_S)
        reading.cancel()
        self._deaths.put_nowait(Death(process, returncode, words.refusal, words.failure))

    async def _copy_log(self, name: str, output: int, words: "LastWords") -> None:
        with contextlib.closing(LogFile(self._log_dir / f"{name}.log", self._report)) as log:
            async for line in _lines(output):
                log.write(line + b"\n")
                level, text = parse_line(line.decode(errors="replace"))
                words.hear(level, text)
                if progress := progress_in(text):
                    self.loading[name] = progress
                if level == ECHOED_LEVEL:
                    self._report(f"{name}: {text}")


class LogFile:
    """Write the log file of a child.

    At MAX_LOG_BYTES the file is renamed to NAME.log.1, which replaces an earlier one. A line that cannot be written is
    lost, which is reported once: a child whose pipe is not read would block.
    """

    def __init__(self, path: Path, report: Report) -> None:
        self._path = path
        self._report = report
        self._file: FileIO | None = None
        self._has_lost = False

    def write(self, line: bytes) -> None:
        try:
            self._file = self._file or FileIO(self._path, "ab")
            size = self._file.tell()
            if size and size + len(line) > MAX_LOG_BYTES:
                self._path.replace(f"{self._path}.1")
                self.close()
                self._file = FileIO(self._path, "ab")
            self._file.write(line)
        except OSError as error:
            if not self._has_lost:
                self._report(f"{self._path} cannot be written, and lines of it are lost: {error.strerror}")
            self._has_lost = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class LastWords:
    """Extract why a process ended from its output.

    A refusal is NAME: SENTENCE, as serving_core/process/run.py writes it, or NAME.RANK: SENTENCE. A failure is a
    critical line or the end of a traceback.
    """

    def __init__(self, name: str) -> None:
        self._refusal = re.compile(rf"{re.escape(name)}(?:\.\d+)?: (.+)")
        self._in_traceback = False
        self.refusal = ""
        self.failure = ""

    def hear(self, level: str, text: str) -> None:
        """Take the next line, as returned by parse_line, and set `refusal` or `failure` if it is one."""
        if level == ENDING_LEVEL:
            self.failure = text
        if level:
            return
        if said := self._refusal.fullmatch(text):
            self.refusal = self.refusal or said[1]
        elif text.startswith("Traceback (most recent call last)"):
            self._in_traceback = True
        elif self._in_traceback and text and not text[0].isspace():
            self._in_traceback, self.failure = False, text


async def _lines(pipe: int) -> AsyncIterator[bytes]:
    """Yield the lines of a pipe, and close it at its end."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", buffering=0)
    )
    with contextlib.closing(transport):
        rest = b""
        while chunk := await stream.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                yield line
        if rest:
            yield rest


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
