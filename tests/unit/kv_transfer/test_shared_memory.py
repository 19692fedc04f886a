"""Blocks through memory that two processes share: who gets it, what is believed of it, when it is used again."""

import asyncio
import errno
import os
import socket
from functools import partial

import pytest

from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.shared_memory import sharing
from kv_transfer.shared_memory.memory_socket import address_of, new_socket
from kv_transfer.shared_memory.notes import (
    HEAD_BYTES,
    NONCE_BYTES,
    SECRET_BYTES,
    SLOT_BYTES,
    Decline,
    Offer,
    OfferAccepted,
    OfferDeclined,
    SlotFilled,
    SlotFreed,
)
from kv_transfer.shared_memory.sharing import NUM_SLOTS, MemoryReader, MemoryServer, MemoryWriter, WrittenArea
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from tests.unit.kv_transfer.transfer_kit import (
    BIG_LAYOUT,
    LAYOUT,
    PATIENCE_S,
    ByteStore,
    Fabric,
    Once,
    check_arrived,
    grant,
    pair,
    run,
    transfer,
    until,
)

NONCE = bytes(range(NONCE_BYTES))
SIZE = HEAD_BYTES + 100
PEER = b"peer"


@pytest.fixture
def shm(tmp_path):
    return Fabric("shm", tmp_path)


# ---- both ends ----


class Ends:
    """A server and a reader, with a wire between them that can be listened to."""

    def __init__(self, **reader):
        self.said, self.gone = [], []
        self.server = MemoryServer()
        self.reader = MemoryReader(self._answer, **({"is_willing": True} | reader))
        self.writer = MemoryWriter(self.server, self.said.append, lambda: self.gone.append(True))
        (self.offer,) = self.said
        self.answers = []

    def _answer(self, peer, note):
        assert peer == PEER
        self.answers.append(note)
        self.writer.handle(note)

    async def meet(self):
        self.reader.handle_offer(PEER, self.offer)
        await until(lambda: self.answers)
        return self.answers.pop()

    def close(self):
        self.writer.close()
        self.server.close()
        self.reader.close()


async def test_a_slot_is_used_again_only_once_it_was_returned():
    ends = Ends()
    assert ends.writer.write([memoryview(b"early")]) is None, "nothing is filled before it is taken"
    assert await ends.meet() == OfferAccepted()
    filled = [ends.writer.write([memoryview(bytes([number])), memoryview(b"rest")]) for number in range(NUM_SLOTS)]
    assert len({note.slot for note, _ in filled}) == NUM_SLOTS
    assert ends.writer.write([memoryview(b"more")]) is None
    for number in (0, NUM_SLOTS - 1):
        assert ends.reader.copy_slot(PEER, filled[number][0]) == bytes([number]) + b"rest"
        done = [freed.done() for _, freed in filled]
        assert done == [index <= number for index in range(NUM_SLOTS)], "one answer stands for those before it"
    ends.writer.handle(SlotFreed(NUM_SLOTS + 5))  # of nothing that was filled
    again, _ = ends.writer.write([memoryview(b"again")])
    assert again.number == NUM_SLOTS + 1
    assert (ends.server.num_bytes, ends.reader.num_bytes) == (5 * NUM_SLOTS + 5, 10)
    ends.close()


async def test_what_does_not_fit_goes_another_way():
    ends = Ends()
    await ends.meet()
    assert ends.writer.write([memoryview(bytes(SLOT_BYTES)), memoryview(b"x")]) is None
    assert ends.writer.write([]) is None
    assert ends.writer.write([memoryview(bytes(SLOT_BYTES))]) is not None
    ends.close()


async def test_nobody_waits_for_what_was_lent_to_who_is_gone():
    ends = Ends()
    await ends.meet()
    _, freed = ends.writer.write([memoryview(b"x")])
    ends.reader.close()
    await until(lambda: ends.gone)
    assert freed.done()
    assert ends.writer.write([memoryview(b"x")]) is None
    assert ends.server.num_areas == 0
    ends.close()


