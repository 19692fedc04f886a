"""Where each rank of a decode node listens for KV blocks."""

import pytest

from kv_transfer.endpoints import endpoint_of, host_of
from serving_core.errors import SettingsError


@pytest.mark.parametrize(
    ("transport", "bind", "rank", "endpoint"),
    [
        ("zmq", "", 0, "tcp://127.0.0.1:*"),
        ("zmq", "", 3, "tcp://127.0.0.1:*"),
        ("zmq", "tcp://10.0.0.1:5600", 0, "tcp://10.0.0.1:5600"),
        ("zmq", "tcp://10.0.0.1:5600", 2, "tcp://10.0.0.1:5602"),
        ("zmq", "tcp://eth0:*", 2, "tcp://eth0:*"),
        ("zmq", "tcp://[::1]:7", 1, "tcp://[::1]:8"),
        ("zmq", "tcp://fd00::1:50060", 0, "tcp://[fd00::1]:50060"),
        ("zmq", "tcp://::1:*", 0, "tcp://[::1]:*"),
        ("zmq", "tcp://10.0.0.1:0", 2, "tcp://10.0.0.1:0"),
        ("zmq", "ipc:///run/kv", 0, "ipc:///run/kv"),
        ("zmq", "ipc:///run/kv", 1, "ipc:///run/kv.1"),
        ("torch_dist", "", 1, "dist://127.0.0.1:*"),
        ("torch_dist", "dist://10.0.0.1:5600", 1, "dist://10.0.0.1:5601"),
    ],
)
def test_each_rank_has_an_endpoint_of_its_own(transport, bind, rank, endpoint):
    assert endpoint_of(transport, bind, rank) == endpoint


@pytest.mark.parametrize(
    ("transport", "bind"),
    [
        ("zmq", "dist://10.0.0.1:5600"),
        ("torch_dist", "tcp://10.0.0.1:5600"),
        ("torch_dist", "ipc:///run/kv"),
        ("zmq", "10.0.0.1:5600"),
        ("zmq", "tcp://"),
        ("zmq", "tcp://10.0.0.1"),
        ("zmq", "tcp://10.0.0.1:http"),
    ],
)
def test_other_endpoints_are_refused_by_name(transport, bind):
    with pytest.raises(SettingsError, match="kv-bind"):
        endpoint_of(transport, bind, 0)


def test_the_host_that_others_reach():
    assert host_of("tcp://10.0.0.1:5600") == "10.0.0.1"
    assert host_of("dist://[::1]:*") == "[::1]"
    assert host_of("ipc:///run/kv") is None
