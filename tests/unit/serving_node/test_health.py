"""The health port of a node: what it says, to whom it does not talk, and when there is none."""

import socket
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving_core.errors import SettingsError
from serving_node.health import FOLLOWER_STATES, health_port, node_states
from serving_node.settings import NodeSettings, check_network

DEADLINE_S = 60.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Both:
    """A node and its link, as the port sees them."""

    is_stuck: bool = False
    is_draining: bool = False
    is_attached: bool = True


async def asked(port, *services):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        requests = [health_pb2.HealthCheckRequest(service=service) for service in services]
        return [(await stub.Check(request, timeout=DEADLINE_S)).status for request in requests]


@pytest.mark.parametrize(
    ("node", "live", "ready"),
    [
        (Both(), SERVING, SERVING),
        (Both(is_attached=False), SERVING, NOT_SERVING),
        (Both(is_draining=True), SERVING, NOT_SERVING),
        (Both(is_stuck=True, is_attached=False), NOT_SERVING, NOT_SERVING),
    ],
)
async def test_live_is_who_is_not_stuck_and_ready_whom_the_coordinator_counts_on(node, live, ready):
    async with health_port(NodeSettings(health_port=0), node_states(node, node)) as port:
        assert await asked(port, "live", "ready", "") == [live, ready, ready]


async def test_it_looks_each_time_that_it_is_asked():
    both = Both()
    async with health_port(NodeSettings(health_port=0), node_states(both, both)) as port:
        for is_attached in (True, False, True):
            both.is_attached = is_attached
            assert await asked(port, "ready") == [SERVING if is_attached else NOT_SERVING]


async def test_a_follower_has_nothing_to_say_of_its_own():
    async with health_port(NodeSettings(health_port=0), FOLLOWER_STATES) as port:
        assert await asked(port, "live", "ready") == [SERVING, SERVING]


async def test_other_services_and_calls_that_last_are_refused():
    async with (
        health_port(NodeSettings(health_port=0), node_states(Both(), Both())) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="splitserve.v1.Inference"), timeout=DEADLINE_S)
        assert (unknown.value.code(), unknown.value.details()) == (
            grpc.StatusCode.NOT_FOUND,
            "services are live and ready",
        )
        with pytest.raises(grpc.aio.AioRpcError) as lasting:
            await stub.Watch(health_pb2.HealthCheckRequest(service="live"), timeout=DEADLINE_S).read()
        assert lasting.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError) as long:
            await stub.Check(health_pb2.HealthCheckRequest(service="x" * 5000), timeout=DEADLINE_S)
        assert long.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        listed = await stub.List(health_pb2.HealthListRequest(), timeout=DEADLINE_S)
        assert {name: reply.status for name, reply in listed.statuses.items()} == dict.fromkeys(
            ("", "live", "ready"), SERVING
        )


@pytest.mark.parametrize(("number", "local_rank"), [(-1, "0"), (0, "1")])
async def test_there_is_none_unless_it_is_asked_for_and_one_on_a_machine(number, local_rank, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    async with health_port(NodeSettings(health_port=number), FOLLOWER_STATES) as port:
        assert port == -1


def test_a_port_in_use_is_told_before_a_model_is_loaded(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SettingsError, match=f"--health-port {port} is in use"):
            check_network(NodeSettings(health_port=port))
        monkeypatch.setenv("LOCAL_RANK", "1")
        check_network(NodeSettings(health_port=port))


def test_a_port_of_two_flags_is_told_before_a_model_is_loaded(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as held:  # nobody else gets the port, and who asks for it can still listen on it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        both = NodeSettings(health_port=port, metrics_port=port)
        with pytest.raises(SettingsError, match=f"--metrics-port {port} is that of --health-port too"):
            check_network(both)
        monkeypatch.setenv("RANK", "1")  # which tells no figures
        check_network(both)
