"""`splitserve up --ray`, as docs/guides/ray.md has it, on a real Ray cluster whose hosts are logical ones here.

A host that is removed, an actor that is killed, a rank that is killed and an `up` that is killed: streams go on where
there is someone to go on with them, what was lost is back, and no process is left.
"""

import asyncio
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from splitserve import AsyncClient
from tests.system.cluster import free_port
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model
from tests.unit.splitserve.test_launcher import AS_COMMAND, Up, assert_gone

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (the extra `ray`)"),
]

ROOT = Path(__file__).parents[2]
[COMMAND] = re.findall(
    r"^splitserve up MODEL --ray (.*)$", (ROOT / "docs" / "guides" / "ray.md").read_text(), re.MULTILINE
)
NODES = ("prefill-0", "decode-0", "decode-1")
NUM_RANKS = {"prefill-0": 1, "decode-0": 2, "decode-1": 2}
NUM_HOSTS, CPUS_OF_EACH = 3, 3  # two of them have room for all five ranks
START_DEADLINE_S = 240.0
DEADLINE_S = 240.0
NUM_TOKENS = 300


class RayHosts:
    """A Ray cluster as a process, with those below it. It runs in a folder that has a module with a name of ours."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.ray_hosts", str(NUM_HOSTS), str(CPUS_OF_EACH)]
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": self._folder.name}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        Path(self._folder.name, "engine.py").write_text("raise SystemExit('the module of the user was imported')")
        self.process = subprocess.Popen(
            command, cwd=self._folder.name, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        told = json.loads(self.process.stdout.readline())
        self.address, self.raylets = told["address"], told["raylets"]

    def remove(self, raylet: int) -> None:
        self.process.stdin.write(f"{raylet}\n")
        self.process.stdin.flush()

    def ranks(self, name: str) -> list[psutil.Process]:
        """The processes of a node that run on the hosts."""
        return [process for process in self._all() if f"--name {name}" in _words_of(process)]

    def actors(self) -> list[psutil.Process]:
        return [process for process in self._all() if "RankActor" in _words_of(process)]

    def host_of(self, rank: psutil.Process) -> int:
        [raylet] = [above.pid for above in rank.parents() if above.pid in self.raylets]
        return raylet

    def _all(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(DEADLINE_S) == 0
        self._folder.cleanup()


def _words_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


@pytest.fixture(scope="module")
def ray_hosts():
    hosts = RayHosts()
    yield hosts
    hosts.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fake_model(tmp_path_factory.mktemp("model") / "fake", step_s=0.02)


@pytest.fixture
def up(ray_hosts, model, tmp_path):
    """`splitserve up` as docs/guides/ray.md has it, ready."""
    flags = ["--ray", ray_hosts.address, *shlex.split(COMMAND, comments=True), "--log-dir", "logs"]
    # One node reads, and a busy machine takes its time to start it again, to notice what is gone, to hear of the nodes.
    flags += ["--node-wait-s", "240", "--max-restarts", "10", "--node-timeout-s", "15"]
    cluster = Up(model, *flags, port=free_port(), cwd=tmp_path, program=AS_COMMAND)
    try:
        cluster.read_until("Ready")
        yield cluster
    finally:
        if cluster.process.poll() is None:
            cluster.process.kill()
        cluster.process.wait(DEADLINE_S)
        cluster.process.stderr.close()


async def answer(client, prompt):
    options = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return [token async for chunk in client.generate(prompt, **options) for token in chunk.token_ids]


async def until_complete(ray_hosts, client, gone):
    """Until all nodes are attached, by other processes than these."""
    async with asyncio.timeout(START_DEADLINE_S):
        while True:
            ranks = {name: {rank.pid for rank in ray_hosts.ranks(name)} for name in NODES}
            are_back = all(len(ranks[name]) == NUM_RANKS[name] for name in NODES)
            attached = {load.name for load in (await client.loads()).nodes if load.state == "ready"}
            if are_back and attached == set(NODES) and not gone & set().union(*ranks.values()):
                return
            await asyncio.sleep(0.2)


async def struck(ray_hosts, client, strike):
    """Streams that run while something strikes are right; gives the ranks that are gone."""
    before = [rank for name in NODES for rank in ray_hosts.ranks(name)]
    prompts = [[number, 2, 3] for number in range(4)]
    streams = [asyncio.create_task(answer(client, prompt)) for prompt in prompts]
    async with asyncio.timeout(DEADLINE_S):
        while sum(load.num_running for load in (await client.loads()).nodes) < len(prompts):
            await asyncio.sleep(0.05)
    gone = strike()
    assert await asyncio.gather(*streams) == [fake_answer(prompt, NUM_TOKENS) for prompt in prompts]
    await asyncio.to_thread(assert_gone, gone)
    await until_complete(ray_hosts, client, {rank.pid for rank in gone})
    return before


async def test_nothing_that_is_lost_costs_a_token(ray_hosts, up, tmp_path):
    def kill_rank():
        """The second of two, and the first goes with it."""
        ranks = ray_hosts.ranks("decode-0")
        max(ranks, key=lambda rank: rank.pid).kill()
        return ranks

    def kill_actor():
        """That of the one rank, which goes with it."""
        [rank] = ray_hosts.ranks("prefill-0")
        actor = rank.parent()
        actor.kill()
        return [actor, rank]

    def remove_host():
        """And all that was on it."""
        removed = ray_hosts.host_of(ray_hosts.ranks("decode-1")[0])
        gone = psutil.Process(removed).children(recursive=True)
        ray_hosts.remove(removed)
        return gone

    async with AsyncClient(up.target) as client:
        await until_complete(ray_hosts, client, set())
        assert_placed(ray_hosts)
        for strike in (kill_rank, kill_actor, remove_host):
            await struck(ray_hosts, client, strike)
    left = [*ray_hosts.actors(), *(rank for name in NODES for rank in ray_hosts.ranks(name)), *up.children().values()]
    assert len(left) == 2 * sum(NUM_RANKS.values()) + 1
    up.process.send_signal(signal.SIGINT)
    assert (up.end(), up.said.splitlines()[-1]) == (130, "Stopped.")
    assert "Traceback" not in up.said
    for name, times in (("prefill-0", 2), ("decode-0", 2), ("decode-1", 2)):  # each of them was lost, at least once
        assert len(re.findall(rf"^{name} starts on [\d.]+, where its log is$", up.said, re.MULTILINE)) >= times
    assert up.log_dir == tmp_path / "logs"
    assert {log.stem for log in up.log_dir.iterdir()} == {"coordinator", *NODES}, "though Ray runs elsewhere"
    assert_gone(left)


def assert_placed(ray_hosts):
    """The ranks of a node on one host, the nodes on several, and no secret where others can read it."""
    hosts = [{ray_hosts.host_of(rank) for rank in ray_hosts.ranks(name)} for name in NODES]
    assert [len(of_node) for of_node in hosts] == [1, 1, 1]
    assert len(set().union(*hosts)) == NUM_HOSTS
    for rank in (rank for name in NODES for rank in ray_hosts.ranks(name)):
        assert rank.environ()["SPLITSERVE_FLEET_SECRET"] not in " ".join(rank.cmdline())


def test_nothing_is_left_of_an_up_that_is_killed(ray_hosts, up):
    left = [*ray_hosts.actors(), *(rank for name in NODES for rank in ray_hosts.ranks(name)), *up.children().values()]
    assert len(left) == 2 * sum(NUM_RANKS.values()) + 1
    up.process.kill()
    assert_gone(left)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--ray", "SmolLM2"), "--ray takes HOST:PORT, or nothing, not 'SmolLM2': give MODEL before it"),
        (("--ray", "ADDRESS", "--ray-cpus", "99", "--start-timeout-s", "1"), "Ray's hosts have no room for"),
    ],
)
def test_what_cannot_be_ends_with_a_sentence(ray_hosts, model, flags, sentence):
    given = [ray_hosts.address if word == "ADDRESS" else word for word in flags]
    ports = ["--grpc-port", str(free_port()), "--http-port", "-1"]
    command = [sys.executable, "-m", "splitserve", "up", str(model), *ports, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
