"""Where each rank of a decode node listens for KV blocks."""

import shutil
import subprocess
import sys

import psutil
import pytest

from kv_transfer.descriptor import endpoint_of, holder_address_of, host_of
from serving_core.errors import SettingsError

ENTRIES = [(name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries]
LOOPBACK = next(name for name, entry in ENTRIES if entry.address == "127.0.0.1")
DEADLINE_S = 240.0
# A network of its own, with an interface that has addresses of IPv6 alone, that of its link among them.
WITH_SIX = """
ip link set lo up
ip link add six type veth peer name other
ip address add fd00::7/64 dev six nodad
ip link set other up
ip link set six up
exec "$@"
"""


@pytest.mark.parametrize(
    ("transport", "bind", "rank", "endpoint"),
    [
        ("zmq", "", 0, "tcp://127.0.0.1:*"),
        ("zmq", "", 3, "tcp://127.0.0.1:*"),
        ("zmq", "tcp://10.0.0.1:5600", 0, "tcp://10.0.0.1:5600"),
        ("zmq", "tcp://10.0.0.1:5600", 2, "tcp://10.0.0.1:5602"),
        ("zmq", "tcp://no-interface:*", 2, "tcp://no-interface:*"),
        ("zmq", f"tcp://{LOOPBACK}:*", 2, "tcp://127.0.0.1:*"),
        ("zmq", f"tcp://{LOOPBACK}:5600", 2, "tcp://127.0.0.1:5602"),
        ("zmq", "tcp://[::1]:7", 1, "tcp://[::1]:8"),
        ("zmq", "tcp://fd00::1:50060", 0, "tcp://[fd00::1]:50060"),
        ("zmq", "tcp://::1:*", 0, "tcp://[::1]:*"),
        ("zmq", "tcp://10.0.0.1:0", 2, "tcp://10.0.0.1:0"),
        ("zmq", "ipc:///run/kv", 0, "ipc:///run/kv"),
        ("zmq", "ipc:///run/kv", 1, "ipc:///run/kv.1"),
        ("torch_dist", "", 1, "dist://127.0.0.1:*"),
        ("torch_dist", "dist://10.0.0.1:5600", 1, "dist://10.0.0.1:5601"),
        ("torch_dist", f"dist://{LOOPBACK}:5600", 1, "dist://127.0.0.1:5601"),
    ],
)
def test_each_rank_has_an_endpoint_of_its_own(transport, bind, rank, endpoint):
    assert endpoint_of(transport, bind, rank) == endpoint


def test_an_interface_may_have_addresses_of_ipv6_alone():
    unshare = ["unshare", "--map-root-user", "--net", "sh", "-euc", WITH_SIX, "sh"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("there can be no network of its own here")
    code = """
from kv_transfer.descriptor import endpoint_of
from kv_transfer.transports.zmq import ZmqListener
print(ZmqListener(endpoint_of("zmq", "tcp://six:50060", 1)).address)
print(endpoint_of("torch_dist", "dist://six:50060", 1))
"""
    told = subprocess.run([*unshare, sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert told.returncode == 0, told.stderr
    zmq, dist = told.stdout.split()
    assert (zmq.partition("#")[0], dist) == ("tcp://[fd00::7]:50061", "dist://[fd00::7]:50061")


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


@pytest.mark.parametrize(("transport", "scheme"), [("zmq", "tcp"), ("torch_dist", "dist")])
def test_a_port_that_there_is_not_is_refused(transport, scheme):
    """ZeroMQ would listen on another one, 65536 below."""
    bind = f"{scheme}://10.0.0.1:65534"
    assert endpoint_of(transport, bind, 1).endswith(":65535")
    with pytest.raises(SettingsError, match=rf"--kv-bind {bind}: rank 2 has the port 65536, over 65535"):
        endpoint_of(transport, bind, 2)


@pytest.mark.parametrize(
    ("transport", "bind", "address"),
    [
        ("zmq", "tcp://10.0.0.1:50060", ("10.0.0.1", 50124)),  # 50060 to 50123 are those of 64 ranks
        ("zmq", "tcp://[::1]:50060", ("[::1]", 50124)),
        ("torch_dist", "dist://10.0.0.1:50060", ("10.0.0.1", 50124)),
        ("zmq", "tcp://10.0.0.1:*", ("10.0.0.1", 0)),
        ("zmq", "tcp://10.0.0.1:0", ("10.0.0.1", 0)),
        ("zmq", f"tcp://{LOOPBACK}:*", ("127.0.0.1", 0)),
        ("zmq", "ipc:///run/kv", ("127.0.0.1", 0)),
        ("zmq", "", ("127.0.0.1", 0)),
    ],
)
def test_remote_kvs_have_a_port_that_no_rank_has(transport, bind, address):
    assert holder_address_of(transport, bind) == address


def test_a_port_of_remote_kvs_that_there_is_not():
    assert holder_address_of("zmq", "tcp://10.0.0.1:65471") == ("10.0.0.1", 65535)
    with pytest.raises(
        SettingsError, match=r"--kv-bind tcp://10\.0\.0\.1:65472: .* the port 64 above, 65536, over 65535"
    ):
        holder_address_of("zmq", "tcp://10.0.0.1:65472")


def test_the_host_that_others_reach():
    assert host_of("tcp://10.0.0.1:5600") == "10.0.0.1"
    assert host_of("dist://[::1]:*") == "[::1]"
    assert host_of("ipc:///run/kv") is None


def test_an_endpoint_of_nothing_is_told_what_it_may_be():
    with pytest.raises(SettingsError, match=r"^--kv-bind eth0 is no endpoint of zmq: tcp://... or ipc://...$"):
        endpoint_of("zmq", "eth0", 0)