async def test_memory_of_who_is_gone_is_let_go():
    ends = Ends()
    await ends.meet()
    note, _ = ends.writer.write([memoryview(b"x")])
    ends.writer.close()
    await until(lambda: not ends.reader.num_writers)
    assert ends.reader.copy_slot(PEER, note) is None
    ends.close()


async def test_a_receiver_declines_for_a_reason(monkeypatch):
    unwilling = Ends(is_willing=False)
    assert await unwilling.meet() == OfferDeclined(Decline.UNWANTED)
    unwilling.close()

    ends = Ends()
    elsewhere = Offer(b"?" * 16, ends.offer.secret, ends.offer.nonce, NUM_SLOTS)
    ends.reader.handle_offer(PEER, elsewhere)
    assert ends.answers == [OfferDeclined(Decline.UNREACHABLE)]
    ends.close()

    ends = Ends()
    assert await ends.meet() == OfferAccepted()
    ends.reader.handle_offer(PEER, ends.offer)
    assert ends.answers == [OfferDeclined(Decline.BUSY)]
    ends.close()

    monkeypatch.setattr(sharing, "MAX_WRITERS", 1)
    full = Ends()
    full.reader.handle_offer(b"another peer", full.offer)
    assert await full.meet() == OfferDeclined(Decline.FULL)
    full.reader.close()
    full.close()


@pytest.mark.parametrize("odd", ["nonce", "size", "secret"])
async def test_an_offer_that_is_not_kept_is_declined(odd):
    ends = Ends()
    fields = {"name": ends.offer.name, "secret": ends.offer.secret, "nonce": ends.offer.nonce, "num_slots": NUM_SLOTS}
    wrong = {"nonce": bytes(NONCE_BYTES), "num_slots": NUM_SLOTS + 1, "secret": bytes(SECRET_BYTES)}
    name = "num_slots" if odd == "size" else odd
    ends.offer = Offer(**fields | {name: wrong[name]})
    assert await ends.meet() == OfferDeclined(Decline.BUSY if odd == "secret" else Decline.UNLIKE)
    assert ends.writer.write([memoryview(b"x")]) is None
    await until(lambda: not ends.reader.num_writers)
    ends.close()


async def test_a_sender_that_hands_over_a_pipe_or_nothing_is_declined():
    """The socket of somebody who makes offers of its own."""
    for descriptor in (os.open(os.devnull, os.O_RDONLY), None):
        answers, here = [], asyncio.get_running_loop()
        reader = MemoryReader(lambda peer, note, answers=answers: answers.append(note), is_willing=True)
        with new_socket() as hostile:
            hostile.bind(address_of(b"h" * 16))
            hostile.listen()
            reader.handle_offer(PEER, Offer(b"h" * 16, b"s" * SECRET_BYTES, NONCE, 1))
            visitor, _ = await here.sock_accept(hostile)
            with visitor:
                if descriptor is None:
                    visitor.send(b"nothing")
                else:
                    socket.send_fds(visitor, [b"."], [descriptor, descriptor])
                    os.close(descriptor)
                await until(lambda answers=answers: answers)
        assert answers == [OfferDeclined(Decline.BUSY if descriptor is None else Decline.UNLIKE)]
        reader.close()


async def test_areas_are_bounded(monkeypatch):
    monkeypatch.setattr(sharing, "MAX_AREAS", 0)
    ends = Ends()
    assert await ends.meet() == OfferDeclined(Decline.BUSY)
    ends.close()


async def test_a_slot_that_does_not_exist_is_not_read():
    ends = Ends()
    await ends.meet()
    assert ends.reader.copy_slot(PEER, SlotFilled(1, NUM_SLOTS, 1)) is None
    assert ends.reader.copy_slot(b"other", SlotFilled(1, 0, 1)) is None
    ends.close()


# ---- within a transfer ----


