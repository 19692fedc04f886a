"""Frames between two processes on one CUDA device, where NCCL has no group.

The sender has an area on the device, which the receiver opens by CUDA IPC: slots, and two numbers. A frame goes in
parts, each numbered one higher than the last. The sender copies a part into the next slot and writes its number behind
it, in the order of its stream. The receiver looks for that number, copies the part into memory of its own, and writes
down in turn that the slot may be written again. A process is told nothing else, and writes into no other memory.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, Protocol

import torch

from kv_transfer.packing import check_bytes, check_int, pack, unpack
from kv_transfer.payload import MESSAGE_BYTES
from kv_transfer.results import TransferError
from kv_transfer.transports import dist_stream

POLL_S: Final = 50e-6


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> None:
    """Raises TransferError where it is not so within this time."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TransferError("a pair of ranks moved nothing for too long")
        time.sleep(POLL_S)


def wait_for_device(device: torch.device, timeout_s: float) -> None:
    """Returns when what was queued on the current stream so far is done. Raises TransferError if that takes longer."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait_until(event.query, timeout_s)


NUM_SLOTS: Final = 4
SLOT_BYTES: Final = MESSAGE_BYTES
NUMBER_BYTES: Final = 8
AREA_BYTES: Final = NUM_SLOTS * SLOT_BYTES + 2 * NUMBER_BYTES
MAX_HANDLE_BYTES: Final = 2048
MAX_NUMBER: Final = 2**62

_AREA: Final = "area"  # the key of its handle
_FILLED, _FREED = range(2)  # the numbers of the last part that the sender has written, and the receiver read


class Store(Protocol):
    """Of both ends: what is set at one can be read at the other."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes:
        """Waits for it. Raises TransferError when it does not come."""


def are_on_one_device(store: Store, rank: int, device: torch.device) -> bool:
    """Whether the two ends of a pair are, each of which calls this. Raises TransferError as the store does."""
    ours = str(torch.cuda.get_device_properties(device).uuid).encode()  # which no two devices share, of any machines
    store.set(f"device {rank}", ours)
    return store.get(f"device {1 - rank}") == ours


class DeviceGroup:
    """One end: of torch.distributed's groups as much as a pair uses. Its calls return when the current stream has what
    is to be done, which waits for the other end: they raise TransferError where that takes too long."""

    def __init__(self, store: Store, device: torch.device, *, is_sender: bool) -> None:
        """Raises TransferError or RuntimeError where the sender's area cannot be opened here."""
        self._is_sender = is_sender
        self._area = Area.taken(device) if is_sender else Area.opened(store.get(_AREA), device)
        if is_sender:
            store.set(_AREA, self._area.told)
        self._last_seen = 0  # of the other end's numbers

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> "_Done":
        for part in _parts(tensors):
            slot = self._next_slot(_FREED, behind=NUM_SLOTS)
            slot[: len(part)].copy_(part)
            self._area.numbers[_FILLED].fill_(self._area.number)
        return _DONE

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> "_Done":
        for part in _parts(tensors):
            slot = self._next_slot(_FILLED, behind=0)
            part.copy_(slot[: len(part)])
            self._area.numbers[_FREED].fill_(self._area.number)
        return _DONE

    def abort(self) -> None:
        """Lets go of the area."""
        if self._is_sender:
            wait_for_device(self._area.device, dist_stream.TIMEOUT_S)
            self._area.leave()

    def _next_slot(self, place: int, behind: int) -> torch.Tensor:
        """Where the next part goes, once the other end's number is no more than so many behind it."""
        self._area.number += 1
        least = self._area.number - behind

        def has_come() -> bool:
            self._last_seen = int(self._area.numbers[place])
            return self._last_seen >= least

        if self._last_seen < least:
            wait_until(has_come, dist_stream.TIMEOUT_S)
        return self._area.slots[self._area.number % NUM_SLOTS]


class _Done:
    """In place of torch.distributed's Work: the stream has it."""

    def wait(self, timeout: timedelta) -> bool:
        return True


_DONE: Final = _Done()


class Area:
    """The slots and the numbers. The sender's are kept for its next pair when one ends: torch would hold what another
    process has opened for good, where that process was killed. Parts are numbered on, so that what an end of before
    still writes is the number of no part to come."""

    spare: Final[dict[torch.device, list["Area"]]] = defaultdict(list)  # the senders', without a pair
    _sparing: Final = threading.Lock()

    def __init__(self, memory: torch.Tensor, number: int, handle: list[Any]) -> None:
        """`memory`: AREA_BYTES, uint8."""
        self.device: Final = memory.device
        self.slots: Final = memory[: NUM_SLOTS * SLOT_BYTES].view(NUM_SLOTS, SLOT_BYTES)
        self.numbers: Final = memory[NUM_SLOTS * SLOT_BYTES :].view(torch.int64)
        self.number = number  # of the last part
        self._handle = handle

    @classmethod
    def taken(cls, device: torch.device) -> "Area":
        """The sender's, that no other pair has."""
        with cls._sparing:
            area = cls.spare[device].pop() if cls.spare[device] else None
        if area is None:
            memory = torch.empty(AREA_BYTES, dtype=torch.uint8, device=device)
            handle = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            area = cls(memory, NUM_SLOTS, [*handle])
        area.numbers.fill_(area.number)
        wait_for_device(device, dist_stream.TIMEOUT_S)
        return area

    @classmethod
    def opened(cls, told: bytes, device: torch.device) -> "Area":
        """The receiver's, of the sender's bytes. Raises TransferError or RuntimeError where that cannot be."""
        fields = unpack(told, MAX_HANDLE_BYTES)
        if len(fields) != 9:
            raise TransferError("no handle of an area on the device")
        number, _, handle, num_bytes, offset, counter, counter_offset, event, must_wait = fields
        check_int("number of the last part", number, NUM_SLOTS, MAX_NUMBER)
        check_int("size of an area", num_bytes, AREA_BYTES, AREA_BYTES)
        for name, value in (("handle", handle), ("counter", counter), ("event", event)):
            check_bytes(name, value, 0, MAX_HANDLE_BYTES)
        for name, value in (("offset", offset), ("offset of a counter", counter_offset)):
            check_int(name, value, 0, MAX_NUMBER)
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index or 0, handle, num_bytes, offset, counter, counter_offset, event, bool(must_wait)
        )
        memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        return cls(memory, number, [])

    @property
    def told(self) -> bytes:
        """What the receiver opens it with."""
        return pack([self.number, *self._handle])

    def leave(self) -> None:
        """It is for the next pair."""
        with self._sparing:
            self.spare[self.device].append(self)


def _parts(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (part for tensor in tensors for part in torch.split(tensor, SLOT_BYTES))
