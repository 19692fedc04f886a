"""Real clusters on loopback: the coordinator and every node as a process of its own, on free ports.

Every process has a process group of its own and is killed by its pid alone. Logs lie in the test's folder.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from serving_core.net.ports import SocketFolder
from serving_node.settings import PACKAGES
from tests import forked
from tests.descriptors import limited
from tests.tls_kit import flags_of

SERVICE = "splitserve.v1.Inference"
FLEET_SECRET = "known-to-the-tests-alone"
HEARTBEAT_S = 0.2
NODE_TIMEOUT_S = 15.0  # so that no node is lost because a busy machine lets it wait; tests of hangs have less
START_DEADLINE_S = 400.0
STOP_DEADLINE_S = 180.0  # a node that has requests left may take 30 s to drain, and more to end
CALL_DEADLINE_S = 180.0
STANDS_BY = "this one is its standby"
PORTS = range(20_000, 32_000)  # below those that the kernel hands out by itself
WORKERS = 16  # that have ports of their own

Flags = Mapping[str, object]
"""Flags of a process by their names with underscores."""

_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # no backoff inherited from a server that a test has killed
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # which is the time that one attempt may take
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
)


def _own_ports() -> Iterator[int]:
    """One after the other, from a random one on: no other worker of pytest has them, and none comes twice soon."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    own = PORTS[worker::WORKERS]
    first = random.SystemRandom().randrange(len(own))
    return itertools.cycle([*own[first:], *own[:first]])


_ports = _own_ports()


