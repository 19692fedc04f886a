"""What the two ends of shared memory tell each other over their connection, beside the messages of transfers."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kv_transfer.packing import check_bytes, check_int, pack_checked, unpack_checked
from kv_transfer.payload import MESSAGE_BYTES
from kv_transfer.results import TransferError
from kv_transfer.shared_memory.area import HEAD_BYTES, NONCE_BYTES

SLOT_BYTES: Final = MESSAGE_BYTES  # what is longer goes by the connection itself
MAX_SLOTS: Final = 64
SECRET_BYTES: Final = 32
NAME_BYTES: Final = 16
MAX_NOTE_BYTES: Final = 256
MAX_NUMBER: Final = 2**63 - 1


class Decline(StrEnum):
    """Why a receiver does not read a sender's memory."""

    UNWANTED = "unwanted"  # it is told not to
    UNREACHABLE = "unreachable"  # another machine, another container, another user
    UNLIKE = "unlike"  # what was handed over is not what was offered
    FULL = "full"  # it reads that of too many others
    BUSY = "busy"  # it has no descriptor left, or was offered some already


_DECLINES = {decline.value: decline for decline in Decline}


@dataclass(frozen=True, slots=True)
class Offer:
    """The sender's."""

    name: bytes  # of its socket
    secret: bytes  # to be shown there
    nonce: bytes  # that is at the beginning of the memory
    num_slots: int

    def __post_init__(self) -> None:
        check_bytes("name", self.name, NAME_BYTES, NAME_BYTES)
        check_bytes("secret", self.secret, SECRET_BYTES, SECRET_BYTES)
        check_bytes("nonce", self.nonce, NONCE_BYTES, NONCE_BYTES)
        check_int("number of slots", self.num_slots, 1, MAX_SLOTS)

    @property
    def area_bytes(self) -> int:
        return offset_of(self.num_slots)


@dataclass(frozen=True, slots=True)
class Lent:
    """The sender's: the payload of the message that this is part of lies in a slot."""

    number: int  # one more than that of the Lent before
    slot: int
    num_bytes: int

    def __post_init__(self) -> None:
        check_int("number", self.number, 1, MAX_NUMBER)
        check_int("slot", self.slot, 0, MAX_SLOTS - 1)
        check_int("number of bytes", self.num_bytes, 1, SLOT_BYTES)


@dataclass(frozen=True, slots=True)
class Taken:
    """The receiver's: it has mapped the memory."""


@dataclass(frozen=True, slots=True)
class Declined:
    """The receiver's: it has not."""

    why: Decline


@dataclass(frozen=True, slots=True)
class Returned:
    """The receiver's: it reads nothing more of any Lent up to this one."""

    number: int

    def __post_init__(self) -> None:
        check_int("number", self.number, 1, MAX_NUMBER)


Note = Offer | Lent | Taken | Declined | Returned


def offset_of(slot: int) -> int:
    """Where in the memory a slot begins."""
    return HEAD_BYTES + slot * SLOT_BYTES


def encode(note: Note) -> bytes:
    """The note as bytes, at most MAX_NOTE_BYTES."""
    return pack_checked(_fields(note))


def decode(packed: bytes | memoryview) -> Note:
    """The inverse of encode. Raises TransferError on anything else."""
    match unpack_checked(packed, MAX_NOTE_BYTES):
        case ["offer", name, secret, nonce, num_slots]:
            return Offer(name, secret, nonce, num_slots)
        case ["lent", number, slot, num_bytes]:
            return Lent(number, slot, num_bytes)
        case ["taken"]:
            return Taken()
        case ["declined", str(word)] if word in _DECLINES:
            return Declined(_DECLINES[word])
        case ["returned", number]:
            return Returned(number)
        case _:
            raise TransferError("a note of unknown kind or shape")


def _fields(note: Note) -> list[Any]:
    match note:
        case Offer(name, secret, nonce, num_slots):
            return ["offer", name, secret, nonce, num_slots]
        case Lent(number, slot, num_bytes):
            return ["lent", number, slot, num_bytes]
        case Taken():
            return ["taken"]
        case Declined(why):
            return ["declined", why.value]
        case Returned(number):
            return ["returned", number]
