"""Move frames between two processes on one CUDA device, where NCCL cannot form a group.

The sender has an area on the device, with slots and two numbers, which the receiver opens by CUDA IPC. A frame is sent
in parts, numbered consecutively. The sender copies a part into the next slot and then writes its number, in stream
order. The receiver polls the number, copies the part into its own memory, and writes its own number, which frees the
slot. The processes exchange nothing else, and neither writes to other memory.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, Protocol

import torch

from kv_transfer.payload import MESSAGE_BYTES
from kv_transfer.results import TransferError
from kv_transfer.transports import dist_stream
from kv_transfer.wire import check_bytes, check_int, pack, unpack

POLL_S: Final = 50e-6


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> None:
    """Poll `is_so` until it returns True. Raises TransferError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TransferError("a pair of ranks moved nothing for too long")
        time.sleep(POLL_S)


def wait_for_device(device: torch.device, timeout_s: float) -> None:
    """Wait until the work queued on the device's current stream is done.

    Raises TransferError after `timeout_s` seconds.
    """
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    wait_until(event.query, timeout_s)


NUM_SLOTS: Final = 4
SLOT_BYTES: Final = MESSAGE_BYTES
NUMBER_BYTES: Final = 8
AREA_BYTES: Final = NUM_SLOTS * SLOT_BYTES + 2 * NUMBER_BYTES
MAX_HANDLE_BYTES: Final = 2048
MAX_NUMBER: Final = 2**62

_AREA: Final = "area"  # store key of the area's handle
_FILLED, _FREED = range(2)  # number of the last part written by the sender, read by the receiver


class Store(Protocol):
    """Values that both ends of a pair share: a value set at one end can be read at the other."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes:
        """Wait for the value of `key` and return it. Raises TransferError if it does not come."""


def are_on_one_device(store: Store, rank: int, device: torch.device) -> bool:
    """Return whether both ends of a pair, `rank` 0 and 1, use the same CUDA device; both must call this.

    Raises TransferError if the other end's device does not come through `store`.
    """
    ours = str(torch.cuda.get_device_properties(device).uuid).encode()  # unique over all machines
    store.set(f"device {rank}", ours)
    return store.get(f"device {1 - rank}") == ours


class DeviceGroup:
    """One end of a pair on one device; has the methods of torch.distributed's group that a pair uses.

    Calls return once their work is queued on the current stream, which may wait for the other end; they raise
    TransferError if that takes too long.
    """

    def __init__(self, store: Store, device: torch.device, *, is_sender: bool) -> None:
        """Create the area at the sender, or open it at the receiver.

        Raises TransferError or RuntimeError if the receiver cannot open it.
        """
        self._is_sender = is_sender
        self._area = Area.taken(device) if is_sender else Area.opened(store.get(_AREA), device)
        if is_sender:
            store.set(_AREA, self._area.packed_handle)
        self._last_seen = 0  # the other end's last known number

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
        """Return the sender's area for the next pair, once the queued work is done; nothing at the receiver."""
        if self._is_sender:
            wait_for_device(self._area.device, dist_stream.TIMEOUT_S)
            self._area.leave()

    def _next_slot(self, place: int, behind: int) -> torch.Tensor:
        """Return the slot of the next part, once the other end is at most `behind` parts behind."""
        self._area.number += 1
        least = self._area.number - behind

        def has_come() -> bool:
            self._last_seen = int(self._area.numbers[place])
            return self._last_seen >= least

        if self._last_seen < least:
            wait_until(has_come, dist_stream.TIMEOUT_S)
        return self._area.slots[self._area.number % NUM_SLOTS]


class _Done:
    """Replace torch.distributed's Work: the stream already has the work."""

    def wait(self, timeout: timedelta) -> bool:
        return True


_DONE: Final = _Done()


class Area:
    """The memory on the device through which a pair passes frames: slots, and the numbers of parts.

    Senders keep areas for their next pair: torch would hold memory that another process has opened forever if that
    process was killed. Part numbers continue over pairs, so a late write of an earlier end never matches a later part.
    """

    spare: Final[dict[torch.device, list["Area"]]] = defaultdict(list)  # areas of senders without a pair
    _sparing: Final = threading.Lock()

    def __init__(self, memory: torch.Tensor, number: int, handle: list[Any]) -> None:
        """Wrap `memory`: AREA_BYTES bytes, uint8."""
        self.device: Final = memory.device
        self.slots: Final = memory[: NUM_SLOTS * SLOT_BYTES].view(NUM_SLOTS, SLOT_BYTES)
        self.numbers: Final = memory[NUM_SLOTS * SLOT_BYTES :].view(torch.int64)
        self.number = number  # number of the last part
        self._handle = handle

    @classmethod
    def taken(cls, device: torch.device) -> "Area":
        """Return an area on this device that no other pair uses, an earlier sender's or a new one."""
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
    def opened(cls, packed_handle: bytes, device: torch.device) -> "Area":
        """Open, at the receiver, the sender's area whose `packed_handle` is given.

        Raises TransferError for an invalid handle, RuntimeError if CUDA cannot open it.
        """
        fields = unpack(packed_handle, MAX_HANDLE_BYTES)
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
    def packed_handle(self) -> bytes:
        """Return the bytes by which a receiver opens the area."""
        return pack([self.number, *self._handle])

    def leave(self) -> None:
        """Keep the area for the sender's next pair on this device."""
        with self._sparing:
            self.spare[self.device].append(self)


def _parts(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (part for tensor in tensors for part in torch.split(tensor, SLOT_BYTES))
