"""The torch.distributed transport: pools of tensors byte for byte, frames over the seam itself, where it listens and
what it dials."""

import asyncio
import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import psutil
import pytest
import torch
import uvloop

from kv_transfer.receiver import KVReceiver, Received
from kv_transfer.results import TransferError
from kv_transfer.sender import KVSender, Sent
from kv_transfer.transports import torch_dist
from kv_transfer.transports.dist_stream import DistAddress, pack_key, pack_sizes, unpack_key, unpack_message
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from kv_transfer.transports.torch_pair import MAX_KEYS, _RelayedStore
from serving_core.errors import SettingsError
from tests.effort import few
from tests.unit.kv_transfer.torch_dist_kit import CPU, bytes_of, tensor_store
from tests.unit.kv_transfer.transfer_kit import (
    BIG_LAYOUT,
    BIG_NUM_BLOCKS,
    LAYOUT,
    PATIENCE_S,
    SMOLLM2,
    Once,
    a_descriptor,
    run,
    transfer,
    until,
)

ANY_PORT = "dist://127.0.0.1:*"
FRAME = torch.arange(200, dtype=torch.uint8)


@asynccontextmanager
async def ends(source, *targets):
    """A sender and a receiver for each target."""
    sender = KVSender(TorchDistDialer(CPU), source, deadline_s=PATIENCE_S)
    receivers = [KVReceiver(TorchDistListener(ANY_PORT, CPU), target) for target in targets]
    try:
        yield sender, *receivers
    finally:
        await sender.close()
        for receiver in receivers:
            await receiver.close()


async def check_transfer(sender, receiver, target, source, source_ids, target_ids):
    sent, received = await transfer(sender, receiver, source_ids, target_ids)
    assert (type(sent), type(received)) == (Sent, Received)
    assert bytes_of(target, target_ids) == bytes_of(source, source_ids)


def held_by_this_process():
    process = psutil.Process()
    return threading.active_count(), process.num_threads(), process.num_fds()


def kv_pair_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("kv pair")}


# ---- undisturbed ----


@pytest.mark.parametrize(
    ("layout", "num_blocks"),
    [
        (SMOLLM2, 20),
        pytest.param(LAYOUT, 5, marks=pytest.mark.nightly),
        pytest.param(BIG_LAYOUT, BIG_NUM_BLOCKS, marks=pytest.mark.nightly),
    ],
)
def test_tensors_arrive_as_they_are(layout, num_blocks):
    source, target = tensor_store(layout, num_blocks, seed=1), tensor_store(layout, num_blocks + 2)
    rng = random.Random(1)
    source_ids = rng.sample(range(num_blocks), num_blocks)
    target_ids = rng.sample(range(1, num_blocks + 1), num_blocks)

    async def scenario():
        async with ends(source, target) as (sender, receiver):
            await check_transfer(sender, receiver, target, source, source_ids, target_ids)
            assert sender.num_bytes == receiver.num_bytes == num_blocks * layout.block_bytes

    run(scenario())
    assert not any(bytes_of(target, [0, num_blocks + 1])), "a neighbour was written"


def test_two_pairs_at_once():
    source, targets = tensor_store(SMOLLM2, 30, seed=2), [tensor_store(SMOLLM2, 30) for _ in range(2)]

    async def scenario():
        async with ends(source, *targets) as (sender, *receivers):
            pairs = zip(receivers, targets, strict=True)
            await asyncio.gather(*(check_transfer(sender, *pair, source, range(15, 30), range(15)) for pair in pairs))

    run(scenario())


def test_two_nodes_send_to_each_other_at_once():
    stores = [tensor_store(SMOLLM2, 20, seed=seed) for seed in (4, 5)]

    async def scenario():
        async with ends(stores[0], stores[0]) as (*one,), ends(stores[1], stores[1]) as (*other,):
            (sender, receiver), (other_sender, other_receiver) = one, other
            for _ in range(3):
                await asyncio.gather(
                    check_transfer(sender, other_receiver, stores[1], stores[0], range(10), range(10, 20)),
                    check_transfer(other_sender, receiver, stores[0], stores[1], range(10), range(10, 20)),
                )

    run(scenario())


def test_what_was_opened_is_closed_again():
    """Threads and file descriptors, whichever end closes first."""
    source, targets = tensor_store(LAYOUT, 4, seed=3), [tensor_store(LAYOUT, 4) for _ in range(3)]

    async def scenario(*, receivers_first):
        gc.collect()
        before, threads_before = held_by_this_process(), kv_pair_threads()
        async with ends(source, *targets) as (sender, *receivers):
            for receiver, target in zip(receivers, targets, strict=True):
                await check_transfer(sender, receiver, target, source, range(4), range(4))
            assert len(kv_pair_threads() - threads_before) == 12, "each end of each pair has two threads"
            if receivers_first:
                await receivers[0].close()
        # Less, where something of an earlier test has ended meanwhile.
        await until(lambda: all(now <= then for now, then in zip(held_by_this_process(), before, strict=True)))
        assert kv_pair_threads() <= threads_before

    for receivers_first in (False, True, False):
        run(scenario(receivers_first=receivers_first))


def test_only_the_address_that_was_bound_is_listened_on():
    """Neither the signalling nor the group opens a port to other networks."""
    source, target = tensor_store(LAYOUT, 4, seed=4), tensor_store(LAYOUT, 4)

    def listening():
        sockets = psutil.Process().net_connections()
        return {socket.laddr for socket in sockets if socket.status == psutil.CONN_LISTEN}

    async def scenario():
        before = listening()  # servers of earlier tests
        async with ends(source, target) as (sender, receiver):
            await check_transfer(sender, receiver, target, source, range(4), range(4))
            assert {place.ip for place in listening() - before} == {"127.0.0.1"}

    run(scenario())


