"""ZeroMQ's transport: what strangers without a descriptor get, the turns in which messages are taken, addresses of
IPv6."""

import asyncio
import contextlib
import gc
import socket
import weakref

import psutil
import pytest
import zmq

from kv_transfer.receiver import KVReceiver
from kv_transfer.results import TransferError
from kv_transfer.sender import KVSender
from kv_transfer.transports import zmq as zmq_transport
from kv_transfer.transports.zmq import Inbox, ZmqDialer, ZmqListener
from kv_transfer.transports.zmq_keys import Keyring, set_key
from kv_transfer.wire import Finish, encode
from serving_core.net.descriptors import Spares
from tests.unit.kv_transfer.transfer_kit import (
    LAYOUT,
    PATIENCE_S,
    ByteStore,
    check_arrived,
    pair,
    run,
    transfer,
    try_to_send,
    until,
)
from tests.unit.serving_core.scarcity import no_descriptors_left

DEADLINE_S = 240.0
FINISH = encode(Finish(bytes(16), 1, 0, 4, b""))  # which every receiver answers, if only to refuse it


def endpoint_of(address):
    return address.rpartition("#")[0]


def port_of(address):
    return int(endpoint_of(address).rpartition(":")[2])


def none(socket, address):
    """Shows no key; like the others, gives where to connect to."""
    return endpoint_of(address)


def of_another(socket, address):
    return set_key(socket, f"{endpoint_of(address)}#{'0' * 32}")


def in_another_way(socket, address):
    """By a mechanism that the listener does not take."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    return endpoint_of(address)


@contextlib.asynccontextmanager
async def stranger(address, key):
    """A DEALER of libzmq's own, and what becomes of its connection."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        endpoint = key(dealer, address)
        events = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        dealer.connect(endpoint)
        try_to_send(dealer, FINISH)
        try:
            yield dealer, events
        finally:
            dealer.disable_monitor()
            events.close(0)


async def polled(socket):
    while not socket.poll(0):
        await asyncio.sleep(0.005)
    return socket.recv_multipart()


@pytest.mark.parametrize("key", [none, of_another, in_another_way])
def test_without_the_key_nothing_is_said_or_heard(zmq_fabric, stores, key):
    source, target = stores

    async def scenario():
        async with (
            pair(zmq_fabric, source, target) as (sender, receiver),
            stranger(receiver.address, key) as (dealer, events),
        ):
            event, _ = await polled(events)
            assert int.from_bytes(event[:2], "little") == zmq.EVENT_DISCONNECTED
            assert not dealer.poll(0)
            assert receiver.num_messages == 0
            check_arrived(source, range(4), target, range(4), await transfer(sender, receiver, range(4), range(4)))

    run(scenario())


def test_with_the_key_it_is_heard(zmq_fabric, stores):
    source, target = stores

    async def scenario():
        async with (
            pair(zmq_fabric, source, target) as (_, receiver),
            stranger(receiver.address, set_key) as (dealer, _),
        ):
            await polled(dealer)
        assert receiver.num_messages == 1

    run(scenario())


def test_refusals_are_told_once(zmq_fabric, stores, caplog):
    source, target = stores

    async def scenario():
        async with pair(zmq_fabric, source, target) as (_, receiver):
            for _ in range(3):
                async with stranger(receiver.address, of_another) as (_, events):
                    await polled(events)

    run(scenario())
    assert caplog.text.count("a connection without the key of a descriptor was refused") == 1


def test_who_says_nothing_is_cut_off(stores, monkeypatch):
    monkeypatch.setattr(zmq_transport, "SHAKE_MS", 100)

    async def scenario():
        listener = ZmqListener("tcp://127.0.0.1:*")
        listener.start(lambda *_: None)
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener.address))
        await reader.read()  # the greeting, and then the end
        writer.close()
        await listener.close()

    run(scenario())


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_end_that_never_started_is_freed_at_once():
    """A context that the collector finds in a cycle would wait for its sockets without end."""
    listener, dialer = ZmqListener("tcp://127.0.0.1:*"), ZmqDialer()
    kept = [weakref.ref(end) for end in (listener, dialer)]
    gc.disable()
    try:
        del listener, dialer
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:5600", "tcp://127.0.0.1:5600#", "tcp://127.0.0.1:5600#" + "0" * 31, "#" + "é" * 32]
)
async def test_addresses_without_a_key_are_refused(address):
    dialer = ZmqDialer()
    dialer.start(lambda header: None, lambda address: None)
    with pytest.raises(TransferError, match="cannot be dialled"):
        dialer.connect(address)
    await dialer.close()


