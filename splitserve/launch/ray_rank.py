"""Supervise one rank of a node in a Ray actor on its host.

Ray pickles arguments and results between its own processes. Methods therefore take and return plain data only: strings,
numbers, and lists and dictionaries of them.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from kv_transfer.descriptor import endpoint_of
from serving_core.errors import SplitServeError
from serving_core.flags import build, environment_of
from splitserve.launch.cluster import LOOPBACK, ROOMS, Process, command_of
from splitserve.launch.launcher import free_port
from splitserve.launch.log_folder import keep_latest
from splitserve.launch.models import resolve
from splitserve.launch.supervisor import Supervisor

MAX_LINES: Final = 1000  # lines that wait to be fetched

T = TypeVar("T")


class RankActor:
    """Run one rank as a child of this process, with which it dies. Methods may be called from any thread."""

    def __init__(self, address: str, log_dir: str) -> None:
        """Create the actor, whose child writes its log to `log_dir`. `address` is that of this host; empty asks Ray."""
        # Ray sets uvloop's policy, under which asyncio cannot watch children.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        self._address = address or _address()
        self._log_dir = Path(log_dir)
        self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_latest(self._log_dir)  # as long as this process lives
        self._said: deque[str] = deque(maxlen=MAX_LINES)
        self._supervisor = Supervisor(self._log_dir, self._said.append)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def place(self) -> list[Any]:
        """Return [the address of this host, a free port for the rendezvous of a node's ranks]."""
        return [self._address, free_port()]

    def start(self, name: str, role: str, values: Mapping[str, Any], environment: Mapping[str, str]) -> str:
        """Start a process with the flags `values` and this environment added to the host's; end an earlier one first.

        Returns an empty string when the process runs, before it is ready; `news` reports its end. If the model or the
        settings cannot be used on this host, returns the reason in a sentence, and an earlier process stays.
        """
        try:
            process = self._process(name, role, values, environment)
        except SplitServeError as error:
            return str(error)
        self._do(self._start(process))
        return ""

    def news(self, within_s: float) -> tuple[list[str], list[Any]]:
        """Wait up to `within_s` seconds for the end of the process.

        Returns the lines reported since the last call and, if the process has ended, its [exit code, refusal, failure],
        as in Death; else an empty list.
        """
        ended = self._do(self._end_of(self._supervisor, within_s))
        return [self._said.popleft() for _ in range(len(self._said))], ended

    def stop(self, deadline_s: float) -> None:
        """Send the process SIGTERM, and SIGKILL after `deadline_s` seconds. Returns when it has ended."""
        self._do(self._supervisor.stop([*self._supervisor.names], deadline_s=deadline_s))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self, process: Process) -> None:
        await self._supervisor.stop([*self._supervisor.names], deadline_s=0.0)
        self._supervisor = Supervisor(self._log_dir, self._said.append)
        await self._supervisor.start(process)

    async def _end_of(self, supervisor: Supervisor, within_s: float) -> list[Any]:
        try:
            async with asyncio.timeout(within_s):
                death = await supervisor.next_death()
        except TimeoutError:
            return []
        return [death.returncode, death.refusal, death.failure]

    def _process(self, name: str, role: str, values: Mapping[str, Any], environment: Mapping[str, str]) -> Process:
        """Return the process on this host: with its model, its Python and its address.

        Raises SplitServeError when the model or the settings cannot be used here.
        """
        room = next(room for room in ROOMS if room.role == role)
        model = resolve(values["model"], self._said.append)
        kv_bind = endpoint_of(values["kv_transport"], "", 0).replace(LOOPBACK, self._address)
        settings = build(room.settings_class, {**values, "model": str(model.folder), "kv_bind": kv_bind})
        return Process(name, role, tuple(command_of(room, settings)), {**environment_of(settings), **environment})


def _address() -> str:
    import ray  # imported here, since planning does not need ray

    address: str = ray.util.get_node_ip_address()
    return address
