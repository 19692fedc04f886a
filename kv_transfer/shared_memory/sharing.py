"""Run shared memory at both ends, the Dialer's and the Listener's.

One process writes the memory and others read it; it has no name in any file system.
"""

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Final

from kv_transfer.results import TransferError
from kv_transfer.shared_memory.memory_socket import SHAKE_S, MemorySocket, address_of, is_same_user, new_socket
from kv_transfer.shared_memory.notes import (
    NONCE_BYTES,
    SLOT_BYTES,
    Decline,
    Note,
    Offer,
    OfferAccepted,
    OfferDeclined,
    SlotFilled,
    SlotFreed,
    offset_of,
)
from serving_core.net.descriptors import NONE_LEFT, connections_within
from serving_core.process.memory import available_bytes

LEAST_FREE_BYTES: Final = 256 * 2**20  # that must stay free on the machine or in the cgroup

# From linux/fcntl.h; Python's fcntl lacks some of them.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_NO_MORE_SEALS, _NO_SHRINKING, _NO_GROWING, _NO_FUTURE_WRITING = 0x1, 0x2, 0x4, 0x10
# Without seals a writer could truncate or punch the memory, which kills readers by SIGBUS.
SEALS: Final = _NO_SHRINKING | _NO_GROWING | _NO_FUTURE_WRITING | _NO_MORE_SEALS
_BLOCK_BYTES: Final = 512  # of st_blocks