def test_blocks_go_through_it_and_nothing_but_headers_over_the_connection(shm):
    source, target = ByteStore(BIG_LAYOUT, 16, seed=1), ByteStore(BIG_LAYOUT, 16)

    async def scenario():
        async with pair(shm, source, target) as (sender, receiver):
            results = await transfer(sender, receiver, range(16), range(16))
            check_arrived(source, range(16), target, range(16), results)
            num_bytes = 16 * BIG_LAYOUT.block_bytes
            assert sender.transport.num_shared_bytes == receiver.transport.num_shared_bytes == num_bytes

    run(scenario())


def test_a_torn_read_is_counted_and_sent_again(shm, monkeypatch):
    """A sender that writes to a slot while it is read: the checksum of the copy says so."""
    source, target = ByteStore(LAYOUT, 4, seed=2), ByteStore(LAYOUT, 4)
    torn = []

    class Tearing(WrittenArea):
        def write(self, offset, frames):
            super().write(offset, frames)
            if not torn:
                torn.append(offset)
                super().write(offset + 3, [memoryview(b"torn")])

    monkeypatch.setattr(sharing, "WrittenArea", Tearing)

    async def scenario():
        async with pair(shm, source, target) as (sender, receiver):
            results = await transfer(sender, receiver, range(4), range(4))
            check_arrived(source, range(4), target, range(4), results)
            assert receiver.num_corrupt_blocks > 0
            assert sender.num_bytes > 4 * LAYOUT.block_bytes

    run(scenario())
    assert torn


@pytest.mark.parametrize("sides", [(False, True), (True, False)], ids=["sender", "receiver"])
def test_one_end_that_is_told_not_to_keeps_both_on_the_connection(sides):
    source, target = ByteStore(LAYOUT, 4, seed=3), ByteStore(LAYOUT, 4)

    async def scenario():
        receiver = KVReceiver(ZmqListener("tcp://127.0.0.1:*", shares_memory=sides[1]), target)
        sender = KVSender(ZmqDialer(shares_memory=sides[0]), source, deadline_s=PATIENCE_S)
        for _ in range(3):
            check_arrived(source, range(4), target, range(4), await transfer(sender, receiver, range(4), range(4)))
        assert not sender.transport.shares_with(receiver.address)
        assert sender.transport.num_shared_bytes == receiver.transport.num_shared_bytes == 0
        await sender.close()
        await receiver.close()

    run(scenario())


def test_where_no_socket_can_be_made_blocks_go_by_the_connection(shm, monkeypatch, caplog):
    def none_left(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    source, target = ByteStore(LAYOUT, 4, seed=4), ByteStore(LAYOUT, 4)
    monkeypatch.setattr(sharing, "MemorySocket", none_left)

    async def scenario():
        receiver = KVReceiver(shm.listener(), target)
        sender = KVSender(shm.dialer(), source, deadline_s=PATIENCE_S)
        check_arrived(source, range(4), target, range(4), await transfer(sender, receiver, range(4), range(4)))
        await sender.close()
        await receiver.close()

    run(scenario())
    assert "no memory is shared with receivers on this machine: Too many open files" in caplog.text


def test_a_slot_of_a_slow_receiver_is_not_written_again(shm):
    """It reads nothing for a while; meanwhile more is sent than there are slots."""
    source, target = ByteStore(BIG_LAYOUT, 64, seed=5), ByteStore(BIG_LAYOUT, 64)
    parts = [range(first, first + 4) for first in range(0, 64, 4)]

    async def scenario():
        waiting, is_slow = [], True

        def take_later(take, peer, header, frames):
            copies = [memoryview(bytes(frame)) for frame in frames]
            waiting.append(partial(take, peer, bytes(header), copies))
            if not is_slow:
                waiting.pop()()

        async with pair(shm, source, target, tap=take_later) as (sender, receiver):
            pending = []
            for ids in parts:
                sent, received = Once(), Once()
                sender.start(grant(receiver, ids, received).encode(), sent).finish(ids, b"tail")
                pending.append((ids, sent, received))
            await until(lambda: len(waiting) > NUM_SLOTS)
            is_slow = False
            for take in [waiting.pop(0) for _ in range(len(waiting))]:
                take()
            for ids, sent, received in pending:
                check_arrived(source, ids, target, ids, (await sent.result(), await received.result()))

    run(scenario())