def free_port() -> int:
    """A TCP port that nobody listens on, and that is not given again before all others were."""
    for port in itertools.islice(_ports, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float) -> None:
    """Fails the test when the condition does not come true in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.02)


class Child:
    """One process of ours, with everything it writes in `log`."""

    def __init__(
        self,
        name: str,
        module: str,
        *positional: str,
        flags: Flags,
        log: Path,
        env: Flags,
        python: str = sys.executable,
        num_descriptors: int | None = None,
        prefix: Sequence[str] = (),
        last: Sequence[str] = (),
    ) -> None:
        """`num_descriptors` are the most files that it may open, `prefix` what it is started by, `last` its last
        arguments."""
        self.name = name
        self.log = log
        arguments = [*positional]
        for flag, value in flags.items():
            for each in value if isinstance(value, tuple) else (value,):  # a flag that is repeated
                spelling = flag.replace("_", "-")
                arguments += (
                    [f"--{'' if each else 'no-'}{spelling}"] if isinstance(each, bool) else [f"--{spelling}", str(each)]
                )
        arguments += last
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("SPLITSERVE_")}
        fixed = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        options = {
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.STDOUT,
            "env": inherited | fixed | {key: str(value) for key, value in env.items()},
            "cwd": log.parent,
            "process_group": 0,
        }
        argv = [*prefix, python, "-m", module, *arguments]
        with log.open("ab") as output:
            if num_descriptors is not None:
                limited_argv = limited(argv, num_descriptors, num_descriptors)
                self.process = subprocess.Popen(limited_argv, stdout=output, **options)
            elif prefix or python != sys.executable:
                self.process = subprocess.Popen(argv, stdout=output, **options)
            else:
                self.process = forked.popen(module, *arguments, stdout=output, **options)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, also to a stopped process, and waits for its end."""
        self.process.kill()
        self.process.wait(timeout=60)

    def wait(self, deadline_s: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {deadline_s:g} s\n{_tail(self.output())}") from None

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """SIGTERM; the exit code."""
        self.send(signal.SIGTERM)
        return self.wait(deadline_s)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """What it has written as JSON, less a line that is not whole yet."""
        return [json.loads(line) for line in self.output().split("\n")[:-1]]


class Cluster:
    """A coordinator and its nodes. Start it with `start`, end it with `stop` or `kill`."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        num_mixed: int = 0,
        ipc: bool = False,
        http: bool = False,
        env: Flags | None = None,
        coordinator: Flags | None = None,
        node: Flags | None = None,
        prefill: Flags | None = None,
        decode: Flags | None = None,
        mixed: Flags | None = None,
        coordinator_python: str = sys.executable,
        certs: Path | None = None,
        num_descriptors: int | None = None,
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        """`certs`, as `splitserve certs` makes it, has everything over TLS: each process shows its certificate, and so
        does who asks here. `num_descriptors` are the most files that each process may open."""
        self.model = model
        self.certs = certs
        self.folder = folder
        self.host = "127.0.0.1"  # where clients ask
        self.port, self.fleet_port = free_port(), free_port()
        self.http_port = free_port() if http else -1
        numbers = {"prefill": num_prefill, "decode": num_decode, "mixed": num_mixed}
        self.names = [f"{role}-{i}" for role, number in numbers.items() for i in range(number)]
        self.children: dict[str, Child] = {}
        # Not in `folder`: a socket's path may be no longer than 107 characters, and pytest's folders are deep.
        self._sockets = SocketFolder() if ipc else None
        self.env = {"SPLITSERVE_FLEET_SECRET": FLEET_SECRET} | dict(env or {})
        times = {"heartbeat_s": HEARTBEAT_S, "node_timeout_s": NODE_TIMEOUT_S}
        self._coordinator_flags = times | dict(coordinator or {})
        self._node_flags = {"block_size": 8} | dict(node or {})
        self._coordinator_python = coordinator_python
        self._num_descriptors = num_descriptors
        self._start_deadline_s = start_deadline_s
        self._role_flags = {"prefill": dict(prefill or {}), "decode": dict(decode or {}), "mixed": dict(mixed or {})}
        self._expected_to_die: set[int] = set()
        self._everyone: list[Child] = []

    @property
    def target(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Of the HTTP service; only with `http`."""
        assert self.http_port > 0, "the cluster has no HTTP service"
        return f"{'https' if self.certs else 'http'}://127.0.0.1:{self.http_port}"

    # ---- processes ----

    def start(self) -> "Cluster":
        """Starts every process at once and waits until all are attached and the service is healthy."""
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        if self._sockets is not None:
            self._sockets.make()
        self.start_coordinator()
        for name in self.names:
            self.start_node(name)
        try:
            self.wait_complete()
        except BaseException:
            self.kill_everything()
            raise
        return self

    def start_coordinator(self, *, env: Flags | None = None, **flags: object) -> Child:
        """Starts the coordinator; `flags` and `env` go over the cluster's."""
        ports = {"grpc_port": self.port, "fleet_port": self.fleet_port, "http_port": self.http_port}
        given = {**ports, **self._tls("coordinator"), **self._coordinator_flags, **flags}
        return self._start("coordinator", "coordinator", given, env)

    def start_standby(self, **flags: object) -> Child:
        """Starts a coordinator that waits for the end of the cluster's; `take_over` and `pass_on` make it the
        cluster's."""
        ports = {"grpc_port": self.port, "fleet_port": self.fleet_port, "http_port": self.http_port}
        given = {**ports, **self._tls("coordinator"), **self._coordinator_flags, "standby": True, **flags}
        log = self.folder / "standby.log"  # an earlier standby's too
        num_before = log.read_text().count(STANDS_BY) if log.exists() else 0
        child = self._start("standby", "coordinator", given, None)
        wait_until(lambda: child.output().count(STANDS_BY) > num_before, "the standby waits", self._start_deadline_s)
        return child

    def take_over(self) -> None:
        """Kills the coordinator, whose place the standby takes."""
        self.kill("coordinator")
        self.children["coordinator"] = self.children.pop("standby")

    def pass_on(self) -> None:
        """Stops the coordinator, whose place the standby takes."""
        assert self.children["coordinator"].stop() == 0
        self.children["coordinator"] = self.children.pop("standby")

    def start_api_server(self, **flags: object) -> tuple[int, int]:
        """Starts an API server by itself, and returns its ports, of gRPC and of HTTP."""
        _, (grpc_port, http_port) = self.launch_api_server(**flags)
        wait_until(lambda: self.is_serving(grpc_port), "the API server serves", self._start_deadline_s)
        return grpc_port, http_port

    def launch_api_server(self, **flags: object) -> tuple[Child, tuple[int, int]]:
        """Starts an API server by itself, which may never serve."""
        grpc_port, http_port = free_port(), free_port()
        ports = {"grpc_port": grpc_port, "http_port": http_port, "coordinator": f"127.0.0.1:{self.fleet_port}"}
        given = {**self._tls("coordinator"), **ports, **flags}
        return self._start(f"api-{grpc_port}", "coordinator.api", given, None), (grpc_port, http_port)

    def start_node(self, name: str, *, env: Flags | None = None, **flags: object) -> Child:
        """Starts prefill-N, decode-N or mixed-N; `flags` and `env` go over the cluster's."""
        role = name.partition("-")[0]
        own = {"coordinator": f"127.0.0.1:{self.fleet_port}", "name": name}
        if self._sockets is not None:
            own["kv_bind"] = f"ipc://{self._sockets.path}/{name}"
        given = {**self._tls("node"), **self._node_flags, **own, **self._role_flags[role], **flags}
        return self._start(name, PACKAGES[role], given, env)

    def _tls(self, role: str) -> dict[str, str]:
        return flags_of(self.certs, role) if self.certs else {}

    def start_intruder(self, model: Path, name: str, **flags: object) -> Child:
        """Starts a node of another model or with other flags, which must not become part of the cluster."""
        link = {"coordinator": f"127.0.0.1:{self.fleet_port}", "name": name}
        module = PACKAGES[name.partition("-")[0]]
        child = self._spawn(name, module, model, {**self._node_flags, **link, **flags}, {})
        self._expected_to_die.add(child.process.pid)
        return child

    def _start(self, name: str, module: str, flags: Flags, env: Flags | None) -> Child:
        self.children[name] = self._spawn(name, module, self.model, flags, env or {})
        return self.children[name]

    def _spawn(self, name: str, module: str, model: Path, flags: Flags, env: Flags) -> Child:
        """The flag `version` is none: the process takes itself for one of that version."""
        flags, version = {key: value for key, value in flags.items() if key != "version"}, flags.get("version")
        python = self._coordinator_python if module == "coordinator" else sys.executable
        log = self.folder / f"{name}.log"
        options = {"env": {**self.env, **env}, "python": python, "num_descriptors": self._num_descriptors}
        if version is not None:
            env_of_tests = {"PYTHONPATH": Path(__file__).parents[2]}
            options |= {"env": {**options["env"], **env_of_tests}, "prefix": ("env",)}
            words = (str(version), module, str(model))
            child = Child(name, "tests.system.other_version", *words, flags=flags, log=log, **options)
        else:
            child = Child(name, module, str(model), flags=flags, log=log, **options)
        self._everyone.append(child)
        return child

    def kill(self, *names: str) -> None:
        """SIGKILL to processes, all at once: none sees another one die."""
        children = [self.expect_end(name) for name in names]
        for child in children:
            child.send(signal.SIGSTOP)
        for child in children:
            child.kill()

    def expect_end(self, name: str) -> Child:
        """This process may end before the cluster does, and with any exit code."""
        child = self.children[name]
        self._expected_to_die.add(child.process.pid)
        return child

    def heal(self) -> None:
        """Starts again whatever does not run, and waits until the cluster is complete."""
        for name in ("coordinator", *self.names):
            if not self.children[name].is_running:
                self.start_coordinator() if name == "coordinator" else self.start_node(name)
        self.wait_complete()

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """Stops nodes, then the coordinator, with SIGTERM; fails on a bad exit code or a traceback in a log."""
        troubles = []
        nodes = [child for name, child in self.children.items() if name != "coordinator"]
        try:
            for children in (nodes, [self.children["coordinator"]]):
                running = [child for child in children if child.is_running]
                for child in running:
                    child.send(signal.SIGTERM)
                for child in running:
                    child.wait(deadline_s)
            for child in self._everyone:
                if child.process.returncode != 0 and child.process.pid not in self._expected_to_die:
                    troubles.append(f"{child.name} ended with exit code {child.process.returncode}")
                if "Traceback" in child.output():
                    troubles.append(f"{child.name} has a traceback in its log:\n{_tail(child.output())}")
        finally:
            self.kill_everything()
        assert not troubles, "\n".join(troubles)

    def kill_everything(self) -> None:
        for child in self._everyone:
            if child.is_running:
                child.kill()
        if self._sockets is not None:
            self._sockets.remove()

    def logs(self) -> str:
        """The end of every log, for the report of a failed test."""
        logs = {child.log: child for child in self._everyone}
        return "\n".join(f"---- {path.name}\n{_tail(child.output())}" for path, child in logs.items())

    # ---- calls ----

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
        """A stub on a channel of its own, for asyncio."""
        async with (
            grpc.aio.secure_channel(self.target, self._credentials(), options=_CHANNEL_OPTIONS)
            if self.certs
            else grpc.aio.insecure_channel(self.target, options=_CHANNEL_OPTIONS)
        ) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)

    @contextlib.contextmanager
    def channel(self, port: int | None = None) -> Iterator[grpc.Channel]:
        """A blocking channel, to the public port unless another is given."""
        target = f"{self.host}:{port or self.port}"
        with (
            grpc.secure_channel(target, self._credentials(), options=_CHANNEL_OPTIONS)
            if self.certs
            else grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        ) as channel:
            yield channel

    def _credentials(self) -> grpc.ChannelCredentials:
        ca, key, cert = ((self.certs / name).read_bytes() for name in ("ca.crt", "client.key", "client.crt"))
        return grpc.ssl_channel_credentials(ca, key, cert)

    @contextlib.contextmanager
    def stub(self) -> Iterator[inference_pb2_grpc.InferenceStub]:
        """A blocking stub."""
        with self.channel() as channel:
            yield inference_pb2_grpc.InferenceStub(channel)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        key = self.env.get("SPLITSERVE_API_KEY")
        return (("authorization", f"Bearer {key}"),) if key else ()

    def is_serving(self, port: int | None = None) -> bool:
        """What the health service says of the Inference service, at the public port unless another is given; False
        where nobody answers."""
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        with self.channel(port) as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=30, metadata=self._metadata)
            except grpc.RpcError:
                return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    def server_info(self) -> inference_pb2.GetServerInfoResponse:
        request = inference_pb2.GetServerInfoRequest()
        with self.stub() as stub:
            return stub.GetServerInfo(request, timeout=CALL_DEADLINE_S, metadata=self._metadata, wait_for_ready=True)

    def loads(self) -> dict[str, inference_pb2.NodeLoad]:
        """Every attached node's last load report."""
        return {node.name: node for node in self._get_loads().nodes}

    def _get_loads(self) -> inference_pb2.GetLoadsResponse:
        with self.stub() as stub:
            return stub.GetLoads(inference_pb2.GetLoadsRequest(), timeout=CALL_DEADLINE_S, metadata=self._metadata)

    # ---- waits ----

    def wait_complete(self) -> None:
        """Until the service is healthy and every node of ours is attached."""
        wait_until(self._is_complete, "all nodes attached and serving", self._start_deadline_s)

    def _is_complete(self) -> bool:
        for name in ("coordinator", *self.names):
            child = self.children[name]
            assert child.is_running, f"{name} ended with exit code {child.process.returncode}\n{_tail(child.output())}"
        return self.is_serving() and self.attached() == set(self.names)

    def attached(self) -> set[str]:
        """Names of the attached nodes that take requests."""
        return {name for name, load in self.loads().items() if load.state == "ready"}

    def wait_all_free(self, deadline_s: float = 180.0) -> None:
        """Until no request is left and every block of every node is free, and stays so for some heartbeats:
        a load report may be one heartbeat old."""
        free_since: float | None = None
        end = time.monotonic() + deadline_s
        while free_since is None or time.monotonic() - free_since < 3 * HEARTBEAT_S:
            loads = self._get_loads()
            busy = [str(node) for node in loads.nodes if not _is_free(node)]
            if busy or loads.num_live_requests or {node.name for node in loads.nodes} < set(self._running_nodes()):
                free_since = None
            elif free_since is None:
                free_since = time.monotonic()
            assert time.monotonic() < end, (
                f"not free within {deadline_s:g} s: {loads.num_live_requests} live requests\n{loads.nodes}"
            )
            time.sleep(0.05)

    def _running_nodes(self) -> list[str]:
        return [name for name in self.names if self.children[name].is_running]


def _is_free(node: inference_pb2.NodeLoad) -> bool:
    busy = node.num_running or node.num_waiting or node.num_waiting_tokens
    return not busy and 0 < node.num_blocks == node.num_blocks_free


def _tail(text: str, num_lines: int = 25) -> str:
    return "\n".join(text.splitlines()[-num_lines:])
