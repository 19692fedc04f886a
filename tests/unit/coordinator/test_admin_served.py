"""What an operator may ask, over real gRPC, with nodes that the test speaks for."""

import asyncio

import grpc
import pytest

from coordinator.control import roles
from protos import fleet_pb2, inference_pb2, inference_pb2_grpc
from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, cluster, refusal_of, run
from tests.unit.coordinator.test_server import health_changes


def set_role(c, node, role=None, shape=None):
    return c.admin.SetRole(inference_pb2.SetRoleRequest(node=node, role=role, shape=shape), timeout=DEADLINE_S)


def test_a_role_is_set_when_the_node_has_confirmed_it(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0")) as c:
            call = set_role(c, "d0", role="both")
            shape = events.shape(512, 64, takes_handovers=True)
            assert (await c.nodes["d0"].command("reshape")).shape == shape
            await c.nodes["d0"].send(events.heartbeat())  # that was under way
            await c.until_loads(lambda loads: loads.nodes[0].role == "decode")
            assert not call.done()
            await c.nodes["d0"].send(events.heartbeat(shape=shape, num_steps=7))
            node = (await call).node
            assert (node.name, node.role, node.shape, node.num_steps) == ("d0", "both", shape, 7)
            [load, _] = (await c.stub.GetLoads(inference_pb2.GetLoadsRequest())).nodes
            assert (load.role, load.shape) == ("both", shape)
            [info, _] = (await c.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())).nodes
            assert info.role == "decode"  # what it has begun as

    run(scenario())


def test_readiness_follows_the_shapes(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("d0",)) as c:
            following = await health_changes(c)
            await following("NOT_SERVING")
            for shape, status in (
                (events.shape(512, 64, takes_handovers=True), "SERVING"),
                (events.shape(0, 64, takes_handovers=True), "NOT_SERVING"),
            ):
                await c.nodes["d0"].send(events.heartbeat(shape=shape))
                await following(status)

    run(scenario())


SHAPES = {"over": events.shape(513, 0, takes_handovers=False), "none": events.shape(0, 0, takes_handovers=False)}


@pytest.mark.parametrize(
    ("node", "to", "code", "reason", "message"),
    [
        ("d7", {"role": "both"}, "NOT_FOUND", "NODE_NOT_FOUND", "no node 'd7' is attached"),
        ("", {"role": "both"}, "NOT_FOUND", "NODE_NOT_FOUND", "no node '' is attached"),
        ("d0", {}, "INVALID_ARGUMENT", "BAD_PARAM", "role or shape must be set"),
        ("d0", {"role": "x"}, "INVALID_ARGUMENT", "BAD_PARAM", "a role is prefill, decode or both, not 'x'"),
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
            "a shape needs prompt_tokens or seats above 0: a node that does neither does nothing",
        ),
        (
            "p0",
            {"role": "decode"},
            "FAILED_PRECONDITION",
            "NO_OTHER_NODE",
            "node p0 is the last one that reads prompts",
        ),
        (
            "d0",
            {"role": "prefill"},
            "FAILED_PRECONDITION",
            "NO_OTHER_NODE",
            "node d0 is the last one that writes answers",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_one_sentence(tmp_path, node, to, code, reason, message):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0")) as c:
            got, info, details = await refusal_of(set_role(c, node, **to))
            assert (got.name, info.reason, details) == (code, reason, message)

    run(scenario())


@pytest.mark.parametrize("how", ["silent", "lost"])
def test_a_node_that_does_not_confirm_ends_the_call(tmp_path, monkeypatch, how):
    if how == "silent":
        monkeypatch.setattr(roles, "CONFIRM_S", 0.1)

    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0")) as c:
            call = set_role(c, "d0", role="both")
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
            call = set_role(c, "d0", role="both")
            await c.nodes["d0"].command("reshape")
            await c.nodes["d0"].send(events.failed(fleet_pb2.Attempt(), "BAD_PARAM", "seats of a shape is 64"))
            assert (await refusal_of(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED

    run(scenario())
    [line] = [record for record in caplog.records if "seats of a shape" in record.getMessage()]
    assert line.getMessage() == "decode node d0 refuses a shape: seats of a shape is 64"
    assert "coordinator.control.journal" not in {record.name for record in caplog.records}


def test_changes_that_are_asked_for_at_once_are_made_one_after_the_other(tmp_path):
    """Each alone could be made; both would leave nobody to read."""

    async def scenario():
        async with cluster(tmp_path, nodes=("b0", "b1")) as c:
            calls = [set_role(c, name, role="decode") for name in ("b0", "b1")]
            shape = events.shape(0, 64, takes_handovers=True)
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
