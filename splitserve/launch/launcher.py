"""A cluster on this machine: start, watch, stop.

1. `Cluster.start` starts the coordinator and all nodes at once, and returns when every node is attached and the
   health service says that the cluster serves.
2. `Cluster.watch` reports nodes that die and goes on with the rest. It ends only by LaunchError: when the
   coordinator is gone, or the last node that reads prompts or that writes answers.
3. Leaving the `async with` stops the coordinator, which lets its answers finish, then the nodes. After a clean end,
   to which every process has lived, their logs are removed unless a folder was given for them.
"""

import asyncio
import os
import random
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from serving_core.errors import SettingsError, SplitServeError
from splitserve.client.clients import AsyncClient
from splitserve.client.errors import ClientError, Unavailable
from splitserve.launch.cluster import LOOPBACK, NO_HTTP, ClusterSettings, Place, plan_cluster
from splitserve.launch.models import LocalModel, Report
from splitserve.launch.preflight import check_processes, missing_kernels
from splitserve.launch.rooms import BOTH, COORDINATOR, DECODE, PREFILL
from splitserve.launch.supervisor import Death, Supervisor

POLL_S: Final = 0.1
ASK_S: Final = 5.0  # for the coordinator to answer
UNASSIGNED_PORTS: Final = range(20_000, 32_000)  # below the kernel's range for outgoing connections
KILL_AFTER_S: Final = 5.0  # beyond the time to drain


class LaunchError(SplitServeError):
    """The cluster could not start, or can serve no longer."""


