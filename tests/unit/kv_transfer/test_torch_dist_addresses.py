"""Where the torch.distributed transport listens and what it dials; what it cannot is refused."""

import asyncio
import gc

import psutil
import pytest
import torch

from kv_transfer.ends.sender import KVSender
from kv_transfer.errors import TransferError
from kv_transfer.transports.dist_address import DistAddress
from kv_transfer.transports.dist_stream import pack_key, pack_sizes, unpack_key, unpack_message
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from serving_core.errors import SettingsError
from tests.unit.kv_transfer.torch_dist_kit import CPU, tensor_store
from tests.unit.kv_transfer.transfer_kit import LAYOUT, Once, a_ticket, run

FRAME = torch.arange(200, dtype=torch.uint8)


@pytest.mark.parametrize(("device", "message"), [("mps", "not of mps"), ("meta", "not of meta"), ("cuda", "no NCCL")])
def test_devices_that_no_group_serves_are_refused(device, message, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(SettingsError, match=message):
        TorchDistListener("dist://127.0.0.1:*", torch.device(device))
    with pytest.raises(SettingsError, match=message):
        TorchDistDialer(torch.device(device))


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ("dist://*:*", "names no host"),
        ("dist://0.0.0.0:5600", "names no host"),
        ("dist://[::]:*", "names no host"),
        ("dist://0:*", "names no host"),
        ("dist://203.0.113.9:*", "cannot listen"),
        ("dist://no.such.host.invalid:*", "cannot listen"),
        ("dist://127.0.0.1:99999", "cannot listen"),
        ("dist://127.0.0.1", "must be dist://HOST:PORT"),
        ("tcp://127.0.0.1:*", "must be dist://HOST:PORT"),
        ("", "must be dist://HOST:PORT"),
    ],
)
def test_endpoints_that_cannot_be_bound_are_refused(bind, message):
    with pytest.raises(SettingsError, match=message):
        TorchDistListener(bind, CPU)
    gc.collect()  # a socket left open would warn


def test_a_port_in_use_is_refused():
    async def scenario():
        listener = TorchDistListener("dist://127.0.0.1:*", CPU)
        listener.start(lambda *_: None)
        address = DistAddress.parse(listener.address)
        with pytest.raises(SettingsError, match="in use"):
            TorchDistListener(f"dist://{address.ip}:{address.port}", CPU)
        await listener.close()

    run(scenario())


INTERFACES = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
HAS_IPV6 = pytest.mark.skipif("::1" not in INTERFACES, reason="there is no IPv6 loopback here")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", INTERFACES["127.0.0.1"], pytest.param("[::1]", marks=HAS_IPV6)]
)
def test_hosts_are_addresses_names_and_interfaces(host):
    async def scenario():
        listener, arrived = TorchDistListener(f"dist://{host}:0", CPU), asyncio.Event()
        listener.start(lambda *_: arrived.set())
        dialer = TorchDistDialer(CPU)
        dialer.start(lambda _: None, lambda _: None)
        await dialer.send(listener.address, b"header", [FRAME])
        await arrived.wait()
        await dialer.close()
        await listener.close()

    run(scenario())


@pytest.mark.parametrize(
    "address",
    [
        "nonsense",
        "tcp://127.0.0.1:1",
        "dist://127.0.0.1:1",
        "dist://127.0.0.1:0/" + "0" * 32,
        "dist://127.0.0.1:70000/" + "0" * 32,
        "dist://localhost:5600/" + "0" * 32,
        "dist://127.0.0.1:5600/" + "0" * 31,
    ],
)
def test_addresses_that_cannot_be_dialled_are_refused(address):
    async def scenario():
        sender = KVSender(TorchDistDialer(CPU), tensor_store(LAYOUT, 4), deadline_s=20.0)
        with pytest.raises(TransferError, match="cannot be dialled"):
            sender.start(a_ticket(address).encode(), Once())
        assert sender.num_open == 0
        await sender.close()

    run(scenario())


@pytest.mark.parametrize("ip", ["192.0.2.1", "2001:db8::1"])
def test_addresses_read_back(ip):
    address = DistAddress(ip, 5600, bytes(range(16)))
    assert DistAddress.parse(str(address)) == address


def test_what_goes_over_the_stream_reads_back():
    sizes, header = unpack_message(pack_sizes([1, 2**20, 0]) + b"header")
    assert (sizes, bytes(header)) == ([1, 2**20, 0], b"header")
    assert unpack_key(pack_key("0/1", b"a\0b")) == ("0/1", b"a\0b")
