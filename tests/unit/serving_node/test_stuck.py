"""A node whose engine stops stepping: found soon, not for a long prompt, and not back before the step has ended."""

import asyncio
import math
import signal
import subprocess
from functools import partial
from random import Random

import pytest

from protos import inference_pb2
from serving_core.node.costs import StepCosts, StepLoad
from serving_node import step_loop, watchdog
from serving_node.link import FleetLink, LinkSettings
from serving_node.ranks.leading import LOST_EXIT_CODE
from serving_node.watchdog import LEAST_S, MARGIN, UNKNOWN_S, StuckForGood, check_hope, why_stuck
from tests import forked
from tests.scripted_nodes import cluster, read_all
from tests.unit.serving_node.hanging_node import HANGS
from tests.unit.serving_node.runner_kit import answer_on_paper, running, told

CHUNK = 512
# Of a step, an answer, a token before it, the first chunk, a token of a prompt, a pair, several answers: a slow CPU.
TRUE = (0.004, 0.0015, 2e-6, 0.003, 0.004, 2e-6, 0.0)


def load_of(num_sequences, num_cached, *chunks):
    load = StepLoad(num_sequences, num_cached)
    for start, num_tokens in chunks:
        load.add_chunk(start, num_tokens)
    return load


def true_s(load):
    return sum(weight * figure for weight, figure in zip(TRUE, load.figures, strict=True))


def is_stuck(costs, load, step_age_s):
    return why_stuck(step_age_s, costs.expected_s(load)) is not None


def learnt(*loads):
    costs = StepCosts()
    for load in loads:
        costs.add(load, true_s(load))
    return costs


def test_a_short_step_is_found_stuck_within_5_s():
    random = Random(1)
    costs = learnt(*(load_of(n, n * random.randint(50, 500)) for n in (1, 2, 4, 8, 8, 8, 8)))
    load = load_of(8, 4000)
    assert not is_stuck(costs, load, LEAST_S)
    assert is_stuck(costs, load, 4.0)
    why = why_stuck(4.0, costs.expected_s(load))
    assert why == "one step has taken 4.0 s so far, and about 0.024 s were expected"


def test_no_chunk_of_a_long_prompt_counts_as_stuck_even_if_all_is_four_times_as_slow():
    """The first chunks take 2 s and the last ones 105 s, every one more than the one before."""
    costs, longest_s = learnt(load_of(1, 100)), 0.0
    for start in range(0, 100_000, CHUNK):
        load = load_of(0, 0, (start, CHUNK))
        longest_s = max(longest_s, true_s(load))
        assert not is_stuck(costs, load, 4 * true_s(load)), start
        costs.add(load, true_s(load))
    assert longest_s > 100
    assert is_stuck(costs, load_of(0, 0, (0, CHUNK)), 20.0)  # a short one is found all the same


@pytest.mark.parametrize(
    "load",
    [
        load_of(64, 64 * 500),
        load_of(2, 2 * 50_000),
        load_of(2, 200, (0, CHUNK)),
        load_of(0, 0, (90_000, 16)),
    ],
    ids=["many answers", "long answers", "a first prompt", "a long prompt that is cached"],
)
def test_of_a_step_like_none_before_nothing_is_known(load):
    costs = learnt(*(load_of(2, 200 + index) for index in range(50)))
    assert math.isinf(costs.expected_s(load))
    assert not is_stuck(costs, load, 1e6)


def test_before_the_first_step_nothing_is_known():
    assert math.isinf(StepCosts(start_tokens_per_s=500.0).expected_s(load_of(0, 0, (0, 1))))


@pytest.fixture
def short_pause(monkeypatch):
    """Shorten the pause of a node after a stuck step has ended; return its seconds."""
    monkeypatch.setattr(step_loop, "FIRST_PAUSE_S", 0.2)
    return 0.2


@pytest.fixture
def soon_stuck(monkeypatch):
    """Make steps count as stuck early, for tests that judge no step which goes on."""
    for module in (watchdog, step_loop):
        monkeypatch.setattr(module, "LEAST_S", 0.3)


async def test_a_node_knows_that_its_step_is_stuck_and_has_recovered_when_it_has_ended(
    tmp_path, soon_stuck, short_pause
):
    async with running(tmp_path) as node:
        prompt = list(range(10))
        for name in ("a", "b"):
            node.local(name, prompt)
            await node.idle()
        node.engine.is_open = False
        node.local("c", prompt)
        async with asyncio.timeout(60.0):
            assert (await node.node.stuck()).startswith("one step has taken ")
        node.node.detached()
        recovered = asyncio.create_task(node.node.recovered())
        await asyncio.sleep(2 * short_pause)
        assert not recovered.done()
        node.engine.open()
        async with asyncio.timeout(60.0):
            await recovered
        assert node.load.num_running == 0
        node.local("d", prompt)
        await node.idle()
        assert node.of("d") == told(answer_on_paper(prompt, 4))


@pytest.mark.parametrize(("expected_s", "stuck_from_s"), [(0.02, LEAST_S + MARGIN * 0.02), (math.inf, UNKNOWN_S)])
def test_a_stuck_step_is_hoped_for_for_a_while(expected_s, stuck_from_s):
    check_hope(stuck_from_s + 59.0, expected_s, 60.0)
    with pytest.raises(StuckForGood, match=r"has not ended in 6\d+ s, --stuck-exit-s \(60\) after it was stuck"):
        check_hope(stuck_from_s + 61.0, expected_s, 60.0)