class Cluster:
    """One coordinator and its nodes as children of this process. An async context manager."""

    def __init__(
        self, settings: ClusterSettings, passed: Mapping[str, Any], model: LocalModel, *, report: Report
    ) -> None:
        """Raises SettingsError, ModelError or LaunchError, and has then made nothing."""
        self.target = f"{_reachable(settings.host)}:{settings.grpc_port}"
        http_host = _reachable(passed.get("http_host") or LOOPBACK)
        self.http_url = "" if settings.http_port == NO_HTTP else f"http://{http_host}:{settings.http_port}"
        self._settings = settings
        self._report = report
        self._socket_dir = Path(tempfile.gettempdir()) / f"splitserve-{secrets.token_hex(4)}"
        cpus = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
        self._instance_id = secrets.token_hex(16)
        place = Place(free_port(), str(self._socket_dir), secrets.token_hex(16), self._instance_id, cpus)
        self._processes = plan_cluster(settings, passed, model, place)
        check_processes(self._processes)
        self.log_dir = _log_dir(settings.log_dir)
        self._socket_dir.mkdir(mode=0o700)
        self._supervisor = Supervisor(self.log_dir, report)
        self._api_key = passed.get("api_key") or None
        if len(cpus) < len(self.nodes):
            report(f"{len(cpus)} CPUs for {len(self.nodes)} nodes: some share one, and will slow each other down")
        if line := missing_kernels(self._processes[-1].settings.engine):
            report(line)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the processes: the coordinator, prefill nodes, decode nodes."""
        return tuple(process.name for process in self._processes)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, prefill first."""
        return self.names[1:]

    def pid(self, name: str) -> int:
        """The process id of a node, or of the `coordinator`."""
        return self._supervisor.pid(name)

    def client(self) -> AsyncClient:
        """A new client of this cluster."""
        return AsyncClient(self.target, api_key=self._api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_clean = kind in (None, asyncio.CancelledError) and self._supervisor.all_live
        try:
            await self._stop()
        finally:
            shutil.rmtree(self._socket_dir)
            if is_clean and not self._settings.log_dir:
                shutil.rmtree(self.log_dir)
            elif not self._settings.log_dir:
                self._report(f"Logs are kept in {self.log_dir}")

    async def _stop(self) -> None:
        deadline_s = self._settings.drain_s + KILL_AFTER_S
        try:
            await self._supervisor.stop(["coordinator"], deadline_s=deadline_s)
        finally:
            await self._supervisor.stop(self.nodes, deadline_s=deadline_s)

    async def start(self, on_progress: Callable[[list[str]], None]) -> None:
        """Starts every process and waits until all are ready; `on_progress` is told which nodes are not yet.

        Raises SettingsError with the sentence of one that refuses to start; LaunchError when one dies, the time is up
        or another server answers in the coordinator's place.
        """
        for process in self._processes:
            await self._supervisor.start(process)
        ready = asyncio.create_task(self._wait_until_ready(on_progress))
        death = asyncio.create_task(self._supervisor.next_death())
        try:
            timeout_s = self._settings.start_timeout_s
            await asyncio.wait([ready, death], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                self._raise(death.result())
            if not ready.done():
                raise LaunchError(f"the cluster was not ready after {timeout_s:g} s; logs: {self.log_dir}")
            ready.result()
        finally:
            ready.cancel()
            death.cancel()

    async def watch(self) -> None:
        """Reports nodes that die. Raises LaunchError when the cluster can serve no longer."""
        alive = {process.name: process.role for process in self._processes}
        while True:
            death = await self._supervisor.next_death()
            del alive[death.process.name]
            if missing := _missing_part(await self._roles_now(alive)):
                raise LaunchError(f"{death} (log: {self._log_of(death)}); no {missing} is left")
            self._report(f"{death} (log: {self._log_of(death)}); {len(alive) - 1} nodes go on")

    async def _roles_now(self, alive: Mapping[str, str]) -> set[str]:
        """The roles of these processes: what nodes have become, as far as the coordinator can still say it."""
        roles = dict(alive)
        if COORDINATOR.role in roles:
            with suppress(ClientError):
                async with AsyncClient(self.target, api_key=self._api_key, timeout_s=ASK_S) as client:
                    roles |= {node.name: node.role for node in (await client.loads()).nodes if node.name in alive}
        return set(roles.values())

    def _raise(self, death: Death) -> NoReturn:
        if death.refusal:
            raise SettingsError(f"{death.refusal} ({death.process.name}; log: {self._log_of(death)})")
        raise LaunchError(f"{death} (log: {self._log_of(death)})")

    async def _wait_until_ready(self, on_progress: Callable[[list[str]], None]) -> None:
        async with self.client() as client:
            while missing := await self._missing(client):
                on_progress(missing)
                await asyncio.sleep(POLL_S)
            await client.wait_until_healthy(deadline_s=self._settings.start_timeout_s)

    async def _missing(self, client: AsyncClient) -> list[str]:
        try:
            server = await client.server_info()
        except Unavailable:  # the coordinator does not listen yet
            return list(self.nodes)
        except ClientError as error:
            raise LaunchError(self._not_ours()) from error
        if server.instance_id != self._instance_id:
            raise LaunchError(self._not_ours())
        attached = {node.name for node in server.nodes}
        return [name for name in self.nodes if name not in attached]

    def _not_ours(self) -> str:
        return f"another server than the coordinator that was started here answers at {self.target}"

    def _log_of(self, death: Death) -> Path:
        return self.log_dir / f"{death.process.name}.log"


def _missing_part(roles: Collection[str]) -> str:
    """What a cluster cannot serve without and lacks; empty when it has all."""
    if COORDINATOR.role not in roles:
        return "coordinator"
    for part in (PREFILL, DECODE):
        if not {part.role, BOTH.role} & set(roles):
            return f"node that {'reads prompts' if part is PREFILL else 'writes answers'}"
    return ""


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now, and that the kernel hands to nobody by itself."""
    for port in random.sample(UNASSIGNED_PORTS, len(UNASSIGNED_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LaunchError(f"every port from {UNASSIGNED_PORTS.start} to {UNASSIGNED_PORTS.stop - 1} is in use")


def _log_dir(given: str) -> Path:
    if not given:
        return Path(tempfile.mkdtemp(prefix="splitserve-logs-"))
    try:
        Path(given).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--log-dir {given} cannot be made: {error.strerror}") from error
    return Path(given)


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}.get(host, host)
