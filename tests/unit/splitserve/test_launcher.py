"""`splitserve up` with real nodes that serve the fake model: what it says, and what it leaves behind."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from engine.native.library import native_library
from protos import inference_pb2
from serving_core.errors import ModelError, SplitServeError
from serving_core.net.ports import SocketFolder
from splitserve import Client
from splitserve.client.clients import LIVENESS
from splitserve.client.errors import Unauthenticated, Unavailable
from splitserve.launch.cluster import NO_HTTP, ClusterSettings
from splitserve.launch.launcher import Cluster, LaunchError, free_port
from splitserve.launch.models import LocalModel, demo_folder
from tests.effort import few
from tests.scripted_server import Script, serving
from tests.tiny_models import write_fake_model, write_tiny_model

ROOT = Path(__file__).parents[3]
DEADLINE_S = 240.0
AS_MODULE = (sys.executable, "-m", "splitserve")
AS_COMMAND = (str(Path(sysconfig.get_path("scripts"), "splitserve")),)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fake_model(tmp_path_factory.mktemp("model") / "fake")


class Up:
    """A running `splitserve up`."""

    def __init__(
        self, model: Path, *flags: str, port: int, cwd: Path | None = None, program: Sequence[str] = AS_MODULE
    ) -> None:
        self.target = f"127.0.0.1:{port}"
        self.said = ""
        ports = ["--grpc-port", str(port), "--http-port", "0"]
        command = [*program, "up", str(model), *ports, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1, cwd=cwd)

    def read_until(self, text: str) -> None:
        while text not in self.said:
            line = self.process.stderr.readline()
            assert line, f"{text!r} never came after: {self.said}"
            self.said += line

    @property
    def log_dir(self) -> Path:
        """Where it says that its logs are."""
        [log_dir] = re.findall(r"^Serving .*; logs: (.*)$", self.said, re.MULTILINE)
        return Path(log_dir)

    def end(self) -> int:
        """The exit code, once it ends."""
        self.said += self.process.stderr.read()
        return self.process.wait(DEADLINE_S)

    def children(self) -> dict[str, psutil.Process]:
        """The coordinator and the nodes, which the fork server has started where there is one, by their names."""
        children = psutil.Process(self.process.pid).children()
        servers = [child for child in children if "splitserve.launch.fork_server" in child.cmdline()]
        forked = [child for server in servers for child in server.children()]
        return {child.name(): child for child in (*children, *forked) if child not in servers}


@pytest.fixture
def short_path():
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def up(model, tmp_path, monkeypatch):
    """Starts clusters, with a temporary folder of their own; at the end kills what the test has left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    started: list[Up] = []

    def start(*flags: str, model: Path = model, port: int | None = None, **options: Any) -> Up:
        started.append(Up(model, *flags, port=port or free_port(), **options))
        return started[-1]

    yield start
    for cluster in started:
        for process in (
            [*psutil.Process(cluster.process.pid).children(recursive=True), cluster.process]
            if is_running(cluster)
            else []
        ):
            process.kill()
        cluster.process.wait()
        cluster.process.stderr.close()