def test_a_path_may_look_like_a_key():
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        path = "ipc:///tmp/#" + "0" * 32
        assert set_key(dealer, f"{path}#{'1' * 32}") == path
        assert dealer.getsockopt(zmq.PLAIN_PASSWORD).rstrip(b"\0") == b"1" * 32


async def test_each_listener_has_a_key_of_its_own(zmq_fabric):
    listeners = [zmq_fabric.listener() for _ in range(3)]
    assert len({listener.address.rpartition("#")[2] for listener in listeners}) == 3
    for listener in listeners:
        listener.start(lambda *_: None)
        await listener.close()


# ---- where there are no descriptors left ----


def is_cut_off(client):
    """Whether the other end has closed; what it has said before is thrown away."""
    try:
        while client.recv(100):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def test_silent_connections_hold_descriptors_for_a_moment(stores, monkeypatch):
    """More of them than the process has descriptors, at a listener that has a sender already: the sender goes on, and
    another one gets in when they are gone."""
    monkeypatch.setattr(zmq_transport, "SHAKE_MS", 500)
    source, target = stores

    async def scenario():
        receiver = KVReceiver(ZmqListener("tcp://127.0.0.1:*"), target)
        first, second = (KVSender(ZmqDialer(), source, deadline_s=DEADLINE_S) for _ in range(2))
        port = port_of(receiver.address)
        results = await transfer(first, receiver, range(4), range(4))
        with contextlib.ExitStack() as silent:
            crowd = [silent.enter_context(socket.socket()) for _ in range(30)]
            with no_descriptors_left() as close:
                close(20)
                for each in crowd:
                    each.setblocking(False)
                    each.connect_ex(("127.0.0.1", port))
                await until(lambda: not Spares(0).hold())
                results = await transfer(first, receiver, range(4), range(4))
                check_arrived(source, range(4), target, range(4), results)
                await until(lambda: all(map(is_cut_off, crowd)))
                results = await transfer(second, receiver, range(4), range(4))
                check_arrived(source, range(4), target, range(4), results)
        for end in (first, second, receiver):
            await end.close()

    run(scenario())


# ---- turns ----


def test_a_socket_that_is_closed_has_no_turn_left():
    """Two messages are there at once, so a turn is due and the descriptor announces them too; the second one closes."""
    taken, errors = [], []

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        with zmq.Context() as context, context.socket(zmq.PAIR) as theirs:
            ours = context.socket(zmq.PAIR)
            ours.bind("inproc://messages")
            theirs.connect("inproc://messages")

            def take(parts):
                taken.append(parts[0].bytes)
                if len(taken) == 2:
                    inbox.close()

            for message in (b"one", b"two"):
                theirs.send(message)
            inbox = Inbox(ours, take)
            for _ in range(10):
                await asyncio.sleep(0)

    asyncio.run(scenario())
    assert (taken, errors) == ([b"one", b"two"], [])


# ---- IPv6 ----

ADDRESSES = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
IDS = [2, 0, 3]


@pytest.mark.skipif("::1" not in ADDRESSES, reason="there is no IPv6 loopback here")
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_blocks_arrive(is_encrypted):
    source, target = ByteStore(LAYOUT, 4, seed=1), ByteStore(LAYOUT, 4)

    async def scenario():
        keyring = Keyring() if is_encrypted else None
        listener, dialer = ZmqListener("tcp://[::1]:*", keyring), ZmqDialer(Keyring())
        listener.allow([dialer.key])
        assert "://[::1]:" in listener.address
        sender, receiver = KVSender(dialer, source, deadline_s=PATIENCE_S), KVReceiver(listener, target)
        check_arrived(source, IDS, target, IDS, await transfer(sender, receiver, IDS, IDS))
        await sender.close()
        await receiver.close()

    run(scenario())
