"""Requests at which nodes die: they get no third one, and those that were only beside them do."""

import grpc
import pytest

from coordinator.control.nodes import Pauses
from coordinator.control.request import NUM_TOKENS_FURTHER
from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, cluster, read_all, refusal_of, run, step, transfer
from tests.unit.coordinator.scheduler_kit import World

TWICE = "nodes were lost or failed 2 times in a row while they computed the request, and it is not tried again: "


@pytest.fixture
def world():
    return World(("p0", "p1", "p2", "d0", "d1", "d2"), max_restarts=5)


def die(world, name, now=0.0):
    return world.lose(name, now, has_died=True)


def take(world, job=None):
    """The node that reads says that it has the prompt, which it was asked to."""
    job = job or world.jobs[-1]
    assert job.is_suspect
    world.tell(prefill_node(world), events.taken(job.attempt))


def prefill_node(world):
    """The node that reads the prompt of the last attempt."""
    return world.prefill_node


def decode_node(world):
    return next(name for name in ("d0", "d1", "d2") if world.account(name)[2])


def write(world, num_tokens, first=0):
    """So many tokens from this one on: the first of the node that reads, the others of the one that writes."""
    attempt, name = world.attempt, decode_node(world)
    world.tell(prefill_node(world), events.first_token(events.sampled(attempt, first, 1)))
    world.tell(prefill_node(world), events.transferred(attempt))
    for index in range(first + 1, first + num_tokens):
        world.tell(name, events.step_tokens(events.sampled(attempt, index, 1)))


def test_a_prompt_that_kills_its_prefill_nodes_gets_no_third_one(world):
    world.submit()
    assert not world.jobs[-1].is_suspect
    assert die(world, prefill_node(world))[-1].startswith("prefill")
    take(world)
    ended = die(world, prefill_node(world))
    assert ended == ["cancel d0", "end ENGINE_ERROR"]
    assert str(world.outcome) == TWICE + "the prefill node was lost"
    assert world.outcome.metadata == {"phase": "prefill_queue", "tokens_emitted": "0"}


@pytest.mark.parametrize("num_more", [1, NUM_TOKENS_FURTHER])
def test_a_token_that_kills_its_decode_nodes_gets_no_third_one(world, num_more):
    """What the node had written before it died may not have been heard of: then the next one comes a little further."""
    world.submit(max_tokens=100)
    write(world, 20)
    assert die(world, decode_node(world))[-1].startswith("prefill")
    write(world, num_more, first=20)
    assert die(world, decode_node(world))[-1] == "end ENGINE_ERROR"
    assert world.outcome.metadata["tokens_emitted"] == str(20 + num_more)


def test_an_answer_that_has_come_further_is_not_to_blame(world):
    world.submit(max_tokens=100)
    write(world, 20)
    die(world, decode_node(world))
    write(world, NUM_TOKENS_FURTHER + 1, first=20)
    assert die(world, decode_node(world))[-1].startswith("prefill")
    assert world.outcome is None


def test_prompts_that_were_not_yet_read_are_not_to_blame():
    """A step takes 512 tokens: those of the second prompt, beside the last ones of the first, and not the third."""
    world = World(("p0", "d0"), max_restarts=5)
    for name in ("a/0", "b/0", "c/0"):
        world.submit(name, list(range(600)))
    world.attach("p1")
    assert die(world, "p0").count("prefill p1") == 3
    world.attach("p2")
    for job in world.jobs[-6::2]:  # of each request, one for the prefill node and one for the decode node
        if job.is_suspect:
            take(world, job)
    told = die(world, "p1")
    assert (told.count("end ENGINE_ERROR"), told.count("prefill p2")) == (2, 1)
    assert world.jobs[-1].attempt.request_id == "c/0"


def test_a_prompt_is_not_to_blame_for_a_node_that_it_never_reached(world):
    """Nodes that die together: the second one was gone when the prompt was sent to it."""
    world.submit()
    assert die(world, prefill_node(world))[-1].startswith("prefill")
    assert die(world, prefill_node(world))[-1].startswith("prefill")
    assert world.outcome is None
    take(world)
    assert die(world, prefill_node(world))[-1] == "end ENGINE_ERROR"


def test_nodes_that_do_not_compute_it_do_not_count(world):
    world.submit()
    assert die(world, "d0")[-1].startswith("prefill")  # waits for the KV
    assert die(world, "d1")[-1].startswith("prefill")
    write(world, 1)
    assert die(world, prefill_node(world)) == []  # has handed it over
    assert world.outcome is None