@pytest.fixture
def hangups():
    """Children heed SIGHUP, which those of a process under nohup would ignore."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def is_running(cluster: Up) -> bool:
    return cluster.process.poll() is None


def assert_gone(processes) -> None:
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert not alive


def test_a_cluster_serves_survives_a_node_and_ends_by_ctrl_c(up, tmp_path):
    cluster = up("--mixed", "2")
    cluster.read_until("Ready")
    children = cluster.children()
    assert set(children) == {"coordinator", "mixed-0", "mixed-1"}
    with Client(cluster.target) as client:
        assert client.model_info().served_model_name == "fake"
        children["mixed-1"].kill()
        cluster.read_until("mixed-1 was killed by SIGKILL")
        chunks = list(client.generate([1, 2, 3], max_tokens=5, ignore_eos=True))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 5
    children |= cluster.children()
    cluster.process.send_signal(signal.SIGINT)
    assert (cluster.end(), cluster.said.splitlines()[-1]) == (130, "Stopped.")
    assert "Stopping: running requests have 10 s to end; a second Ctrl-C ends them." in cluster.said
    assert_gone(children.values())
    assert list((tmp_path / "tmp").iterdir()) == [cluster.log_dir]  # which says why a node has died
    assert "Traceback" not in cluster.said


@pytest.mark.nightly
def test_a_cluster_serves_and_survives_a_node_but_not_its_coordinator(up, tmp_path):
    cluster = up("--decode", "2", "--max-model-len", "64", "--block-size", "8")
    cluster.read_until("Ready")
    children = cluster.children()
    assert set(children) == {"coordinator", "prefill-0", "decode-0", "decode-1"}
    with Client(cluster.target) as client:
        assert client.model_info().served_model_name == "fake"
        assert client.model_info().max_model_len == 64
        assert {node.fingerprint["block_size"] for node in client.server_info().nodes} == {"8"}
        [url] = re.findall(rf"Ready: gRPC on {cluster.target}, HTTP on (http://127.0.0.1:\d+). Ctrl-C", cluster.said)
        assert [model["id"] for model in httpx2.get(f"{url}/v1/models").json()["data"]] == ["fake"]
        children["decode-1"].kill()
        cluster.read_until("decode-1 was killed by SIGKILL")
        chunks = list(client.generate([1, 2, 3], max_tokens=5, ignore_eos=True))
        assert sum(len(chunk.token_ids) for chunk in chunks) == 5
    children |= cluster.children()
    children["coordinator"].kill()
    assert cluster.end() == 1
    *_, last = cluster.said.splitlines()
    assert last.startswith("Error: coordinator was killed by SIGKILL")
    assert "no coordinator is left" in last
    assert_gone(children.values())
    assert f"Logs are kept in {cluster.log_dir}" in cluster.said
    assert sorted(log.name for log in cluster.log_dir.iterdir()) == [f"{name}.log" for name in sorted(children)]
    assert "it starts again in 1 s" in cluster.said
    assert "Traceback" not in cluster.said


@pytest.mark.parametrize(
    ("when", "number", "exit_code"),
    [
        ("Loading", signal.SIGINT, 130),
        *(
            pytest.param(when, number, exit_code, marks=pytest.mark.nightly)
            for when, number, exit_code in [
                ("Ready", signal.SIGINT, 130),
                *((when, number, 0) for when in ("Loading", "Ready") for number in (signal.SIGTERM, signal.SIGHUP)),
            ]
        ),
    ],
)
def test_a_clean_end_leaves_the_logs_and_nothing_else(up, hangups, tmp_path, when, number, exit_code):
    cluster = up()
    cluster.read_until(when)
    children = cluster.children()
    assert children
    assert cluster.log_dir.is_dir()
    cluster.process.send_signal(number)
    assert (cluster.end(), cluster.said.splitlines()[-1]) == (exit_code, "Stopped.")
    assert ("Stopping: running requests have 10 s to end; a second Ctrl-C ends them." in cluster.said) == (
        when == "Ready"
    )
    assert_gone(children.values())
    assert list((tmp_path / "tmp").iterdir()) == [cluster.log_dir]
    assert cluster.said.splitlines()[-2] == f"Logs are kept in {cluster.log_dir}"
    assert {log.name for log in cluster.log_dir.iterdir()} <= {"coordinator.log", "prefill-0.log", "decode-0.log"}
    assert "Traceback" not in cluster.said


@pytest.mark.nightly
def test_temporary_files_may_have_long_paths_and_be_cleaned_away(up, tmp_path, monkeypatch):
    """A socket's path has some hundred characters at most."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    cluster = up()
    cluster.read_until("Ready")
    with Client(cluster.target) as client:
        chunks = list(client.generate([1, 2, 3], max_tokens=5, ignore_eos=True))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 5
    shutil.rmtree(folder)
    cluster.process.send_signal(signal.SIGINT)
    assert (cluster.end(), cluster.said.splitlines()[-1]) == (130, "Stopped.")
    assert "Traceback" not in cluster.said


