"""The Dialer's end and the Listener's end of shared memory."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Final

from kv_transfer.results import TransferError
from kv_transfer.shared_memory.area import NONCE_BYTES, ReadArea, WrittenArea
from kv_transfer.shared_memory.memory_socket import SHAKE_S, MemorySocket, address_of, is_same_user, new_socket
from kv_transfer.shared_memory.notes import (
    SLOT_BYTES,
    Decline,
    Declined,
    Lent,
    Note,
    Offer,
    Returned,
    Taken,
    offset_of,
)
from serving_core.descriptors import NONE_LEFT, connections_within

logger = logging.getLogger(__name__)

NUM_SLOTS: Final = 8  # of one connection; what finds none free goes by the connection itself
MAX_AREAS: Final = 8  # of one Dialer, 24 MiB each

_WHY: Final = {
    Decline.UNWANTED: "it is told not to read any",
    Decline.UNREACHABLE: "it is not on this machine, or in another container",
    Decline.UNLIKE: "what it was handed is not what it was offered",
    Decline.FULL: "it reads the memory of too many others",
    Decline.BUSY: "it cannot now",
}


class Lender:
    """The socket of one Dialer, and how much it lends."""

    def __init__(self) -> None:
        """Raises OSError where no memory can be shared."""
        self.num_bytes = 0  # of blocks
        self.num_areas = 0
        self.memory_socket = MemorySocket()

    def close(self) -> None:
        self.memory_socket.close()


class Loan:
    """The memory of one connection. It is offered at once; until it is taken, nothing can be lent."""

    def __init__(self, lender: Lender, tell: Callable[[Note], None], on_gone: Callable[[], None]) -> None:
        """`on_gone` is called when a receiver that had taken it is gone."""
        self._lender = lender
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._area: WrittenArea | None = None
        self._borrower: socket.socket | None = None
        self.is_taken = False  # only then can anything be lent
        self._free = list(range(NUM_SLOTS))  # the one to be used next is last: it may still lie in the CPU's cache
        self._lent: dict[int, tuple[int, asyncio.Future[None]]] = {}  # slots by number, in order
        self._last = 0
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._secret = lender.memory_socket.expect(self._hand_over)
        tell(Offer(lender.memory_socket.name, self._secret, self._nonce, NUM_SLOTS))

    def lend(self, frames: Sequence[memoryview]) -> tuple[Lent, asyncio.Future[None]] | None:
        """Copies them into a slot; done when the slot is free again. None when there is no slot for them."""
        num_bytes = sum(map(len, frames))
        if not self.is_taken or not self._free or not 0 < num_bytes <= SLOT_BYTES:
            return None
        assert self._area is not None
        slot = self._free.pop()
        self._area.write(offset_of(slot), frames)
        self._last += 1
        self._lender.num_bytes += num_bytes
        returned: asyncio.Future[None] = self._loop.create_future()
        self._lent[self._last] = (slot, returned)
        return Lent(self._last, slot, num_bytes), returned

    def take(self, note: Note) -> None:
        """What the receiver says."""
        match note:
            case Taken() if self._area is not None and not self.is_taken:
                self.is_taken = True
                logger.info("blocks for a receiver on this machine go through shared memory")
            case Declined(why):
                logger.info("blocks for a receiver do not go through shared memory: %s", _WHY[why])
                self.close()
            case Returned(number) if number <= self._last:
                while self._lent and next(iter(self._lent)) <= number:
                    self._return_first()

    def close(self) -> None:
        """Lends no more. Nobody waits for what was lent: the memory is the receiver's alone now."""
        self._lender.memory_socket.forget(self._secret)
        self.is_taken = False
        while self._lent:
            self._return_first()
        if self._area is not None:
            self._area.close()
            self._area = None
            self._lender.num_areas -= 1
        if self._borrower is not None:
            self._loop.remove_reader(self._borrower)
            self._borrower.close()
            self._borrower = None

    def _return_first(self) -> None:
        slot, returned = self._lent.pop(next(iter(self._lent)))
        self._free.append(slot)
        returned.set_result(None)

    def _hand_over(self, visitor: socket.socket) -> None:
        """To the receiver, which has come for it. Where that cannot be, it sees its visit end."""
        try:
            if self._lender.num_areas >= MAX_AREAS:
                raise OSError(f"{MAX_AREAS} receivers have some already")
            area = WrittenArea(offset_of(NUM_SLOTS), self._nonce)
        except OSError as error:
            logger.warning("no memory is shared with a receiver: %s", error.strerror or error)
            visitor.close()
            return
        self._area, self._borrower = area, visitor
        self._lender.num_areas += 1
        self._loop.add_reader(visitor, self._lose)
        try:
            area.hand_over(visitor)
        except OSError:
            self.close()

    def _lose(self) -> None:
        """The receiver is gone, or has something to say here, which none has."""
        was_taken = self.is_taken
        self.close()
        if was_taken:
            self._on_gone()


