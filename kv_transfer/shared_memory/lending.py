"""A Dialer's end of shared memory."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Final

from kv_transfer.shared_memory.area import NONCE_BYTES, WrittenArea
from kv_transfer.shared_memory.door import Door
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
    """The door of one Dialer, and how much it lends."""

    def __init__(self) -> None:
        """Raises OSError where no memory can be shared."""
        self.num_bytes = 0  # of blocks
        self.num_areas = 0
        self.door = Door()

    def close(self) -> None:
        self.door.close()


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
        self._secret = lender.door.expect(self._hand_over)
        tell(Offer(lender.door.name, self._secret, self._nonce, NUM_SLOTS))

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
        self._lender.door.forget(self._secret)
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
