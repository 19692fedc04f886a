"""Start, watch and stop a cluster on this machine, or with its nodes on the hosts of a Ray cluster.

1. `Cluster.start` starts the coordinator and all nodes at once, and returns when every node is attached and the
   health service reports SERVING.
2. `Cluster.watch` restarts nodes that die, after a pause that grows while a node dies repeatedly. It ends only
   with LaunchError, when the coordinator has died.
3. Leaving the `async with` stops the coordinator, which lets its requests finish, then the nodes. Logs are kept as in
   splitserve/launch/log_folder.py.
"""

import asyncio
import math
import os
import random
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from serving_core.errors import SettingsError, SplitServeError
from serving_core.model_files.config import read_model_config
from serving_core.net.api_keys import read_api_keys
from serving_core.net.backoff import Backoff
from serving_core.net.ports import EVERY_ADDRESS, SocketFolder, before_port
from serving_core.net.tls import SCHEME, TlsFiles, hosts_of
from serving_core.process.cpus import allowed_cpus
from splitserve.client.clients import AsyncClient
from splitserve.client.errors import ClientError, Unavailable
from splitserve.launch.choices import choices
from splitserve.launch.cluster import (
    COORDINATOR,
    LOOPBACK,
    NO_HTTP,
    VLLM,
    ClusterSettings,
    Place,
    Process,
    num_nodes,
    plan_cluster,
)
from splitserve.launch.fork_server import ForkServer
from splitserve.launch.log_folder import keep_latest, log_folder
from splitserve.launch.models import LocalModel, Report
from splitserve.launch.preflight import check_processes, cuda_devices, missing_kernels
from splitserve.launch.supervisor import Death, Supervisor
from splitserve.launch.vllm_nodes import check_vllm_processes, vllm_choices

POLL_S: Final = 0.1
UNASSIGNED_PORTS: Final = range(20_000, 32_000)  # below the kernel's range for outgoing connections
KILL_AFTER_S: Final = 5.0  # beyond the time to drain
# Pause before a dead node restarts, and the time without a death after which pauses start over.
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
CALM_S: Final = 300.0


class LaunchError(SplitServeError):
    """The cluster could not start, or can serve no longer."""