async def test_a_node_that_never_recovers_gives_itself_up(tmp_path, soon_stuck):
    async with running(tmp_path, stuck_exit_s=0.2) as node:
        prompt = list(range(10))
        for name in ("a", "b", "c"):
            node.engine.is_open = name != "c"
            node.local(name, prompt)
            if name != "c":
                await node.idle()
        async with asyncio.timeout(60.0):
            await node.node.stuck()
            node.node.detached()
            with pytest.raises(StuckForGood):
                await node.node.recovered()
            node.engine.open()
            await node.idle()


async def test_a_node_without_a_step_is_well(tmp_path):
    async with running(tmp_path) as node:
        await node.node.recovered()
        stuck = asyncio.create_task(node.node.stuck())
        node.local("a", range(10))
        await node.idle()
        assert not stuck.done()
        stuck.cancel()


def start(c, folder, **flags):
    """The process of a node that never ends a step of a prompt which begins with HANGS."""
    flags = {"coordinator": f"127.0.0.1:{c.server.fleet_port}", "name": "b0", **flags}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return forked.popen("tests.unit.serving_node.hanging_node", str(folder), *words, stderr=subprocess.PIPE)


def hang(c):
    prompt = inference_pb2.TokenizedInput(input_ids=[HANGS, 1])
    return c.stub.Generate(inference_pb2.GenerateRequest(request_id="hanging", tokenized=prompt), timeout=400.0)


ASKED = {"temperature": 0, "ignore_eos": True, "max_tokens": 4, "timeout": 400.0}


@pytest.mark.nightly
async def test_the_process_of_a_node_that_is_stuck_for_good_ends_and_a_new_one_serves(tmp_path):
    """As `splitserve up` does, the test starts it again."""
    folder, settings = tmp_path / "coordinator", {"heartbeat_s": 0.2, "node_timeout_s": 3.0, "node_wait_s": 300.0}
    async with asyncio.timeout(800.0), cluster(folder, nodes=(), **settings) as c:
        node = start(c, folder, stuck_exit_s=0.5)
        try:
            await until_num_nodes(c, 1)
            for _ in range(2):
                await read_all(c.generate("hello", **ASKED))
            call = hang(c)
            _, words = await asyncio.to_thread(node.communicate)
            assert node.returncode == LOST_EXIT_CODE
            assert b"this node ends: one step has not ended in " in words
            call.cancel()
            node = start(c, folder, stuck_exit_s=0.5)
            assert (await read_all(c.generate("hello", **ASKED)))[1] == answer_on_paper(b"hello", 4)
        finally:
            node.kill()
            await asyncio.to_thread(node.communicate)


@pytest.mark.nightly
async def test_a_node_that_is_told_to_stop_ends_though_its_step_does_not(tmp_path):
    folder = tmp_path / "coordinator"
    async with asyncio.timeout(800.0), cluster(folder, nodes=(), heartbeat_s=0.2, node_timeout_s=300.0) as c:
        node = start(c, folder, drain_s=0.5)
        try:
            await until_num_nodes(c, 1)
            call = hang(c)
            while not (await c.stub.GetLoads(inference_pb2.GetLoadsRequest())).nodes[0].num_running:
                await asyncio.sleep(0.01)
            node.send_signal(signal.SIGTERM)
            _, words = await asyncio.to_thread(node.communicate)
            assert node.returncode == LOST_EXIT_CODE
            assert b"this node ends: its last step has not ended within " in words
            call.cancel()
        finally:
            node.kill()
            await asyncio.to_thread(node.wait)


def forward(link, event):
    kind = event.WhichOneof("event")
    link.send(**{kind: getattr(event, kind)})


async def until_num_nodes(c, number):
    """However long a node's process takes to start."""
    while len((await c.stub.GetLoads(inference_pb2.GetLoadsRequest())).nodes) != number:
        await asyncio.sleep(0.01)


async def test_a_stuck_node_leaves_the_fleet_until_its_step_has_ended_and_its_request_goes_on(tmp_path, short_pause):
    async with (
        asyncio.timeout(300.0),
        cluster(tmp_path / "coordinator", nodes=(), heartbeat_s=0.2, node_wait_s=60.0) as c,
        running(tmp_path, name="b0") as node,
    ):
        link = FleetLink(LinkSettings(coordinator=f"127.0.0.1:{c.server.fleet_port}", name="b0"))
        node.on_event = partial(forward, link)
        attached = asyncio.create_task(link.run(node.node))
        await until_num_nodes(c, 1)
        await c.admin.SetRole(inference_pb2.SetRoleRequest(node="b0", role="mixed"))
        ask = partial(c.generate, "hello", temperature=0, ignore_eos=True, max_tokens=4, timeout=100.0)
        for _ in range(2):
            await read_all(ask())
        node.engine.is_open = False
        call = ask()
        await until_num_nodes(c, 0)
        await asyncio.sleep(2 * short_pause)
        assert not (await c.stub.GetLoads(inference_pb2.GetLoadsRequest())).nodes
        node.engine.open()
        _, token_ids, [complete] = await read_all(call)
        assert token_ids == answer_on_paper(b"hello", 4)
        assert complete.timeline.num_restarts == 1
        link.stop()
        await attached
