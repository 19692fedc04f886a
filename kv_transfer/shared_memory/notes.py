"""Define the notes on shared memory that both ends exchange over their connection, beside transfer messages."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kv_transfer.payload import MESSAGE_BYTES
from kv_transfer.results import TransferError
from kv_transfer.wire import check_bytes, check_int, pack_checked, unpack_checked

NONCE_BYTES: Final = 16
HEAD_BYTES: Final = 4096  # before the first slot; begins with the nonce
SLOT_BYTES: Final = MESSAGE_BYTES  # longer messages go over the connection
MAX_SLOTS: Final = 64
SECRET_BYTES: Final = 32
NAME_BYTES: Final = 16
MAX_NOTE_BYTES: Final = 256
MAX_NUMBER: Final = 2**63 - 1


class Decline(StrEnum):
    """Why a receiver does not read a sender's memory."""

    UNWANTED = "unwanted"  # disabled by its settings
    UNREACHABLE = "unreachable"  # another machine, another container, another user
    UNLIKE = "unlike"  # the memory does not match the offer
    FULL = "full"  # it reads the memory of too many senders
    BUSY = "busy"  # it has no file descriptor left, or already has an offer


_DECLINES = {decline.value: decline for decline in Decline}


@dataclass(frozen=True, slots=True)
class Offer:
    """Note of a sender: it offers memory."""

    name: bytes  # of the sender's socket
    secret: bytes  # to be shown at the socket
    nonce: bytes  # at the beginning of the memory
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
class SlotFilled:
    """Note of a sender: the payload of this message is in a slot."""

    number: int  # one more than in the previous SlotFilled
    slot: int
    num_bytes: int

    def __post_init__(self) -> None:
        check_int("number", self.number, 1, MAX_NUMBER)
        check_int("slot", self.slot, 0, MAX_SLOTS - 1)
        check_int("number of bytes", self.num_bytes, 1, SLOT_BYTES)


@dataclass(frozen=True, slots=True)
class OfferAccepted:
    """Note of a receiver: it has mapped the memory."""


@dataclass(frozen=True, slots=True)
class OfferDeclined:
    """Note of a receiver: it does not read the memory, or no longer."""

    why: Decline


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """Note of a receiver: it has read the slot of every SlotFilled up to this number."""

    number: int

    def __post_init__(self) -> None:
        check_int("number", self.number, 1, MAX_NUMBER)


Note = Offer | SlotFilled | OfferAccepted | OfferDeclined | SlotFreed


def offset_of(slot: int) -> int:
    """Return the offset of a slot in the memory, in bytes."""
    return HEAD_BYTES + slot * SLOT_BYTES


def encode(note: Note) -> bytes:
    """Return a note as at most MAX_NOTE_BYTES bytes, which `decode` reads."""
    return pack_checked(_fields(note))


def decode(packed: bytes | memoryview) -> Note:
    """Return the note that `encode` packed. Raises TransferError for all other bytes."""
    match unpack_checked(packed, MAX_NOTE_BYTES):
        case ["offer", name, secret, nonce, num_slots]:
            return Offer(name, secret, nonce, num_slots)
        case ["lent", number, slot, num_bytes]:
            return SlotFilled(number, slot, num_bytes)
        case ["taken"]:
            return OfferAccepted()
        case ["declined", str(word)] if word in _DECLINES:
            return OfferDeclined(_DECLINES[word])
        case ["returned", number]:
            return SlotFreed(number)
        case _:
            raise TransferError("a note of unknown kind or shape")


def _fields(note: Note) -> list[Any]:
    match note:
        case Offer(name, secret, nonce, num_slots):
            return ["offer", name, secret, nonce, num_slots]
        case SlotFilled(number, slot, num_bytes):
            return ["lent", number, slot, num_bytes]
        case OfferAccepted():
            return ["taken"]
        case OfferDeclined(why):
            return ["declined", why.value]
        case SlotFreed(number):
            return ["returned", number]