MAX_LENDERS: Final = 64  # of one Listener, visits included
LENDER_DESCRIPTORS: Final = 2  # the memory, and the connection that tells when its sender is gone

Tell = Callable[[bytes, Note], None]
"""Takes the peer that a note is for."""


class Borrower:
    """Reads the memory of the senders that have dialled one Listener."""

    def __init__(self, tell: Tell, *, is_willing: bool) -> None:
        """Declines every offer unless it is willing."""
        self.num_bytes = 0  # of blocks
        self._is_willing = is_willing
        self._max_lenders = connections_within(MAX_LENDERS, descriptors_each=LENDER_DESCRIPTORS)
        self._tell = tell
        self._visits: dict[bytes, _Visit] = {}  # by peer, until the sender is gone
        self._copy = memoryview(bytearray(SLOT_BYTES if is_willing else 0))

    @property
    def num_lenders(self) -> int:
        """Return the number of senders whose memory is read or is being asked for."""
        return len(self._visits)

    def take_offer(self, peer: bytes, offer: Offer) -> None:
        """Visits the sender, and tells it what came of that."""
        if not self._is_willing:
            self._tell(peer, Declined(Decline.UNWANTED))
        elif peer in self._visits:
            self._tell(peer, Declined(Decline.BUSY))
        elif self.num_lenders >= self._max_lenders:
            self._tell(peer, Declined(Decline.FULL))
        else:
            try:
                self._visits[peer] = _Visit(offer, lambda outcome: self._note_outcome(peer, outcome))
            except OSError as error:
                is_short = error.errno in NONE_LEFT
                self._tell(peer, Declined(Decline.BUSY if is_short else Decline.UNREACHABLE))

    def copy_of(self, peer: bytes, lent: Lent) -> memoryview | None:
        """A copy of what lies in the slot, valid until the next one; the slot is returned already. None where there is
        no such memory: its sender is gone, or never had any."""
        visit = self._visits.get(peer)
        if visit is None or visit.area is None or lent.slot >= visit.num_slots:
            logger.warning("a message was dropped: its blocks lie in memory that is not shared")
            return None
        copy = self._copy[: lent.num_bytes]
        visit.area.copy(offset_of(lent.slot), copy)
        self._tell(peer, Returned(lent.number))
        self.num_bytes += lent.num_bytes
        return copy

    def close(self) -> None:
        for visit in self._visits.values():
            visit.end()
        self._visits.clear()

    def _note_outcome(self, peer: bytes, outcome: Decline | None) -> None:
        """It is taken, or declined, or what was taken is no longer there."""
        if outcome is None:
            self._tell(peer, Taken())
            return
        is_news = self._visits.pop(peer).area is None
        if is_news:
            self._tell(peer, Declined(outcome))


class _Visit:
    """At one sender's socket, and then its memory for as long as the sender keeps the connection."""

    def __init__(self, offer: Offer, on_outcome: Callable[[Decline | None], None]) -> None:
        """`on_outcome` takes None once the memory can be read, and a Decline when it cannot, or no longer. Raises
        OSError where nobody is there."""
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
        """Reads nothing more."""
        self._late.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if self.area is not None:
            self.area.close()

    def _come_back(self) -> None:
        """With the sender's descriptor; or without, when it has none to give or is gone."""
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