@pytest.mark.nightly
def test_logs_that_were_asked_for_are_kept(up, tmp_path):
    cluster = up("--log-dir", str(tmp_path / "logs"))
    cluster.read_until("Ready")
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.end() == 0
    assert sorted(log.stem for log in (tmp_path / "logs").iterdir()) == ["coordinator", "decode-0", "prefill-0"]
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.nightly
def test_a_hangup_has_the_api_keys_read_again_and_nothing_ends(up, hangups, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann\n")
    cluster = up("--api-keys-file", str(keys))
    cluster.read_until("Ready")
    assert _is_let_in(cluster, "key-of-ann")
    keys.write_text("bob key-of-bob\n")
    cluster.process.send_signal(signal.SIGHUP)
    while not _is_let_in(cluster, "key-of-bob"):
        assert is_running(cluster), cluster.end()
        time.sleep(0.05)
    assert not _is_let_in(cluster, "key-of-ann")
    cluster.process.send_signal(signal.SIGTERM)
    assert (cluster.end(), cluster.said.splitlines()[-1]) == (0, "Stopped.")


@pytest.mark.nightly
def test_a_hangup_while_it_loads_ends_nothing_and_is_passed_on(up, hangups, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann\n")
    cluster = up("--api-keys-file", str(keys))
    cluster.read_until("Loading")
    keys.write_text("ann key-of-ann\nbob key-of-bob\n")
    cluster.process.send_signal(signal.SIGHUP)
    cluster.read_until("Ready")
    while not _is_let_in(cluster, "key-of-bob"):
        assert is_running(cluster), cluster.end()
        time.sleep(0.05)
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.end() == 0


def _is_let_in(cluster: Up, key: str) -> bool:
    with Client(cluster.target, api_key=key) as client:
        try:
            return client.server_info().instance_id != ""
        except Unauthenticated:
            return False


IN_A_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@pytest.mark.nightly
def test_up_ends_when_its_terminal_does(model, hangups, tmp_path):
    """Which is a hangup too, but not one that is about API keys."""
    (tmp_path / "keys").write_text("ann key-of-ann\n")
    up = ["-m", "splitserve", "up", str(model), "--grpc-port", str(free_port()), "--http-port", str(NO_HTTP)]
    command = [sys.executable, "-c", IN_A_TERMINAL, *up, "--api-keys-file", str(tmp_path / "keys")]
    terminal, its_end = pty.openpty()
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), its_end)
    with subprocess.Popen(command, start_new_session=True, **ends) as process:
        try:
            os.close(its_end)
            said = b""
            while b"Ready" not in said:
                said += os.read(terminal, 4096)
            children = psutil.Process(process.pid).children(recursive=True)
            os.close(terminal)
            process.wait(DEADLINE_S)
        finally:
            process.kill()
    assert children
    assert_gone(children)


@pytest.mark.nightly
def test_nodes_that_die_start_again_and_whoever_asks_meanwhile_waits(up):
    cluster = up("--node-wait-s", str(DEADLINE_S))
    cluster.read_until("Ready")
    first = cluster.children()
    for name in ("prefill-0", "decode-0"):
        first[name].kill()
        cluster.read_until(f"{name} was killed by SIGKILL")
    with Client(cluster.target) as client:
        [*_, last] = client.generate([1, 2, 3], max_tokens=5, ignore_eos=True)
        assert last.completion.completion_tokens == 5
    again = cluster.children()
    assert set(again) == set(first)
    assert all(again[name].pid != first[name].pid for name in ("prefill-0", "decode-0"))
    again["decode-0"].kill()
    cluster.read_until("it starts again in 2 s")
    cluster.process.send_signal(signal.SIGTERM)
    assert (cluster.end(), cluster.said.splitlines()[-1]) == (0, "Stopped.")
    assert_gone([*first.values(), *again.values()])


