"""Several hosts: coordinator and nodes with an address each, by the commands of the compose file, over real TCP.

The clients are none of the hosts. A link that is cut, slow or loses packets costs no token.
"""

import asyncio
import contextlib
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from splitserve import Client
from tests.faults.load import Habits
from tests.faults.play import Stage, play
from tests.faults.rows import SHORT_PROMPTS, Row
from tests.faults.scene import DEADLINE_S
from tests.network_hosts import LOSSY, SLOW, NoNetwork, network
from tests.system.cluster import HEARTBEAT_S, Child, Cluster
from tests.tiny_models import write_fake_model

pytestmark = pytest.mark.nightly

COMPOSE = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "docker-compose.yml").read_text())
VARIABLE = re.compile(r"\$\{(\w+):?([-?])([^}]*)\}")
API_KEY = "known-to-the-clients-alone"
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
START_DEADLINE_S = 400.0
SHORT_CUT_S = 1.0
WORSE_S = 4.0
# 8 kB of KV for each token: transfers are there to be hit.
KV_SHAPE = {"num_layers": 8, "num_kv_heads": 4, "head_dim": 32}
OF_NODES = {"SPLITSERVE_NUM_KV_BLOCKS": 2000, "SPLITSERVE_BLOCK_SIZE": 8, "SPLITSERVE_MAX_NUM_BATCHED_TOKENS": 64}
OF_COORDINATOR = {"SPLITSERVE_API_KEY": API_KEY, "SPLITSERVE_HEARTBEAT_S": HEARTBEAT_S}


def of_compose(name, model):
    """What the compose file starts the first service of this process's role with, on this model: the command, and its
    environment but for the files of secrets."""
    role = name.partition("-")[0]
    values = {"MODEL": str(model)}

    def filled(text):
        return VARIABLE.sub(lambda found: values.get(found[1], found[3]), text)

    services = [COMPOSE["services"][service] for service in sorted(COMPOSE["services"])]
    service = next(service for service in services if service.get("command", [""])[0] == role)
    settings = {key: filled(value) for key, value in service["environment"].items() if not key.endswith("_FILE")}
    return [filled(word) for word in service["command"]], settings


class HostsCluster(Cluster):
    """A cluster whose processes are on hosts of their own."""

    def __init__(self, model, folder, hosts):
        options = {"env": {"SPLITSERVE_API_KEY": API_KEY}, "start_deadline_s": START_DEADLINE_S}
        super().__init__(model, folder, num_prefill=2, num_decode=2, **options)
        self.hosts = hosts
        self.host, self.port, self.fleet_port = hosts.address("coordinator"), 50051, 50052

    def start_coordinator(self, *, env=None, **flags):
        return self._start("coordinator", "splitserve", flags, {**OF_COORDINATOR, **(env or {})})

    def start_node(self, name, *, env=None, **flags):
        return self._start(name, "splitserve", {"name": name, **flags}, {**OF_NODES, **(env or {})})

    def _spawn(self, name, module, model, flags, env):
        log = self.folder / f"{name}.log"
        secret = {"SPLITSERVE_FLEET_SECRET": self.env["SPLITSERVE_FLEET_SECRET"]}
        command, settings = of_compose(name, model)
        env = {**settings, **secret, **env}
        child = Child(name, module, *command, flags=flags, log=log, env=env, prefix=self.hosts.on(name))
        self._everyone.append(child)
        return child

    @contextlib.asynccontextmanager
    async def connect(self):
        """A stub that brings the clients' key."""
        async with super().connect() as stub:
            yield SimpleNamespace(Generate=partial(stub.Generate, metadata=self._metadata))


@pytest.fixture(scope="module")
def hosts():
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(network(("coordinator", *NODES)))
        except NoNetwork as error:
            pytest.skip(str(error))
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fake_model(tmp_path_factory.mktemp("model") / "fake", **KV_SHAPE, step_s=0.01, token_s=0.0005)


@pytest.fixture(scope="module")
def stage(hosts, model, tmp_path_factory):
    cluster = HostsCluster(model, tmp_path_factory.mktemp("hosts"), hosts).start()
    yield Stage(cluster)
    cluster.stop()


def answers(target, **client):
    """To prompts of several lengths, greedy and sampled."""
    with Client(target, **client) as asking:
        for length in (1, 40, 300):
            for temperature in (0.0, 1.0):
                prompt = [(7 * place + length) % 256 for place in range(length)]
                options = {"temperature": temperature, "seed": 11, "max_tokens": 30, "ignore_eos": True}
                chunks = list(asking.generate(prompt, **options))
                yield [token for chunk in chunks for token in chunk.token_ids], "".join(chunk.text for chunk in chunks)


def test_the_answers_are_those_of_one_machine(stage, start_cluster, model):
    alone = start_cluster(model)
    assert list(answers(stage.cluster.target, api_key=API_KEY)) == list(answers(alone.target))


def cut(name):
    """Nothing comes to a node, nor from it, until it is given up. Then it is back, and serves."""

    async def strike(scene):
        await scene.load.in_swing()
        with scene.cluster.hosts.cut(name):
            scene.strike()
            await scene.until_says("coordinator", f"{name} lost")
            await scene.until_answered()
        await scene.until_says("coordinator", f"{name} attached")
        num_steps = await steps_of(scene, name)
        async with asyncio.timeout(DEADLINE_S):
            while await steps_of(scene, name) == num_steps:
                await asyncio.sleep(HEARTBEAT_S)

    return strike


async def steps_of(scene, name):
    return (await asyncio.to_thread(scene.cluster.loads))[name].num_steps


def cut_for(name, seconds):
    """Whether the node is given up or not."""

    async def strike(scene):
        await scene.load.in_swing()
        scene.strike()
        with scene.cluster.hosts.cut(name):
            await asyncio.sleep(seconds)
        await scene.complete()

    return strike


def worse(names, shape, *, loses=False):
    async def strike(scene):
        hosts = scene.cluster.hosts
        with contextlib.ExitStack() as links:
            for name in names:
                links.enter_context(hosts.shaped(name, shape))
            scene.strike()
            await scene.load.in_swing()
            await asyncio.sleep(WORSE_S)
            await scene.until_answered()
            if loses:
                await scene.until(lambda: all(map(hosts.num_dropped, names)), "packets are lost")

    return strike


ROWS = (
    Row("H1", "a decode node's link is cut, and mended", cut("decode-0"), sign="decode-0 lost", must_retry=True),
    Row("H2", "a prefill node's link is cut, and mended", cut("prefill-0"), sign="prefill-0 lost"),
    Row("H3", "a decode node's link is cut for a second", cut_for("decode-1", SHORT_CUT_S)),
    Row("H4", "the decode nodes' links are slow", worse(("decode-0", "decode-1"), SLOW), habits=SHORT_PROMPTS),
    Row("H5", "all nodes' links lose packets", worse(NODES, LOSSY, loses=True), habits=Habits(num_clients=6)),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number} {row.fault}")
async def test_no_network_costs_a_token(row, stage):
    try:
        report = await play(row, stage)
    except Exception as error:
        error.add_note(stage.cluster.logs())
        raise
    troubles = report.troubles(row)
    assert not troubles, "\n".join([*troubles, stage.cluster.logs()])
