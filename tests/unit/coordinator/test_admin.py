"""What an operator may ask, and drain, over real gRPC, with nodes that the test speaks for."""

import asyncio

import grpc
import pytest

from coordinator.control import roles
from protos import fleet_pb2, inference_pb2, inference_pb2_grpc
from tests import fleet_events as events
from tests.scripted_nodes import (
    DEADLINE_S,
    begin,
    begin_to_write,
    cluster,
    health_changes,
    read_all,
    read_to_end,
    refusal_of,
    run,
    step,
)


def set_role(c, node, role=None, shape=None):
    return c.admin.SetRole(inference_pb2.SetRoleRequest(node=node, role=role, shape=shape), timeout=DEADLINE_S)


def test_a_role_is_set_when_the_node_has_confirmed_it(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0")) as c:
            call = set_role(c, "d0", role="mixed")
            shape = events.shape(512, 64, accepts_transfers=True)
            assert (await c.nodes["d0"].command("reshape")).shape == shape
            await c.nodes["d0"].send(events.heartbeat())  # that was under way
            await c.until_loads(lambda loads: loads.nodes[0].role == "decode")
            assert not call.done()
            await c.nodes["d0"].send(events.heartbeat(shape=shape, num_steps=7))
            node = (await call).node
            assert (node.name, node.role, node.shape, node.num_steps) == ("d0", "mixed", shape, 7)
            [load, _] = (await c.stub.GetLoads(inference_pb2.GetLoadsRequest())).nodes
            assert (load.role, load.shape) == ("mixed", shape)
            [info, _] = (await c.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())).nodes
            assert info.role == "decode"  # what it has begun as

    run(scenario())


def test_readiness_follows_the_shapes(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("d0",)) as c:
            following = await health_changes(c)
            await following("NOT_SERVING")
            for shape, status in (
                (events.shape(512, 64, accepts_transfers=True), "SERVING"),
                (events.shape(0, 64, accepts_transfers=True), "NOT_SERVING"),
            ):
                await c.nodes["d0"].send(events.heartbeat(shape=shape))
                await following(status)

    run(scenario())


SHAPES = {"over": events.shape(513, 0, accepts_transfers=False), "none": events.shape(0, 0, accepts_transfers=False)}


IMPOSSIBLE_ROLES = [
    ("d7", {"role": "mixed"}, "NOT_FOUND", "NODE_NOT_FOUND", "no node 'd7' is attached"),
    ("", {"role": "mixed"}, "NOT_FOUND", "NODE_NOT_FOUND", "no node '' is attached"),
    ("d0", {}, "INVALID_ARGUMENT", "BAD_PARAM", "role or shape must be set"),
    ("d0", {"role": "x"}, "INVALID_ARGUMENT", "BAD_PARAM", "a role is prefill, decode or mixed, not 'x'"),
    (
        "d0",
        {"shape": SHAPES["over"]},
        "INVALID_ARGUMENT",
        "BAD_PARAM",
        "prompt_tokens of a shape is 513, the node's max_num_batched_tokens is 512",
    ),
    (
        "d0",
        {"shape": SHAPES["none"]},
        "INVALID_ARGUMENT",
        "BAD_PARAM",
        "a shape needs prompt_tokens or slots above 0: a node that does neither does nothing",
    ),
    (
        "p0",
        {"role": "decode"},
        "FAILED_PRECONDITION",
        "NO_OTHER_NODE",
        "node p0 is the last one that prefills prompts",
    ),
    (
        "d0",
        {"role": "prefill"},
        "FAILED_PRECONDITION",
        "NO_OTHER_NODE",
        "node d0 is the last one that decodes sequences",
    ),
]