@pytest.mark.nightly
def test_a_cluster_of_nodes_that_do_both_serves(up):
    cluster = up("--mixed", "2")
    cluster.read_until("Ready")
    assert "2 mixed" in cluster.said
    assert set(cluster.children()) == {"coordinator", "mixed-0", "mixed-1"}
    with Client(cluster.target) as client:
        [*_, last] = client.generate([1, 2, 3], max_tokens=5, ignore_eos=True)
    assert last.completion.completion_tokens == 5
    cluster.process.send_signal(signal.SIGTERM)
    assert (cluster.end(), cluster.said.splitlines()[-1]) == (0, "Stopped.")


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_nothing_is_left_when_up_itself_is_killed(up, tmp_path, monkeypatch):
    cluster = up()
    cluster.read_until("Ready")
    children = cluster.children()
    cluster.process.kill()
    assert_gone(children.values())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with SocketFolder():  # as the next `up` makes it
        pass
    assert [each for each in (tmp_path / "tmp").iterdir() if each != cluster.log_dir] == []


@pytest.mark.nightly
def test_another_cluster_on_the_port_is_never_taken_for_ours(up, tmp_path):
    first = up()
    first.read_until("Ready")
    port = first.target.rpartition(":")[2]
    second = up(port=int(port))
    assert second.end() == 2
    assert second.said == f"Error: --grpc-port {port} is in use on 127.0.0.1\n"
    assert is_running(first)


class Stranger(Script):
    """Healthy, and with nodes of the names that ours will have."""

    def GetServerInfo(self, request, context):
        nodes = [inference_pb2.NodeInfo(name=name) for name in ("prefill-0", "decode-0")]
        return inference_pb2.GetServerInfoResponse(instance_id="a stranger", nodes=nodes)

    def GetLoads(self, request, context):
        nodes = [inference_pb2.NodeLoad(name=name) for name in ("prefill-0", "decode-0")]
        return inference_pb2.GetLoadsResponse(nodes=nodes)


async def test_a_server_that_slipped_in_is_told_from_ours(model):
    """After the port was found free, that is: nothing looks at it here."""
    with serving(Stranger()) as target:
        settings = ClusterSettings(grpc_port=int(target.rpartition(":")[2]), http_port=NO_HTTP)
        with pytest.raises(SplitServeError, match=r"another server than .* answers|port \d+ is in use"):
            async with Cluster(settings, {}, LocalModel(model, "fake"), report=print) as cluster:
                await cluster.start(print)


async def test_a_process_that_the_system_does_not_start_is_a_sentence(model, monkeypatch, tmp_path):
    """For want of processes or memory, or as here because its environment is too long."""
    for number in range(2**8):
        monkeypatch.setenv(f"LONG_{number}", "x" * 2**16)
    settings = ClusterSettings(log_dir=str(tmp_path))
    async with Cluster(settings, {}, LocalModel(model, "fake"), report=print) as cluster:
        with pytest.raises(LaunchError, match=r"^coordinator cannot be started: Argument list too long$"):
            await cluster.start(print)


@pytest.mark.parametrize(
    ("host", "dialled"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("::", "127.0.0.1"),
        ("[::]", "127.0.0.1"),
        ("fd00::2", "[fd00::2]"),
        ("host.example", "host.example"),
    ],
)
async def test_an_address_is_told_as_it_is_dialled(model, host, dialled):
    settings, passed = ClusterSettings(host=host, grpc_port=4711, http_port=4712), {"http_host": host, "api_key": "k"}
    async with Cluster(settings, passed, LocalModel(model, "fake"), report=print) as cluster:
        assert (cluster.target, cluster.http_url) == (f"{dialled}:4711", f"http://{dialled}:4712")


