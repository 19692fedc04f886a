"""Prefix reuse through the coordinator's servers, over real gRPC, with nodes that the test speaks for."""

import logging

import grpc
import pytest

from coordinator.control.journal import Journal
from coordinator.control.ledger import Ledger
from coordinator.control.metrics import Metrics
from coordinator.control.registry import Registry
from coordinator.control.roles import FIXED, Roles
from coordinator.control.tracker import Tracker
from coordinator.dispatcher import Dispatcher
from tests import fleet_events as events
from tests.scripted_nodes import begin, cluster, hand_over, read_all, refusal_of, run, step

TEXT = "x" * 40  # one token for each byte: two full blocks of 16 and eight tokens
NODES = ("p0", "p1", "d0", "d1")


def hints(cache_salt=""):
    return events.block_hints([*TEXT.encode()], cache_salt)


async def goes_to(c, prefill, decode, **question):
    """Asks, sees that these nodes get the request, and takes it back. Returns the job."""
    call = c.generate(TEXT, max_tokens=5, **question)
    job = (await c.nodes[decode].command("reserve")).job
    assert (await c.nodes[prefill].command("prefill")).job == job
    call.cancel()
    for name in (prefill, decode):
        await c.nodes[name].answer_cancel(job.attempt)
    await c.until_nothing_is_live()
    return job


def test_a_request_follows_what_nodes_say_they_hold(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=NODES) as c:
            await goes_to(c, "p0", "d0")
            await c.report_blocks("p1", hints())
            await c.report_blocks("d1", hints()[:1])
            await goes_to(c, "p1", "d1")
            await c.report_blocks("d1", removed=hints())
            await goes_to(c, "p1", "d0")
            await c.attach("p1", session=c.nodes["p1"].session)  # a new attachment holds nothing until it says so
            await goes_to(c, "p0", "d0")

    run(scenario())


def test_a_salt_finds_its_own_blocks_alone(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=NODES) as c:
            await c.report_blocks("p1", hints("tenant"))
            assert (await goes_to(c, "p0", "d0")).cache_salt == ""
            assert (await goes_to(c, "p1", "d0", cache_salt="tenant")).cache_salt == "tenant"
            await goes_to(c, "p0", "d0", cache_salt="tenant2")

    run(scenario())


def test_all_answers_of_a_call_have_its_salt(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            await c.report_blocks("p0", hints("tenant"))
            call = c.generate(TEXT, n=2, max_tokens=5, cache_salt="tenant")
            jobs = [(await begin(c))[1] for _ in range(2)]
            assert [job.cache_salt for job in jobs] == ["tenant"] * 2
            call.cancel()

    run(scenario())


def test_a_long_salt_is_refused_by_name(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            code, info, details = await refusal_of(c.generate(cache_salt="x" * 257))
            assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_PARAM")
            assert (info.metadata["field"], details) == (
                "cache_salt", "cache_salt has 257 characters, the limit is 256",
            )  # fmt: skip

    run(scenario())


def test_the_end_of_an_answer_tells_what_was_reused(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate(TEXT, max_tokens=2)
            attempt, _ = await begin(c)
            await hand_over(c, attempt, num_cached_tokens=32, num_bytes=800, num_bytes_saved=3200)
            await step(c.nodes["d0"], attempt, 1, "b", events.LENGTH)
            _, _, [complete] = await read_all(call)
            assert (complete.prompt_tokens, complete.cached_tokens) == (40, 32)
            assert (complete.kv_bytes, complete.kv_bytes_saved) == (800, 3200)

    run(scenario())


def test_a_node_that_claims_too_many_blocks_stays_and_is_reported(tmp_path, caplog):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0")) as c:
            await c.report_blocks("p0", range(103))
            await goes_to(c, "p0", "d0")

    run(scenario())
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING and "blocks" in record.message]
    assert record.message == "prefill node p0 says that it holds 103 blocks and has 100: 3 are left out"


@pytest.mark.parametrize("how", ["detached", "replaced"])
def test_what_a_lost_node_still_says_is_ignored(how):
    registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
    ledger, metrics = Ledger(), Metrics()
    limits = {"max_live": 1, "max_restarts": 0, "keep_after_s": 1.0}
    tracker = Tracker(registry, ledger, metrics, first_epoch=0, **limits)
    roles = Roles(registry, ledger, policy=FIXED)
    dispatcher = Dispatcher(registry, tracker, roles, Journal(metrics))
    link = dispatcher.attach(events.hello("p0", "prefill").hello)
    if how == "detached":
        dispatcher.detach(link)
    else:
        dispatcher.attach(events.hello("p0", "prefill", session=link.node.session).hello)
    dispatcher.receive(link, events.cache_changed(hints()))
    dispatcher.receive(link, events.heartbeat("draining"))
    assert link.node.hints == set()
    assert [(node.hints, node.is_ready) for node in registry.nodes] == ([] if how == "detached" else [(set(), True)])