class Cluster:
    """Run a coordinator and its nodes as children of this process. An async context manager, which stops them."""

    def __init__(
        self,
        settings: ClusterSettings,
        passed: Mapping[str, Any],
        model: LocalModel,
        *,
        report: Report,
        fleet_host: str = LOOPBACK,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Plan the cluster.

        `fleet_host` is this machine's address for nodes, which run elsewhere on Ray. Local nodes are forked from
        `fork_server` if given. Raises SettingsError, ModelError or LaunchError, without side effects.
        """
        self._tls = TlsFiles(passed.get("tls_cert") or "", passed.get("tls_key") or "")
        scheme = SCHEME if self._tls.cert else ""
        self.target = f"{scheme}{_reachable(settings.host)}:{settings.grpc_port}"
        http_host = _reachable(passed.get("http_host") or LOOPBACK)
        url = f"{scheme or 'http://'}{http_host}:{settings.http_port}"
        self.http_url = "" if settings.http_port == NO_HTTP else url
        self._api_key = passed.get("api_key") or _key_in(passed.get("api_keys_file"))
        self._settings = settings
        self._report = report
        self._fork_server = fork_server
        self._sockets = SocketFolder()
        cpus = tuple(allowed_cpus())
        self._instance_id = secrets.token_hex(16)
        secret, cuda = secrets.token_hex(16), cuda_devices(os.environ)
        place = Place(free_port(), str(self._sockets.path), secret, self._instance_id, cpus, cuda_devices=cuda)
        if settings.ray:  # Ray knows its hosts, their CPUs, devices and addresses
            place = replace(place, fleet_port=free_port(fleet_host), fleet_host=fleet_host)
            place = replace(place, socket_dir="", cpus=(), cuda_devices=())
        how = (passed.get(name) or "auto" for name in ("model_impl", "runner"))
        embeds = read_model_config(model.folder, *how).embedder is not None
        self.num_nodes: Final = num_nodes(settings, embeds=embeds)
        """Initial number of nodes in each role."""
        self._processes = plan_cluster(settings, passed, model, place, embeds=embeds)
        has_vllm = settings.engine == VLLM
        if has_vllm:
            check_vllm_processes(self._processes)
            chosen = vllm_choices(self._processes, self.num_nodes)
        else:
            check_processes(self._processes, are_here=not settings.ray)
            chosen = choices(self._processes, self.num_nodes, len(place.cpus))
        self.choices: Final = chosen
        """Lines that say what was chosen for this cluster, and why."""
        self.log_dir = log_folder(settings.log_dir)
        self._kept_logs = keep_latest(self.log_dir)
        self._sockets.make()
        self._supervisor = self._make_supervisor()
        if settings.ray:
            return
        if len(cpus) < len(self.nodes):
            report(f"{len(cpus)} CPUs for {len(self.nodes)} nodes: some share one, and will slow each other down")
        if not has_vllm and (line := missing_kernels(self._processes[-1].settings.engine)):
            report(line)

    def _make_supervisor(self) -> Supervisor:
        if not self._settings.ray:
            return Supervisor(self.log_dir, self._report, self._fork_server)
        from splitserve.launch.ray_cluster import RaySupervisor  # imports ray

        return RaySupervisor(self.log_dir, self._report, self._settings, self._processes[1:])

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the processes: the coordinator, prefill nodes, decode nodes, mixed nodes."""
        return tuple(process.name for process in self._processes)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, prefill nodes first."""
        return self.names[1:]

    def pid(self, name: str) -> int:
        """Return the process id of a node, or of the process named `coordinator`. Requires that it was started."""
        return self._supervisor.pid(name)

    def reread_api_keys(self) -> None:
        """Send SIGHUP to the coordinator, which then reads its file of API keys again. Requires a ready coordinator."""
        os.kill(self.pid("coordinator"), signal.SIGHUP)

    def client(self) -> AsyncClient:
        """Return a new client of this cluster, which the caller closes.

        Over TLS it trusts the cluster's certificate only.
        """
        tls = self._tls
        if not tls.cert:
            return AsyncClient(self.target, api_key=self._api_key)
        return AsyncClient(
            self.target,
            api_key=self._api_key,
            tls_ca=tls.cert,
            tls_cert=tls.cert,
            tls_key=tls.key,
            tls_server_name=next(iter(hosts_of(tls)), "").replace("*", "any"),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._stop()
        finally:
            self._sockets.remove()
            if self._kept_logs is not None:
                os.close(self._kept_logs)
                self._report(f"Logs are kept in {self.log_dir}")

    async def _stop(self) -> None:
        deadline_s = self._settings.drain_s + KILL_AFTER_S
        try:
            await self._supervisor.stop(["coordinator"], deadline_s=deadline_s)
        finally:
            await self._supervisor.stop(self.nodes, deadline_s=deadline_s)

    async def start(self, on_progress: Callable[[list[str]], None]) -> None:
        """Start every process, and wait until every node is attached and the server reports SERVING.

        `on_progress` gets the names of the nodes that are not ready, with the progress of loading their weights. Raises
        SettingsError with the sentence of a process that refuses to start; LaunchError when a process dies or cannot be
        started, the time is up, or another server answers at the coordinator's address.
        """
        for process in self._processes:
            try:
                await self._supervisor.start(process)
            except OSError as error:
                raise LaunchError(_not_started(process, error)) from error
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
        """Start nodes that die again, after a pause that grows; never returns.

        Raises LaunchError when the coordinator has died.
        """
        pauses = {name: Backoff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, calm_s=CALM_S) for name in self.nodes}
        due_s: dict[str, float] = {}  # when a dead node restarts

        def again(name: str, why: str) -> float:
            now = time.monotonic()
            pause_s = pauses[name].next_s(now)
            self._report(f"{why}; it starts again in {pause_s:g} s")
            return now + pause_s

        while True:
            if (death := await self._next_death(min(due_s.values(), default=None))) is not None:
                if death.process.role == COORDINATOR.role:
                    raise LaunchError(f"{death} (log: {self._log_of(death)}); no coordinator is left")
                due_s[death.process.name] = again(death.process.name, f"{death} (log: {self._log_of(death)})")
            for process in self._processes:
                if time.monotonic() >= due_s.get(process.name, math.inf):
                    del due_s[process.name]
                    try:
                        await self._supervisor.start(process)
                    except OSError as error:  # as after a node that took all memory
                        due_s[process.name] = again(process.name, _not_started(process, error))

    async def _next_death(self, until_s: float | None) -> Death | None:
        """Return the next death, or None when there is none until `until_s`."""
        try:
            async with asyncio.timeout(None if until_s is None else max(0.0, until_s - time.monotonic())):
                return await self._supervisor.next_death()
        except TimeoutError:
            return None

    def _raise(self, death: Death) -> NoReturn:
        if death.refusal:
            raise SettingsError(f"{death.refusal} ({death.process.name}; log: {self._log_of(death)})")
        raise LaunchError(f"{death} (log: {self._log_of(death)})")

    async def _wait_until_ready(self, on_progress: Callable[[list[str]], None]) -> None:
        async with self.client() as client:
            while missing := await self._missing(client):
                loading = self._supervisor.loading
                on_progress([f"{name} ({loading[name]})" if name in loading else name for name in missing])
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


def _not_started(process: Process, error: OSError) -> str:
    return f"{process.name} cannot be started: {error.strerror}"


def free_port(host: str = LOOPBACK) -> int:
    """Return a TCP port that is free at this address, outside the kernel's range for outgoing connections.

    Raises LaunchError if none is free.
    """
    for port in random.sample(UNASSIGNED_PORTS, len(UNASSIGNED_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise LaunchError(f"every port from {UNASSIGNED_PORTS.start} to {UNASSIGNED_PORTS.stop - 1} is in use")


def _key_in(file: str | None) -> str | None:
    """Return one of the API keys in a file."""
    return next(iter(read_api_keys(Path(file)))) if file else None


def _reachable(host: str) -> str:
    return before_port(LOOPBACK if host.strip("[]") in EVERY_ADDRESS else host)
