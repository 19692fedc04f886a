"""The memory that two processes share, their notes, and the socket at which it is handed over."""

import asyncio
import fcntl
import mmap
import os
import select
import socket
import subprocess
import sys

import pytest

from kv_transfer.results import TransferError
from kv_transfer.shared_memory import memory_socket as socket_module
from kv_transfer.shared_memory import sharing
from kv_transfer.shared_memory.memory_socket import MemorySocket, address_of, new_socket
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
    decode,
    encode,
    offset_of,
)
from kv_transfer.shared_memory.sharing import SEALS, MemoryServer, MemoryWriter, ReadArea, WrittenArea
from tests.unit.kv_transfer.transfer_kit import skip, until

NONCE = bytes(range(NONCE_BYTES))
SIZE = HEAD_BYTES + 100
PEER = b"peer"


# ---- the memory itself ----


def memory(num_bytes=SIZE, seals=SEALS, nonce=NONCE):
    """A descriptor of what a writer may have made."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, num_bytes)
    os.pwrite(descriptor, nonce, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def handed_over(area):
    """The descriptor as a reader gets it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        area.send_descriptor(ours)
        _, (descriptor,), _, _ = socket.recv_fds(theirs, 1, 1)
    return descriptor


def test_what_one_writes_the_other_reads_and_nobody_else_ever_writes():
    written = WrittenArea(SIZE, NONCE)
    descriptor = handed_over(written)
    read, copy = ReadArea(descriptor, SIZE, NONCE), bytearray(7)
    written.write(HEAD_BYTES + 5, [memoryview(b"abc"), memoryview(b"defg")])
    read.copy(HEAD_BYTES + 5, memoryview(copy))
    assert copy == b"abcdefg"
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, SIZE)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)
    written.close()
    read.copy(HEAD_BYTES + 5, memoryview(copy))  # it stays the reader's
    read.close()


def test_memory_is_there_before_it_is_offered():
    written = WrittenArea(SIZE, NONCE)
    descriptor = handed_over(written)
    assert os.fstat(descriptor).st_blocks * 512 >= SIZE
    os.close(descriptor)
    written.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: memory(seals=SEALS & ~fcntl.F_SEAL_SHRINK), "without the seals"),
        (lambda: memory(seals=SEALS & ~fcntl.F_SEAL_GROW), "without the seals"),
        (lambda: memory(seals=0), "without the seals"),
        (lambda: memory(num_bytes=SIZE - 1), "another size"),
        (lambda: memory(num_bytes=SIZE + 1), "another size"),
        (lambda: memory(nonce=NONCE[::-1]), "other shared memory"),
        (lambda: os.open(os.devnull, os.O_RDONLY), "no shared memory"),
        (lambda: os.open(__file__, os.O_RDONLY), "no shared memory"),
        (lambda: os.dup(socket.socketpair()[0].detach()), "no shared memory"),
    ],
    ids=["cut", "grown", "unsealed", "short", "long", "nonce", "device", "file", "socket"],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_is_not_as_it_was_offered_is_never_mapped(make, message):
    descriptor = make()
    with pytest.raises(TransferError, match=message):
        ReadArea(descriptor, SIZE, NONCE)
    os.close(descriptor)


