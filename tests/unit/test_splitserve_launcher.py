"""`splitserve up` with real nodes that serve the fake model: what it says, and what it leaves behind."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import psutil
import pytest

from engine.errors import ModelError
from splitserve import Client
from splitserve.client import LIVENESS
from splitserve.errors import Unavailable
from splitserve.launcher import free_port
from splitserve.models import demo_folder
from tests.tiny_models import write_fake_model

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fake_model(tmp_path_factory.mktemp("model") / "fake")


class Up:
    """A running `splitserve up`."""

    def __init__(self, model: Path, log_dir: Path, *flags: str, port: int) -> None:
        self.target = f"127.0.0.1:{port}"
        self.log_dir = log_dir
        self.said = ""
        ports = ["--grpc-port", str(port), "--http-port", "0"]
        command = [sys.executable, "-m", "splitserve", "up", str(model), *ports]
        self.process = subprocess.Popen(
            [*command, "--log-dir", str(log_dir), *flags], stderr=subprocess.PIPE, text=True, bufsize=1
        )

    def read_until(self, text: str) -> None:
        while text not in self.said:
            line = self.process.stderr.readline()
            assert line, f"{text!r} never came after: {self.said}"
            self.said += line

    def end(self) -> int:
        """The exit code, once it ends."""
        self.said += self.process.stderr.read()
        return self.process.wait(DEADLINE_S)

    def children(self) -> dict[str, psutil.Process]:
        """By their names in the fleet."""
        return {_name(child): child for child in psutil.Process(self.process.pid).children()}


def _name(child: psutil.Process) -> str:
    return re.sub(r"^.* --name (\S+).*$|^.* -m (coordinator) .*$", r"\1\2", " ".join(child.cmdline()))


@pytest.fixture
def up(model, tmp_path):
    """Starts clusters; at the end kills what the test has left."""
    started: list[Up] = []

    def start(*flags: str, model: Path = model, port: int | None = None) -> Up:
        started.append(Up(model, tmp_path / "logs", *flags, port=port or free_port()))
        return started[-1]

    yield start
    for cluster in started:
        for process in (
            [*psutil.Process(cluster.process.pid).children(), cluster.process] if is_running(cluster) else []
        ):
            process.kill()
        cluster.process.wait()
        cluster.process.stderr.close()


def is_running(cluster: Up) -> bool:
    return cluster.process.poll() is None


def assert_gone(processes) -> None:
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert not alive


def test_a_cluster_serves_survives_a_node_and_stops_cleanly(up):
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
        assert chunks[-1].completion.timeline.decode_node == "decode-0"
    cluster.process.send_signal(signal.SIGINT)
    assert (cluster.end(), cluster.said.splitlines()[-1]) == (0, "Stopped.")
    assert_gone(children.values())
    assert sorted(log.name for log in cluster.log_dir.iterdir()) == [f"{name}.log" for name in sorted(children)]
    assert "2 nodes go on" in cluster.said
    assert "Traceback" not in cluster.said


@pytest.mark.parametrize("lost", ["coordinator", "prefill-0"])
def test_without_coordinator_or_role_everything_stops(up, lost):
    cluster = up()
    cluster.read_until("Ready")
    children = cluster.children()
    children[lost].kill()
    assert cluster.end() == 1
    *_, last = cluster.said.splitlines()
    assert last.startswith(f"Error: {lost} was killed by SIGKILL")
    assert f"no {lost.removesuffix('-0')} is left" in last
    assert_gone(children.values())


def test_decode_nodes_that_may_compute_prompts_go_on_without_prefill_nodes(up):
    cluster = up("--local-prefill", "auto")
    cluster.read_until("Ready")
    children = cluster.children()
    children["prefill-0"].kill()
    cluster.read_until("1 nodes go on")
    with Client(cluster.target) as client:
        [*_, last] = client.generate([1, 2, 3], max_tokens=5, ignore_eos=True)
        assert (last.completion.completion_tokens, last.completion.timeline.prefill_node) == (5, "decode-0")
    children["decode-0"].kill()
    assert cluster.end() == 1
    assert "no decode is left" in cluster.said.splitlines()[-1]
    assert_gone(children.values())


def test_a_cluster_without_prefill_nodes_serves(up):
    cluster = up("--prefill", "0", "--decode", "2")
    cluster.read_until("Ready")
    assert "0 prefill, 2 decode" in cluster.said
    assert set(cluster.children()) == {"coordinator", "decode-0", "decode-1"}
    with Client(cluster.target) as client:
        [*_, last] = client.generate([1, 2, 3], max_tokens=5, ignore_eos=True)
    assert last.completion.completion_tokens == 5
    cluster.process.send_signal(signal.SIGINT)
    assert (cluster.end(), cluster.said.splitlines()[-1]) == (0, "Stopped.")


def test_prompts_that_nobody_may_compute_are_one_sentence(up):
    cluster = up("--prefill", "0", "--local-prefill", "never")
    assert cluster.end() == 2
    assert cluster.said.splitlines()[-1].startswith("Error: without prefill nodes (--prefill 0)")
    assert not cluster.log_dir.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_nothing_is_left_when_up_itself_is_killed(up):
    cluster = up()
    cluster.read_until("Ready")
    children = cluster.children()
    cluster.process.kill()
    assert_gone(children.values())


def test_sigterm_while_starting_leaves_nothing(up):
    cluster = up()
    cluster.read_until("Loading")
    children = cluster.children()
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.end() == 0
    assert_gone(children.values())


def test_a_port_in_use_is_one_sentence(up):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = up(port=port)
        assert cluster.end() == 1
    *_, last = cluster.said.splitlines()
    assert last.startswith("Error: coordinator ended with exit code 2")
    assert str(port) in last
    assert "Traceback" not in cluster.said


def test_a_broken_model_is_one_sentence(up, tmp_path):
    (tmp_path / "empty").mkdir()
    cluster = up(model=tmp_path / "empty")
    assert cluster.end() == 1
    *_, last = cluster.said.splitlines()
    assert last.startswith("Error: ")
    assert "config.json" in last
    assert "Traceback" not in cluster.said


def test_a_role_becomes_the_process_of_its_room(model):
    port, fleet_port = free_port(), free_port()
    command = [
        sys.executable,
        "-m",
        "splitserve",
        "coordinator",
        str(model),
        f"--port={port}",
        f"--fleet-port={fleet_port}",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            with Client(f"127.0.0.1:{port}") as client:
                while not _lives(client):
                    assert process.poll() is None
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