class WrittenArea:
    """The writer's end of shared memory: the only mapping that can ever write."""

    def __init__(self, num_bytes: int, nonce: bytes) -> None:
        """Create num_bytes of memory that begins with the nonce, and allocate its pages.

        Raises OSError if memory is short.
        """
        if available_bytes() < num_bytes + LEAST_FREE_BYTES:
            raise OSError("there is too little free memory")
        descriptor = os.memfd_create("splitserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, num_bytes)
            os.posix_fallocate(descriptor, 0, num_bytes)
            self._map = mmap.mmap(descriptor, num_bytes)
            self._map[:NONCE_BYTES] = nonce
            fcntl.fcntl(descriptor, _ADD_SEALS, SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def send_descriptor(self, reader: socket.socket) -> None:
        """Send the memory's descriptor, with which no process can write, to the reader, and close it here.

        Call once. Raises OSError.
        """
        try:
            socket.send_fds(reader, [b"."], [self._descriptor])
        finally:
            os.close(self._descriptor)

    def write(self, offset: int, frames: Sequence[memoryview]) -> None:
        """Write the frames one behind the other, from byte `offset` on."""
        for frame in frames:
            self._map[offset : offset + len(frame)] = frame
            offset += len(frame)

    def close(self) -> None:
        """Unmap the memory. Readers keep their mappings."""
        self._map.close()


class ReadArea:
    """A reader's end of shared memory, mapped read-only."""

    def __init__(self, descriptor: int, num_bytes: int, nonce: bytes) -> None:
        """Map num_bytes of memory read-only; the caller keeps the descriptor.

        Raises TransferError if the seals, the size or the nonce are not those of the offer.
        """
        try:
            seals = fcntl.fcntl(descriptor, _GET_SEALS)
            status = os.fstat(descriptor)
            if seals & SEALS != SEALS:
                raise TransferError("shared memory without the seals that protect its readers")
            if status.st_size != num_bytes or status.st_blocks * _BLOCK_BYTES < num_bytes:
                raise TransferError("shared memory of another size than was offered")
            self._map = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransferError("what was handed over is no shared memory") from error
        self.num_bytes: Final = num_bytes
        self._view = memoryview(self._map)
        if not secrets.compare_digest(bytes(self._view[:NONCE_BYTES]), nonce):
            self.close()
            raise TransferError("other shared memory than was offered")

    def copy(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from byte `offset` on."""
        target[:] = self._view[offset : offset + len(target)]

    def close(self) -> None:
        self._view.release()
        self._map.close()


logger = logging.getLogger(__name__)

NUM_SLOTS: Final = 8  # of one connection; without a free slot blocks go over the connection
MAX_AREAS: Final = 8  # of one Dialer

_WHY: Final = {
    Decline.UNWANTED: "it is told not to read any",
    Decline.UNREACHABLE: "it is not on this machine, or in another container",
    Decline.UNLIKE: "what it was handed is not what it was offered",
    Decline.FULL: "it reads the memory of too many others",
    Decline.BUSY: "it cannot now",
}


class MemoryServer:
    """The socket through which one Dialer passes its shared memory, and counts over all of its connections."""

    def __init__(self) -> None:
        """Open the socket. Raises OSError if no memory can be shared."""
        self.num_bytes = 0  # of blocks
        self.num_areas = 0
        self.memory_socket = MemorySocket()

    def close(self) -> None:
        self.memory_socket.close()


class MemoryWriter:
    """The sending end of shared memory of one connection.

    Memory is offered at once; slots can be written once the receiver has accepted the offer.
    """

    def __init__(self, server: MemoryServer, send: Callable[[Note], None], on_gone: Callable[[], None]) -> None:
        """Send an Offer of memory with `send`, which carries notes to the receiver.

        `on_gone` is called when a receiver that had accepted the memory is gone.
        """
        self._server = server
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._area: WrittenArea | None = None
        self._reader_socket: socket.socket | None = None
        self.is_accepted = False  # only then can slots be used
        self._free = list(range(NUM_SLOTS))  # the next slot is the last one, which may still be in the CPU's cache
        self._filled: dict[int, tuple[int, asyncio.Future[None]]] = {}  # (slot, future) by number, in order
        self._last = 0
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._secret = server.memory_socket.expect(self._send_descriptor)
        send(Offer(server.memory_socket.name, self._secret, self._nonce, NUM_SLOTS))

    def write(self, frames: Sequence[memoryview]) -> tuple[SlotFilled, asyncio.Future[None]] | None:
        """Copy frames into a free slot; return the note that tells the receiver, and a future.

        The future completes when the slot is free again. Returns None, with nothing written, without a free slot,
        before the offer is accepted, or if the frames are empty or exceed SLOT_BYTES.
        """
        num_bytes = sum(map(len, frames))
        if not self.is_accepted or not self._free or not 0 < num_bytes <= SLOT_BYTES:
            return None
        assert self._area is not None
        slot = self._free.pop()
        self._area.write(offset_of(slot), frames)
        self._last += 1
        self._server.num_bytes += num_bytes
        freed: asyncio.Future[None] = self._loop.create_future()
        self._filled[self._last] = (slot, freed)
        return SlotFilled(self._last, slot, num_bytes), freed

    def handle(self, note: Note) -> None:
        """Act on a note of the receiver: use the memory, stop sharing, or mark slots as free."""
        match note:
            case OfferAccepted() if self._area is not None and not self.is_accepted:
                self.is_accepted = True
                logger.info("blocks for a receiver on this machine go through shared memory")
            case OfferDeclined(why):
                logger.info("blocks for a receiver do not go through shared memory: %s", _WHY[why])
                self.close()
            case SlotFreed(number) if number <= self._last:
                while self._filled and next(iter(self._filled)) <= number:
                    self._free_first()

    def close(self) -> None:
        """Stop sharing, and complete all futures; slots of the receiver are not written any more."""
        self._server.memory_socket.forget(self._secret)
        self.is_accepted = False
        while self._filled:
            self._free_first()
        if self._area is not None:
            self._area.close()
            self._area = None
            self._server.num_areas -= 1
        if self._reader_socket is not None:
            self._loop.remove_reader(self._reader_socket)
            self._reader_socket.close()
            self._reader_socket = None

    def _free_first(self) -> None:
        slot, freed = self._filled.pop(next(iter(self._filled)))
        self._free.append(slot)
        freed.set_result(None)

    def _send_descriptor(self, reader: socket.socket) -> None:
        """Pass the memory to the receiver, which has connected. On failure the connection closes."""
        try:
            if self._server.num_areas >= MAX_AREAS:
                raise OSError(f"{MAX_AREAS} receivers have some already")
            area = WrittenArea(offset_of(NUM_SLOTS), self._nonce)
        except OSError as error:
            logger.warning("no memory is shared with a receiver: %s", error.strerror or error)
            reader.close()
            return
        self._area, self._reader_socket = area, reader
        self._server.num_areas += 1
        self._loop.add_reader(reader, self._lose)
        try:
            area.send_descriptor(reader)
        except OSError:
            self.close()

    def _lose(self) -> None:
        """Stop sharing when the receiver is gone, or sends anything here, which no receiver does."""
        was_accepted = self.is_accepted
        self.close()
        if was_accepted:
            self._on_gone()


MAX_WRITERS: Final = 64  # of one Listener, including visits under way
WRITER_DESCRIPTORS: Final = 2  # the memory, and the connection that shows when the sender is gone

SendNote = Callable[[bytes, Note], None]
"""Takes the peer that a note is for."""


class MemoryReader:
    """Reads the shared memory of the senders that have dialed one Listener."""

    def __init__(self, send: SendNote, *, is_willing: bool) -> None:
        """Send notes with `send`, given the peer. Every offer is declined unless `is_willing`."""
        self.num_bytes = 0  # of blocks
        self._is_willing = is_willing
        self._max_writers = connections_within(MAX_WRITERS, descriptors_each=WRITER_DESCRIPTORS)
        self._send = send
        self._visits: dict[bytes, _Visit] = {}  # by peer, until the sender is gone
        self._copy = memoryview(bytearray(SLOT_BYTES if is_willing else 0))

    @property
    def num_writers(self) -> int:
        """Return the number of senders whose memory is mapped or being requested."""
        return len(self._visits)

    def handle_offer(self, peer: bytes, offer: Offer) -> None:
        """Connect to the socket that the peer offers, and request its memory.

        The peer gets OfferAccepted once the memory is mapped, or OfferDeclined with the reason.
        """
        if not self._is_willing:
            self._send(peer, OfferDeclined(Decline.UNWANTED))
        elif peer in self._visits:
            self._send(peer, OfferDeclined(Decline.BUSY))
        elif self.num_writers >= self._max_writers:
            self._send(peer, OfferDeclined(Decline.FULL))
        else:
            try:
                self._visits[peer] = _Visit(offer, lambda outcome: self._note_outcome(peer, outcome))
            except OSError as error:
                is_short = error.errno in NONE_LEFT
                self._send(peer, OfferDeclined(Decline.BUSY if is_short else Decline.UNREACHABLE))

    def copy_slot(self, peer: bytes, filled: SlotFilled) -> memoryview | None:
        """Return a copy of the slot that the peer has filled, valid until the next call, and free the slot.

        Returns None, and logs it, if there is no such memory: its sender is gone or never shared any.
        """
        visit = self._visits.get(peer)
        if visit is None or visit.area is None or filled.slot >= visit.num_slots:
            logger.warning("a message was dropped: its blocks lie in memory that is not shared")
            return None
        copy = self._copy[: filled.num_bytes]
        visit.area.copy(offset_of(filled.slot), copy)
        self._send(peer, SlotFreed(filled.number))
        self.num_bytes += filled.num_bytes
        return copy

    def close(self) -> None:
        for visit in self._visits.values():
            visit.end()
        self._visits.clear()

    def _note_outcome(self, peer: bytes, outcome: Decline | None) -> None:
        """Report that memory was taken or declined; drop memory that is gone."""
        if outcome is None:
            self._send(peer, OfferAccepted())
            return
        is_news = self._visits.pop(peer).area is None
        if is_news:
            self._send(peer, OfferDeclined(outcome))


class _Visit:
    """Connect to one sender's socket, then hold its memory while the sender keeps the connection."""

    def __init__(self, offer: Offer, on_outcome: Callable[[Decline | None], None]) -> None:
        """Connect.

        `on_outcome` takes None once the memory can be read, and a Decline if it cannot, or no longer. Raises OSError if
        the sender cannot be reached.
        """
        self.area: ReadArea | None = None
        self.num_slots: Final = offer.num_slots
        self._offer = offer
        self._on_outcome = on_outcome
        self._loop = asyncio.get_running_loop()
        self._socket = new_socket()
        try:
            self._socket.connect(address_of(offer.name))
            if not is_same_user(self._socket):
                raise PermissionError("another user's socket")
            self._socket.send(offer.secret)
        except OSError:
            self._socket.close()
            raise
        self._late = self._loop.call_later(SHAKE_S, self._conclude, Decline.UNREACHABLE)
        self._loop.add_reader(self._socket, self._come_back)

    def end(self) -> None:
        """Close the connection and the memory."""
        self._late.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if self.area is not None:
            self.area.close()

    def _come_back(self) -> None:
        """Receive the sender's descriptor; without one, the sender has none to give or is gone."""
        if self.area is not None:
            self._conclude(Decline.UNREACHABLE)
            return
        descriptors: list[int] = []
        with contextlib.suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            self._conclude(Decline.BUSY)
            return
        try:
            self.area = ReadArea(descriptors[0], self._offer.area_bytes, self._offer.nonce)
        except TransferError as error:
            logger.warning("a sender's memory is not read: %s", error)
            self._conclude(Decline.UNLIKE)
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._late.cancel()
        self._on_outcome(None)

    def _conclude(self, outcome: Decline) -> None:
        self.end()
        self._on_outcome(outcome)