def test_memory_with_holes_is_never_mapped():
    """To read a hole may take a page that is not there."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2 * HEAD_BYTES)
    os.pwrite(descriptor, NONCE, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    with pytest.raises(TransferError, match="another size"):
        ReadArea(descriptor, 2 * HEAD_BYTES, NONCE)
    os.close(descriptor)


def test_no_memory_is_shared_where_little_is_left(monkeypatch):
    monkeypatch.setattr(sharing, "available_bytes", lambda: SIZE + sharing.LEAST_FREE_BYTES - 1)
    with pytest.raises(OSError, match="too little"):
        WrittenArea(SIZE, NONCE)


# ---- notes ----


@pytest.mark.parametrize(
    "note",
    [
        Offer(b"n" * 16, b"s" * 32, NONCE, 8),
        SlotFilled(1, 0, SLOT_BYTES),
        OfferAccepted(),
        *(OfferDeclined(why) for why in Decline),
        SlotFreed(2**63 - 1),
    ],
    ids=str,
)
def test_notes(note):
    assert decode(encode(note)) == note
    assert set(sharing._WHY) == {*Decline}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Offer(b"../run/docker.sock", b"s" * 32, NONCE, 8),
        lambda: Offer(b"n" * 16, b"s" * 31, NONCE, 8),
        lambda: Offer(b"n" * 16, b"s" * 32, NONCE, 65),
        lambda: SlotFilled(0, 0, 1),
        lambda: SlotFilled(1, -1, 1),
        lambda: SlotFilled(1, 64, 1),
        lambda: SlotFilled(1, 0, SLOT_BYTES + 1),
        lambda: SlotFilled(1, 0, 0),
        lambda: SlotFreed(2**64),
        lambda: decode(b""),
        lambda: decode(encode(OfferAccepted())[:-1]),
    ],
)
def test_odd_notes_are_refused(make):
    with pytest.raises(TransferError):
        make()


# ---- the socket ----


async def visit(name):
    """A visitor's connection, or None where there is none to be had."""
    visitor = new_socket()
    try:
        visitor.connect(address_of(name))
    except OSError:
        visitor.close()
        return None
    return visitor


async def ended(visitor):
    """Whether a visitor is sent away, empty-handed."""
    with visitor:
        return await asyncio.get_running_loop().sock_recv(visitor, 1) == b""


async def test_only_who_shows_the_secret_comes_in_and_only_once():
    memory_socket, came = MemorySocket(), []
    secret = memory_socket.expect(came.append)
    forgotten = memory_socket.expect(came.append)
    memory_socket.forget(forgotten)
    for shown in (bytes(SECRET_BYTES), secret + b"x", secret[:-1], forgotten):
        visitor = await visit(memory_socket.name)
        visitor.send(shown)
        assert await ended(visitor)
    assert not came
    visitor, second = await visit(memory_socket.name), await visit(memory_socket.name)
    visitor.send(secret)
    await until(lambda: came)
    second.send(secret)
    assert await ended(second)
    assert len(came) == 1
    came[0].close()
    visitor.close()
    memory_socket.close()


async def test_silent_visitors_are_bounded_and_sent_away(monkeypatch):
    monkeypatch.setattr(socket_module, "MAX_VISITORS", 2)
    memory_socket = MemorySocket()
    silent = [await visit(memory_socket.name) for _ in range(2)]
    assert await ended(await visit(memory_socket.name)), "one too many was let in"
    assert not select.select(silent, [], [], 0)[0], "others were sent away before"
    skip(socket_module.SHAKE_S)
    for visitor in silent:
        assert await ended(visitor)
    came = []
    secret = memory_socket.expect(came.append)
    late = await visit(memory_socket.name)
    late.send(secret)
    await until(lambda: came)
    for each in (late, *came):
        each.close()
    memory_socket.close()
    assert await visit(memory_socket.name) is None


STRANGER = """
import os, socket, sys
os.setuid(65534)
visitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
visitor.settimeout(30)
visitor.connect("\\0splitserve-kv-" + sys.argv[1])
try:
    visitor.send(bytes.fromhex(sys.argv[2]))
    _, descriptors, _, _ = socket.recv_fds(visitor, 1, 1)
except ConnectionError:
    descriptors = []
print(len(descriptors))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_gets_nothing_even_with_the_secret():
    server, told = MemoryServer(), []
    writer = MemoryWriter(server, told.append, lambda: None)
    (offer,) = told
    arguments = [sys.executable, "-c", STRANGER, offer.name.hex(), offer.secret.hex()]
    stranger = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE)
    output, _ = await stranger.communicate()
    assert output == b"0\n"
    assert server.num_areas == 0
    writer.close()
    server.close()


def test_offsets_of_slots_do_not_overlap():
    assert offset_of(0) >= NONCE_BYTES
    assert offset_of(1) - offset_of(0) == SLOT_BYTES
