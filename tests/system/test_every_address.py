"""`::` is every address, of IPv4 too: at every port, with and without IPv6 in the kernel. Manifests listen there."""

import contextlib
import socket
import sys
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests import without_ipv6
from tests.effort import few
from tests.system.cluster import FLEET_SECRET, Child, free_port, wait_until
from tests.tiny_models import write_fake_model

DEADLINE_S = 240.0
SECRETS = {"SPLITSERVE_API_KEY": "k", "SPLITSERVE_FLEET_SECRET": FLEET_SECRET}
ANY = "::"


@pytest.mark.parametrize("has_ipv6", few([True, False]))
def test_every_port_is_open_at_every_address(has_ipv6, tmp_path):
    if has_ipv6 and not _has_loopback_of_six():
        pytest.skip("there is no IPv6 here")
    if not has_ipv6 and not without_ipv6.IS_POSSIBLE:
        pytest.skip("IPv6 cannot be taken away here")
    prefix = () if has_ipv6 else (sys.executable, str(Path(without_ipv6.__file__)))
    model = str(write_fake_model(tmp_path / "fake"))
    ports = {name: free_port() for name in ("grpc_port", "fleet_port", "http_port", "health_port", "metrics_port")}
    hosts = {"host": ANY, "fleet_host": ANY, "http_host": ANY}
    front = {name: ports[name] for name in ("grpc_port", "fleet_port", "http_port")}
    back = {"coordinator": f"127.0.0.1:{ports['fleet_port']}", "health_host": ANY, "metrics_host": ANY}
    back |= {name: ports[name] for name in ("health_port", "metrics_port")}
    options = {"log": tmp_path / "log", "env": SECRETS, "prefix": prefix}
    with contextlib.ExitStack() as started:
        front_end = Child("coordinator", "coordinator", model, flags=hosts | front, **options)
        started.callback(front_end.kill)
        node = Child("node", "serving_node", model, flags=back, **options)
        started.callback(node.kill)
        for address in ("127.0.0.1", "::1") if has_ipv6 else ("127.0.0.1",):
            is_ready = partial(_is_ready, address, ports["health_port"], (front_end, node))
            wait_until(is_ready, f"{address} says ready", DEADLINE_S)
            for port in ports.values():
                socket.create_connection((address, port), DEADLINE_S).close()


def _is_ready(address, port, children):
    for child in children:
        assert child.is_running, child.output()
    with grpc.insecure_channel(f"[{address}]:{port}" if ":" in address else f"{address}:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service="ready"), timeout=DEADLINE_S)
        except grpc.RpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING


def _has_loopback_of_six():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
