"""Run the API server processes of a coordinator that has several, all listening at the same ports.

The coordinator holds the ports, starts the API servers, and restarts those that end. An API server ends with the
coordinator, whatever ends that. The end of an API server loses its own connections alone. The ports are locked, so
that other coordinators cannot share them.
"""

import asyncio
import dataclasses
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc

from coordinator.api.health import HealthService
from coordinator.api.public import STOP_GRACE_S
from coordinator.api_server_service import ApiServerService
from coordinator.api_server_settings import ApiServerSettings
from coordinator.settings import CoordinatorSettings
from serving_core.errors import SettingsError
from serving_core.flags import environment_of, to_argv
from serving_core.net.backoff import Backoff
from serving_core.net.ports import LONGEST_PATH, Port, SharedPort, SocketFolder, fits

logger = logging.getLogger(__name__)

START_DEADLINE_S: Final = 120.0
STOP_DEADLINE_S: Final = 4 * STOP_GRACE_S
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 10.0
CALM_S: Final = 60.0


class ApiServers:
    """Start, watch and stop all API server processes.

    Must be created on a running event loop; `stop` releases the processes and the ports.
    """

    def __init__(
        self, settings: CoordinatorSettings, service: ApiServerService, server: grpc.aio.Server, health: HealthService
    ) -> None:
        """Create the API servers' keeper, without starting a process.

        API servers connect to `server` over a unix socket; `service` answers them there. `server` must not be started
        yet.
        """
        self._settings = settings
        self._service = service
        self._server = server
        self._health = health
        self._folder = SocketFolder()
        self._opened: dict[str, asyncio.Event] = {}  # by name of the API server: set while it listens
        self._held: list[SharedPort] = []
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._is_stopping = False
        self.port = 0  # set by `listen`
        self.http_port = -1  # set by `listen`; -1 without HTTP
        service.lose = self._kill
        service.listens = self._listens

    def listen(self) -> None:
        """Reserve the API servers' ports (a port 0 takes a free one), and set `port`, of gRPC, and `http_port`.

        Without HTTP `http_port` stays -1. Raises SettingsError when a port is in use or its address cannot be bound.
        """
        settings = self._settings
        self.port = self._hold(Port("--grpc-port", settings.host, settings.grpc_port))
        if settings.http_port >= 0:
            self.http_port = self._hold(Port("--http-port", settings.http_host, settings.http_port))

    async def start(self) -> None:
        """Start the API server processes and return when all of them listen.

        Raises SettingsError when one ends early, or they do not listen within START_DEADLINE_S.
        """
        path = self._folder.path / "coordinator"
        if not fits(path):
            raise SettingsError(f"{path} is longer than a socket's path may be ({LONGEST_PATH}): set another TMPDIR")
        self._folder.make()
        self._server.add_insecure_port(f"unix:{path}")
        path.chmod(0o600)
        await self._server.start()
        names = [str(number) for number in range(1, self._settings.api_server_count + 1)]
        self._opened = {name: asyncio.Event() for name in names}
        self._keepers = {name: asyncio.create_task(self._keep(name, path)) for name in names}
        opened = asyncio.gather(*(event.wait() for event in self._opened.values()))
        parts: list[asyncio.Future[Any]] = [opened, *self._keepers.values()]
        try:
            await asyncio.wait(parts, timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            for keeper in self._keepers.values():
                if keeper.done():
                    keeper.result()
            if not opened.done():
                raise SettingsError(f"the API servers do not listen after {START_DEADLINE_S:g} s")
        finally:
            opened.cancel()
            with suppress(asyncio.CancelledError):
                await opened
        logger.info("%d API servers are open", len(names))

    async def stop(self) -> None:
        """Send the API servers their last messages, wait for their end, kill late ones, and release the ports."""
        self._is_stopping = True
        self._service.end()
        closing = [keeper for name, keeper in self._keepers.items() if self._opened[name].is_set()]
        if closing:
            await asyncio.wait(closing, timeout=STOP_DEADLINE_S)
        killed = [self._keepers[name] for name in self._processes]
        for name in self._processes:
            self._kill(name)
        if killed:  # wait for their end, otherwise the processes stay as zombies
            await asyncio.wait(killed, timeout=STOP_GRACE_S)
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        await self._server.stop(None)
        for held in self._held:
            held.close()
        self._folder.remove()

    async def report(self) -> None:
        """Set the status of the fleet port's health service to whether requests can be served."""
        await self._health.report(is_serving=self._service.is_serving)

    def reread_api_keys(self) -> None:
        """Send SIGHUP to every open API server, which then rereads the file of API keys.

        An API server that is not open yet would end by the signal, and reads the file as it opens.
        """
        for name, process in self._processes.items():
            if self._opened[name].is_set():
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGHUP)

    def _hold(self, port: Port) -> int:
        held = SharedPort(port)
        self._held.append(held)
        return held.number

    def _listens(self, name: str) -> None:
        if (opened := self._opened.get(name)) is not None:
            opened.set()

    def _kill(self, name: str) -> None:
        if (process := self._processes.get(name)) is not None:
            with suppress(ProcessLookupError):
                process.kill()

    def _check_open(self, name: str) -> None:
        """Kill an API server that does not listen in time; it is started again."""
        if not self._opened[name].is_set():
            logger.error("API server %s does not listen after %g s", name, START_DEADLINE_S)
            self._kill(name)

    async def _keep(self, name: str, path: Path) -> None:
        """Run API server `name`, and restart it when it ends. Raises SettingsError if it ends before it has ever
        listened."""
        pauses = Backoff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, calm_s=CALM_S)
        opened, has_opened = self._opened[name], False
        while not self._is_stopping:
            process = self._processes[name] = await self._spawn(name, path)
            late = asyncio.get_running_loop().call_later(START_DEADLINE_S, self._check_open, name)
            try:
                code = await process.wait()
            finally:
                late.cancel()
                del self._processes[name]
            if self._is_stopping:
                return
            has_opened = has_opened or opened.is_set()
            opened.clear()
            if not has_opened:
                raise SettingsError(f"API server {name} has ended at its start, with code {code}")
            pause_s = pauses.next_s(time.monotonic())
            logger.error("API server %s has ended with code %d: it starts again in %g s", name, code, pause_s)
            await asyncio.sleep(pause_s)

    async def _spawn(self, name: str, path: Path) -> asyncio.subprocess.Process:
        given = dataclasses.replace(self._settings, grpc_port=self.port, http_port=self.http_port, fleet_secret="")
        settings = ApiServerSettings(given, f"unix:{path}", int(name))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "serving_core.process.child", str(os.getpid())),
            *(sys.executable, "-m", "coordinator.api", *to_argv(settings)),
            env=environment_of(settings),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal goes to the control process alone
        )
