"""Ports, against sockets that really listen."""

import contextlib
import socket
import sys

import pytest

from serving_core.errors import SettingsError
from serving_core.net.ports import Port, SharedPort, check_ports

LOOPBACK = "127.0.0.1"


@pytest.fixture
def taken():
    with socket.create_server((LOOPBACK, 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def free():
    """Held, and not listened on: others can still do that, and nobody is given it who asks for any port."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        yield held.getsockname()[1]


@pytest.mark.parametrize("host", [LOOPBACK, "localhost", "0.0.0.0"])
def test_a_port_in_use_is_named_with_its_flag(taken, free, host):
    with pytest.raises(SettingsError, match=rf"^--http-port {taken} is in use on {host}$"):
        check_ports([Port("--grpc-port", LOOPBACK, free), Port("--http-port", host, taken)])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
@pytest.mark.parametrize("host", ["::", "[::]"])
def test_the_address_of_every_interface_includes_those_of_ipv4(taken, host):
    with pytest.raises(SettingsError, match=f"--grpc-port {taken} is in use"):
        check_ports([Port("--grpc-port", host, taken)])


def test_free_ports_are_free_and_stay_so(free):
    for _ in range(2):
        check_ports([Port("--grpc-port", LOOPBACK, free)])
    socket.create_server((LOOPBACK, free)).close()


def test_one_port_for_two_things(free):
    with pytest.raises(SettingsError, match=f"^--http-port {free} is that of --grpc-port too$"):
        check_ports([Port("--grpc-port", LOOPBACK, free), Port("--http-port", "localhost", free)])


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "x" * 300])  # RFC 5737, RFC 2606
def test_an_address_of_another_machine(free, host):
    with pytest.raises(SettingsError, match=f"^--grpc-port {free}: {host[:80]!r} is not an address of this machine$"):
        check_ports([Port("--grpc-port", host, free)])


def test_any_free_port_and_no_port_are_not_looked_at():
    check_ports([Port("--grpc-port", "192.0.2.1", 0), Port("--http-port", "192.0.2.1", -1)])


def shared(port):
    return SharedPort(Port("--port", LOOPBACK, port))


@pytest.mark.skipif(sys.platform != "linux", reason="ports are shared on Linux alone")
def test_a_shared_port_is_its_owners_alone(free):
    with contextlib.closing(shared(free)) as held:
        assert held.number == free
        with pytest.raises(SettingsError, match=f"--port {free} is in use on {LOOPBACK}"):
            shared(free)
        for _ in range(2):  # its processes
            socket.create_server((LOOPBACK, free), reuse_port=True).close()
        with socket.create_server((LOOPBACK, free), reuse_port=True), pytest.raises(SettingsError, match="is in use"):
            check_ports([Port("--port", LOOPBACK, free)])
    shared(free).close()


@pytest.mark.skipif(sys.platform != "linux", reason="ports are shared on Linux alone")
def test_any_port_can_be_shared():
    with contextlib.closing(shared(0)) as one, contextlib.closing(shared(0)) as other:
        assert 0 < one.number != other.number > 0