def test_what_cannot_be_is_refused_with_one_sentence(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0")) as c:
            for node, to, code, reason, message in IMPOSSIBLE_ROLES:
                got, info, details = await refusal_of(set_role(c, node, **to))
                assert (got.name, info.reason, details) == (code, reason, message)

    run(scenario())


@pytest.mark.parametrize("how", ["silent", "lost"])
def test_a_node_that_does_not_confirm_ends_the_call(tmp_path, monkeypatch, how):
    if how == "silent":
        monkeypatch.setattr(roles, "CONFIRM_S", 0.1)

    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0")) as c:
            call = set_role(c, "d0", role="mixed")
            await c.nodes["d0"].command("reshape")
            if how == "lost":
                await c.nodes["d0"].hang_up()
            code, _, details = await refusal_of(call)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert details == "node d0 has not confirmed its new shape within 10 s, has refused it or was lost"

    run(scenario())


def test_a_node_that_refuses_a_shape_ends_the_call_and_has_its_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(roles, "CONFIRM_S", 1e9)

    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0")) as c:
            call = set_role(c, "d0", role="mixed")
            await c.nodes["d0"].command("reshape")
            await c.nodes["d0"].send(events.failed(fleet_pb2.Attempt(), "BAD_PARAM", "slots of a shape is 64"))
            assert (await refusal_of(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED

    run(scenario())
    [line] = [record for record in caplog.records if "slots of a shape" in record.getMessage()]
    assert line.getMessage() == "decode node d0 refuses a shape: slots of a shape is 64"
    assert "coordinator.control.request_log" not in {record.name for record in caplog.records}


def test_changes_that_are_asked_for_at_once_are_made_one_after_the_other(tmp_path):
    """Each alone could be made; both would leave nobody to read."""

    async def scenario():
        async with cluster(tmp_path, nodes=("b0", "b1")) as c:
            calls = [set_role(c, name, role="decode") for name in ("b0", "b1")]
            shape = events.shape(0, 64, accepts_transfers=True)
            refused = [asyncio.ensure_future(refusal_of(call)) for call in calls]
            reshaped = [asyncio.ensure_future(c.nodes[name].command("reshape")) for name in ("b0", "b1")]
            done, pending = await asyncio.wait(reshaped, return_when=asyncio.FIRST_COMPLETED)
            [first] = [index for index, task in enumerate(reshaped) if task in done]
            await c.nodes[f"b{first}"].send(events.heartbeat(shape=shape))
            assert (await calls[first]).node.role == "decode"
            assert (await refused[1 - first])[1].reason == "NO_OTHER_NODE"
            refused[first].cancel()
            [waiting] = pending
            waiting.cancel()

    run(scenario())


def test_an_operator_brings_the_clients_key(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0"), api_key="k") as c:
            stub = inference_pb2_grpc.AdminStub(c.channel)
            request = inference_pb2.SetRoleRequest(node="d0", role="decode")
            code, info, _ = await refusal_of(stub.SetRole(request, timeout=DEADLINE_S))
            assert (code, info.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
            metadata = (("authorization", "Bearer k"),)
            assert (await stub.SetRole(request, metadata=metadata, timeout=DEADLINE_S)).node.role == "decode"

    run(scenario())


# ---- drain ----

TEXT = "abcdefghijkl"


def drain(c, node):
    stub = inference_pb2_grpc.AdminStub(c.channel)
    return stub.Drain(inference_pb2.DrainRequest(node=node), timeout=DEADLINE_S)


async def next_left(call):
    return (await call.read()).num_left


async def write(c, request_id="r"):
    """An answer of TEXT that d0 has begun to write: its call and attempt."""
    call = c.generate("hi", request_id=request_id, max_tokens=len(TEXT))
    attempt = await begin_to_write(c, TEXT[0], num_bytes=100)
    await step(c.nodes["d0"], attempt, 1, TEXT[1])
    await c.until_loads(lambda loads: loads.num_live_requests == 1)
    assert (await call.read()).chunk.text == TEXT[0]
    assert (await call.read()).chunk.text == TEXT[1]
    return call, attempt


async def rest_of(call):
    """What follows the first two tokens is right; how the answer ends."""
    *chunks, end = await read_to_end(call)
    assert "".join(response.chunk.text for response in chunks) == TEXT[2:]
    return end.complete


async def reserve_on_d1(c):
    """The target of a move: its attempt."""
    reserve = await c.nodes["d1"].command("reserve")
    assert list(reserve.job.token_ids) == [*b"hi", *TEXT[:2].encode()]
    assert reserve.num_tokens_ahead == len(TEXT) - 2
    return reserve.job.attempt


async def migration(c, attempt):
    """The answer moves from d0, which gives one more token, to d1: its new attempt. d0 has yet to let go."""
    d0, d1 = c.nodes["d0"], c.nodes["d1"]
    target = await reserve_on_d1(c)
    await d1.send(events.reserved(target, b"m" * 40))
    migrate = await d0.command("migrate")
    assert (migrate.attempt, migrate.descriptor) == (attempt, b"m" * 40)
    await step(d0, attempt, 2, TEXT[2])
    await d1.send(events.committed(target, 60, 5, next_index=3))
    return target


async def states(c):
    """The states of the nodes, which two calls tell alike."""
    loads = await c.stub.GetLoads(inference_pb2.GetLoadsRequest())
    overview = await inference_pb2_grpc.AdminStub(c.channel).GetOverview(inference_pb2.GetOverviewRequest())
    told = {load.name: load.state for load in loads.nodes}
    assert {node.load.name: node.load.state for node in overview.nodes} == told
    return told


@pytest.mark.parametrize("is_back", [False, True])
def test_a_node_that_is_lost_drains_no_more(tmp_path, is_back):
    """It would take work again; and what it held for others is not told any more."""

    async def scenario():
        async with cluster(tmp_path) as c:
            await c.attach("d1")
            await c.nodes["d0"].send(events.heartbeat(num_remote_kv_blocks=3))
            await c.until_loads(lambda loads: any(node.num_remote_kv_blocks == 3 for node in loads.nodes))
            draining = drain(c, "d0")
            assert await next_left(draining) == 1
            await c.nodes["d0"].close()
            if is_back:
                await c.until_loads(lambda loads: all(node.name != "d0" for node in loads.nodes))
                await c.attach("d0")
            code, info, message = await refusal_of(draining)
            assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "DRAIN_ENDED")
            assert "was lost" in message

    run(scenario())


def test_a_drain_moves_the_answers_and_tells_what_is_left(tmp_path, caplog):
    caplog.set_level("INFO")

    async def scenario():
        async with cluster(tmp_path) as c:
            call, attempt = await write(c)
            await c.attach("d1")
            draining = drain(c, "d0")
            assert await next_left(draining) == 1
            assert await states(c) == {"p0": "ready", "d0": "draining", "d1": "ready"}
            target = await migration(c, attempt)
            await step(c.nodes["d1"], target, 3, TEXT[3:], events.LENGTH)
            complete = await rest_of(call)
            await c.nodes["d0"].answer_cancel(attempt)
            assert await next_left(draining) == 0
            assert await draining.read() is grpc.aio.EOF
            assert [line for line in caplog.messages if " d0 is " in line] == [
                "decode node d0 is draining",
                "decode node d0 is drained",
            ]
            assert (complete.kv_bytes, complete.migrated_kv_bytes, complete.kv_bytes_saved) == (160, 60, 5)
            timeline = complete.timeline
            assert (timeline.num_migrations, timeline.num_restarts, timeline.decode_node) == (1, 0, "d1")
            assert await states(c) == {"p0": "ready", "d0": "drained", "d1": "ready"}
            another = c.generate("hi")
            await c.nodes["d1"].command("reserve")  # nothing new comes to d0
            another.cancel()

    run(scenario())


def test_a_fleet_drains_until_its_last_request_has_ended(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate("hi", max_tokens=4)
            attempt = await begin_to_write(c)
            stub = inference_pb2_grpc.AdminStub(c.channel)
            draining = stub.Drain(inference_pb2.DrainRequest(all=True), timeout=DEADLINE_S)
            assert await next_left(draining) == 1
            code, info, _ = await refusal_of(c.generate("hi", request_id="late"))
            assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            await step(c.nodes["d0"], attempt, 1, "bcd", events.LENGTH)
            assert (await read_all(call))[0] == "abcd"
            assert await next_left(draining) == 0
            assert await draining.read() is grpc.aio.EOF
            assert await states(c) == {"p0": "ready", "d0": "ready"}

    run(scenario())


def test_a_drain_is_of_a_node_or_of_the_fleet(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            stub = inference_pb2_grpc.AdminStub(c.channel)
            call = stub.Drain(inference_pb2.DrainRequest(node="d0", all=True), timeout=DEADLINE_S)
            code, _, sentence = await refusal_of(call)
            assert (code, sentence) == (grpc.StatusCode.INVALID_ARGUMENT, "node and all cannot both be set")
            assert await states(c) == {"p0": "ready", "d0": "ready"}

    run(scenario())


def test_a_second_drain_waits_for_the_same_end(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0", "d1")) as c:
            call = c.generate("hi", max_tokens=4)
            attempt = await begin_to_write(c)
            first, second = drain(c, "d0"), drain(c, "d0")
            assert [await next_left(first), await next_left(second)] == [1, 1]
            first.cancel()  # which changes nothing
            await step(c.nodes["d0"], attempt, 1, "bcd", events.LENGTH)
            assert (await read_all(call))[0] == "abcd"
            assert await next_left(second) == 0
            assert [progress.num_left for progress in await read_to_end(drain(c, "d0"))] == [0]

    run(scenario())


def test_a_role_ends_a_drain_and_tells_who_waits_for_it(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0", "d1")) as c:
            call = c.generate("hi", max_tokens=4)
            attempt = await begin_to_write(c)
            draining = drain(c, "d0")
            assert await next_left(draining) == 1
            role = await inference_pb2_grpc.AdminStub(c.channel).SetRole(
                inference_pb2.SetRoleRequest(node="d0", role="decode"), timeout=DEADLINE_S
            )
            assert (role.node.state, role.node.role) == ("ready", "decode")
            code, info, sentence = await refusal_of(draining)
            assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "DRAIN_ENDED")
            assert sentence == "node d0 drains no more: it was given a role"
            await step(c.nodes["d0"], attempt, 1, "bcd", events.LENGTH)
            assert (await read_all(call))[0] == "abcd"
            again = c.generate("hi", request_id="again")
            await c.nodes["d0"].command("reserve")
            again.cancel()

    run(scenario())


def test_a_node_that_drains_itself_is_emptied_in_the_same_way(tmp_path, caplog):
    caplog.set_level("INFO")

    async def scenario():
        async with cluster(tmp_path) as c:
            call, attempt = await write(c)
            await c.attach("d1")
            await c.nodes["d0"].send(events.heartbeat("draining"))
            target = await migration(c, attempt)
            await c.nodes["d0"].answer_cancel(attempt)
            await c.nodes["d0"].hang_up()  # it has nothing to stay for
            await c.until_loads(lambda loads: all(node.name != "d0" for node in loads.nodes))
            [left] = [record for record in caplog.records if record.getMessage().startswith("decode node d0 has left")]
            assert left.levelname == "INFO", "it is no trouble"
            await step(c.nodes["d1"], target, 3, TEXT[3:], events.LENGTH)
            await rest_of(call)

    run(scenario())


def test_prompts_of_a_draining_node_begin_elsewhere(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "p1", "d0")) as c:
            call = c.generate("hi", max_tokens=1)
            attempt, _ = await begin(c)
            draining = drain(c, "p0")
            assert await next_left(draining) == 1
            await c.nodes["p0"].answer_cancel(attempt)
            await c.nodes["d0"].answer_cancel(attempt)
            assert await next_left(draining) == 0
            again = (await c.nodes["p1"].command("prefill")).job
            await c.nodes["p1"].send(events.first_token(events.sampled(again.attempt, 0, ord("a"), events.LENGTH)))
            _, _, [complete] = await read_all(call)
            assert complete.timeline.num_restarts == 0

    run(scenario())


IMPOSSIBLE_DRAINS = [
    ("d9", grpc.StatusCode.NOT_FOUND, "NODE_NOT_FOUND", "no node 'd9' is attached"),
    ("", grpc.StatusCode.NOT_FOUND, "NODE_NOT_FOUND", "no node '' is attached"),
    (
        "d0",
        grpc.StatusCode.FAILED_PRECONDITION,
        "NO_OTHER_NODE",
        "node d0 cannot drain: no other node decodes sequences",
    ),
    (
        "p0",
        grpc.StatusCode.FAILED_PRECONDITION,
        "NO_OTHER_NODE",
        "node p0 cannot drain: no other node prefills prompts",
    ),
]


def test_a_drain_that_cannot_be(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            for node, code, reason, sentence in IMPOSSIBLE_DRAINS:
                found, info, details = await refusal_of(drain(c, node))
                assert (found, info.reason, details) == (code, reason, sentence)
            call = c.generate("hi", max_tokens=1)  # and nothing has changed
            await begin(c)
            call.cancel()

    run(scenario())


def test_a_drain_needs_the_key(tmp_path):
    async def scenario():
        async with cluster(tmp_path, api_key="k" * 20) as c:
            assert (await refusal_of(drain(c, "d0")))[0] is grpc.StatusCode.UNAUTHENTICATED

    run(scenario())


def test_a_move_has_a_line_and_its_answer_tells_of_it(tmp_path, caplog):
    caplog.set_level("INFO", logger="coordinator.control.request_log")

    async def scenario():
        async with cluster(tmp_path) as c:
            call, attempt = await write(c)
            await c.attach("d1")
            await c.nodes["d0"].send(events.heartbeat("draining"))
            target = await migration(c, attempt)
            await step(c.nodes["d1"], target, 3, TEXT[3:], events.LENGTH)
            await rest_of(call)

    run(scenario())
    migrated, finished = [record for record in caplog.records if record.name == "coordinator.control.request_log"]
    assert (migrated.getMessage(), migrated.request_id) == ("request migrated", "r")
    assert migrated.fields.pop("seconds") > 0
    assert migrated.fields == {"index": 0, "outcome": "migrated", "from_node": "d0", "to_node": "d1", "kv_bytes": 60}
    assert finished.getMessage() == "request finished"
    assert (finished.fields["migrations"], finished.fields["migrated_kv_bytes"]) == (1, 60)
    assert finished.fields["migration_pause_s"] >= 0