def rewrite(path: Path, **fields) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.nightly
def test_what_only_a_node_can_know_is_its_own_sentence(up, tmp_path):
    folder = write_tiny_model(tmp_path / "tiny")
    rewrite(folder / "config.json", num_hidden_layers=4)
    cluster = up(model=folder)
    assert cluster.end() == 2
    [sentence] = [line for line in cluster.said.splitlines() if line.startswith("Error")]
    pattern = r"Error: the weights lack model\.layers\.3\..* and \d+ more \(((?:prefill|decode)-0); log: (.*)\)"
    node, log = re.fullmatch(pattern, sentence).groups()
    assert log == str(cluster.log_dir / f"{node}.log")
    assert "the weights lack" in Path(log).read_text()
    assert "Ready" not in cluster.said


@pytest.mark.parametrize("compiled", few([True, False], False))
def test_missing_kernels_are_told_with_what_they_cost(up, tmp_path, compiled):
    """In an installation whose package `engine` is a copy without what was compiled."""
    (tmp_path / "installed").mkdir()
    for room in ROOT.glob("*/__init__.py"):
        (tmp_path / "installed" / room.parent.name).symlink_to(room.parent)
    if not compiled:
        (tmp_path / "installed" / "engine").unlink()
        shutil.copytree(ROOT / "engine", tmp_path / "installed" / "engine", ignore=shutil.ignore_patterns("*.so"))
    elif native_library() is None:
        pytest.skip("there are no compiled kernels here")
    cluster = up("--device", "cpu", cwd=tmp_path / "installed")
    cluster.read_until("Serving")
    lines = [line for line in cluster.said.splitlines() if "There are no compiled kernels" in line]
    assert len(lines) == (0 if compiled else 1)
    assert compiled or "takes about 3 times as long" in lines[0]


@pytest.mark.nightly
def test_no_module_of_a_user_is_imported(up, tmp_path, monkeypatch, short_path):
    """From the folder that it runs in: not by ranks and API servers either, and not in the place of one of Python
    itself."""
    monkeypatch.setenv("TMPDIR", str(short_path))  # API servers have sockets there
    folder = tmp_path / "users"
    folder.mkdir()
    for name in ("serving_core", "coordinator", "prefill_node", "engine", "secrets", "queue"):
        (folder / f"{name}.py").write_text("raise SystemExit('the module of the user was imported')")
    cluster = up("--decode-tp", "2", "--api-server-count", "2", cwd=folder, program=AS_COMMAND)
    cluster.read_until("Ready")
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.end() == 130


@pytest.mark.nightly
def test_a_role_becomes_the_process_of_its_room(model):
    port, fleet_port = free_port(), free_port()
    command = [
        sys.executable,
        "-m",
        "splitserve",
        "coordinator",
        str(model),
        f"--grpc-port={port}",
        f"--fleet-port={fleet_port}",
        "--http-port=-1",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            with Client(f"127.0.0.1:{port}") as client:
                while not _lives(client):
                    assert process.poll() is None
                    time.sleep(0.05)
            arguments = psutil.Process(process.pid).cmdline()
            assert arguments[1:3] == ["-m", "coordinator"]
            assert arguments[-2:] == ["--served-model-name", "fake"]
        finally:
            process.terminate()
        assert process.wait(DEADLINE_S) == 0


def _lives(client: Client) -> bool:
    try:
        return client.health(LIVENESS)
    except Unavailable:
        return False


@pytest.mark.nightly
def test_the_demo_answers_shows_the_timeline_and_leaves_nothing():
    try:
        demo_folder(print)
    except ModelError as error:
        pytest.skip(f"no demo model here: {error}")
    command = [sys.executable, "-m", "splitserve", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        while not (children := psutil.Process(demo.pid).children()):
            assert demo.poll() is None
        said, around = demo.communicate(timeout=DEADLINE_S)
    assert (demo.returncode, "Traceback" in around) == (0, False)
    assert "Paris" in said
    assert re.search(r"^▒ decode +[\d.]+ +\d+% +decode-0", said, re.MULTILINE)
    assert re.search(r"^First token [\d.]+ s after", said, re.MULTILINE)
    assert_gone(children)