@pytest.mark.parametrize("why", ["lost otherwise", "after a pause of the coordinator"])
def test_what_is_no_death_does_not_count(world, why):
    if why != "lost otherwise":
        world.registry.pauses = Pauses(1.5, 1.5)
        world.registry.pauses.note(0.0)
    world.submit()
    for _ in range(2):
        has_died = why != "lost otherwise"
        assert world.lose(prefill_node(world), 12.0, has_died=has_died)[-1].startswith("prefill")
    assert world.outcome is None


def test_a_node_that_attaches_again_has_not_died(world):
    world.submit()
    lives = world.registry.find(prefill_node(world)).session
    die(world, prefill_node(world))
    take(world)
    world.scheduler.attached_again(lives)
    assert die(world, prefill_node(world))[-1].startswith("prefill")
    take(world)
    assert die(world, prefill_node(world))[-1] == "end ENGINE_ERROR"


def test_a_node_that_attaches_again_has_failed_all_the_same(world):
    world.submit()
    failed = prefill_node(world)
    world.tell(failed, events.failed(world.attempt, "STEP_FAILED"))
    take(world)
    lives = world.registry.find(failed).session
    die(world, failed)
    world.scheduler.attached_again(lives)
    assert die(world, prefill_node(world))[-1] == "end ENGINE_ERROR"
    assert str(world.outcome) == TWICE + "what happened; the prefill node was lost"


def test_after_the_end_nothing_is_held(world):
    world.submit()
    attempts = [world.attempt]
    die(world, prefill_node(world))
    attempts.append(world.attempt)
    take(world)
    die(world, prefill_node(world))
    for attempt in attempts:
        world.tell("d0", events.cancelled(attempt))
    assert world.scheduler.num_open == 0


@pytest.mark.parametrize("is_stopping", [False, True])
def test_the_client_hears_of_it_as_no_status_to_try_again_at(tmp_path, is_stopping):
    """A stream that ends is a death, unless its node has said that it stops."""

    async def scenario():
        names = ("d0", "d1", "d2") if is_stopping else ("d0", "d1")
        async with cluster(tmp_path, nodes=("p0", "d0", "d1", "d2"), max_restarts=2) as c:
            call = c.generate(max_tokens=50)
            for index, name in enumerate(names):
                job = (await c.nodes[name].command("reserve")).job
                assert (await c.nodes["p0"].command("prefill")).job == job
                await transfer_to(c, name, job.attempt, index)
                if is_stopping:
                    await say_it_stops(c, name)
                await c.nodes[name].close()
            code, info, message = await refusal_of(call)
            assert info.metadata["tokens_emitted"] == str(len(names))
            if is_stopping:
                assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_DECODE_WORKER")
            else:
                assert (code, info.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
                assert message == TWICE + "the decode node was lost"

    run(scenario())


def test_streams_that_break_kill_nobody(tmp_path):
    """The one node, whose process shows each time which one it was."""

    async def scenario():
        async with cluster(tmp_path, nodes=("b0",), max_restarts=5, node_wait_s=DEADLINE_S) as c:
            call = c.generate(max_tokens=2)
            for _ in range(3):
                assert not (await c.nodes["b0"].command("reserve")).job.is_suspect
                session = c.nodes["b0"].session
                await c.nodes["b0"].close()
                await c.attach("b0", session=session)
            attempt = (await c.nodes["b0"].command("reserve")).job.attempt
            await c.nodes["b0"].send(events.first_token(events.sampled(attempt, 0, ord("a"))))
            await step(c.nodes["b0"], attempt, 1, "b", events.LENGTH)
            assert (await read_all(call))[0] == "ab"

    run(scenario())


async def transfer_to(c, name, attempt, index):
    """One token, and the answer is the node's; returns when the coordinator has heard so."""
    c.nodes["d0"], kept = c.nodes[name], c.nodes["d0"]
    await transfer(c, attempt, index=index)
    c.nodes["d0"] = kept
    await c.report_blocks("p0")
    await c.report_blocks(name)


async def say_it_stops(c, name):
    await c.nodes[name].send(events.heartbeat("draining"))
    await c.until_loads(lambda loads: any(load.name == name and load.state != "ready" for load in loads.nodes))