def test_connections_are_bounded_and_made_again(monkeypatch):
    monkeypatch.setattr(torch_dist, "MAX_CONNECTIONS", 2)
    source, targets = tensor_store(LAYOUT, 4, seed=5), [tensor_store(LAYOUT, 4) for _ in range(4)]
    num_threads = threading.active_count()  # other tests may have left the one in which pyzmq collects what was sent

    async def scenario():
        async with ends(source, *targets) as (sender, *receivers):
            for receiver, target in zip(receivers * 2, targets * 2, strict=True):
                await check_transfer(sender, receiver, target, source, range(4), range(4))
            await until(lambda: threading.active_count() <= num_threads + 2 * 4)

    run(scenario())


# ---- the seam itself ----


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_frames_of_every_size_arrive_in_order(runner):
    """Empty ones, and none at all; replies come back."""
    generator = torch.Generator().manual_seed(8)
    sizes = [[], [0], [1, 0, 7], [5 * 2**18], [], [3] * 64, [0, 0], [2**24]]
    messages = [[torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in m] for m in sizes]

    async def scenario():
        taken, replies, lost = [], [], []
        listener, dialer = TorchDistListener(ANY_PORT, CPU), TorchDistDialer(CPU)

        def take(peer, header, frames):
            taken.append((bytes(header), frames))
            listener.reply(peer, b"to " + header)

        listener.start(take)
        dialer.start(lambda header: replies.append(bytes(header)), lost.append)
        released = [
            dialer.send(listener.address, str(number).encode(), frames) for number, frames in enumerate(messages)
        ]
        await asyncio.gather(*released)
        await until(lambda: len(replies) == len(messages))
        assert [header for header, _ in taken] == [str(number).encode() for number in range(len(messages))]
        assert replies == [b"to " + header for header, _ in taken]
        for frames, (_, arrived) in zip(messages, taken, strict=True):
            assert len(frames) == len(arrived)
            assert all(map(torch.equal, frames, arrived))
        await dialer.close()
        await listener.close()
        assert not lost

    run(scenario(), runner)


@pytest.mark.parametrize("moment", ["dialling", "sending"])
def test_every_frame_is_given_back_on_close(moment):
    frame = torch.zeros(2**20, dtype=torch.uint8)

    async def scenario():
        listener, dialer = TorchDistListener(ANY_PORT, CPU), TorchDistDialer(CPU)
        arrived = asyncio.Event()
        listener.start(lambda *_: arrived.set())
        dialer.start(lambda _: None, lambda _: None)
        released = [dialer.send(listener.address, b"header", [frame]) for _ in range(100)]
        if moment == "sending":
            await arrived.wait()
        await dialer.close()
        assert all(future.done() for future in released)
        await listener.close()

    run(scenario())


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("num_turns", few([0, 1, 2, 3, 4, 6, 8, 12], 0, 1, 3, 6, 12))
def test_a_listener_may_close_at_any_moment(num_turns, runner):
    """Of somebody's dialling, too: pytest warns of what is left open."""

    async def scenario():
        lost, frame = [], torch.zeros(2**20, dtype=torch.uint8)
        listener, dialer = TorchDistListener(ANY_PORT, CPU), TorchDistDialer(CPU)
        listener.start(lambda *_: None)
        dialer.start(lambda _: None, lost.append)
        released = dialer.send(listener.address, b"header", [frame])
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await listener.close()
        await released
        await until(lambda: lost)
        await dialer.close()

    run(scenario(), runner)
    gc.collect()


def test_a_lost_receiver_is_told_of_once():
    async def scenario():
        lost, frame = [], torch.zeros(2**20, dtype=torch.uint8)
        listener, dialer = TorchDistListener(ANY_PORT, CPU), TorchDistDialer(CPU)
        listener.start(lambda *_: None)
        dialer.start(lambda _: None, lost.append)
        await dialer.send(listener.address, b"header", [frame])
        await listener.close()
        await until(lambda: lost)
        await asyncio.gather(*(dialer.send(listener.address, b"header", [frame]) for _ in range(9)))
        await until(lambda: len(lost) == 2)
        await dialer.close()
        assert lost == [listener.address] * 2

    run(scenario())


def test_what_one_end_of_a_pair_stores_the_other_reads():
    """As torch's groups ask for it in C++, in all that they ask for: one at each end, which wraps ours."""

    def store_of(other, timeout_s=PATIENCE_S):
        ours = _RelayedStore(lambda key, value: other().put(key, value), timeout_s)
        return ours, torch.distributed.PrefixStore("group", ours)

    ours, here = store_of(lambda: theirs)
    theirs, there = store_of(lambda: ours)
    reading = ThreadPoolExecutor(1).submit(there.get, "a")  # waits
    here.set("a", b"1\0\xff")
    there.set("b", b"")
    assert reading.result(PATIENCE_S) == here.get("a") == b"1\0\xff"
    assert (here.get("b"), here.check(["a", "b"]), there.check(["a", "c"])) == (b"", True, False)
    there.wait(["a", "b"])
    here.clone().set("c", b"3")
    assert there.clone().multi_get(["a", "c"]) == [b"1\0\xff", b"3"]
    with pytest.raises(RuntimeError, match="add"):
        here.add("a", 1)
    _, lonely = store_of(lambda: theirs, timeout_s=0.01)
    for closes in (False, True):
        if closes:
            ours.close()
        with pytest.raises(TransferError, match="did not make its group"):
            (here if closes else lonely).wait(["never"])
    for number in range(MAX_KEYS - 3):
        here.set(str(number), b"")
    with pytest.raises(TransferError, match="more than 64 keys"):
        here.set("one more", b"")


# ---- addresses ----


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
            sender.start(a_descriptor(address).encode(), Once())
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
