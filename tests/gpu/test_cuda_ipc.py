"""KV blocks between two processes on one device, where NCCL has no group."""

import multiprocessing
import random
from contextlib import contextmanager

import pytest
import torch

from kv_transfer.results import TransferError
from kv_transfer.transports import dist_stream
from kv_transfer.transports.cuda_ipc import (
    AREA_BYTES,
    MAX_HANDLE_BYTES,
    NUM_SLOTS,
    SLOT_BYTES,
    Area,
    DeviceGroup,
    are_on_one_device,
)
from kv_transfer.transports.torch_pair import RECEIVER_RANK, SENDER_RANK
from kv_transfer.wire import pack, unpack
from tests.unit.kv_transfer.transfer_kit import (
    PATIENCE_S,
)

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def spare():
    """The areas that pairs which have ended leave."""
    Area.spare[CUDA].clear()
    return Area.spare[CUDA]


class PipeStore:
    """Of two processes with a pipe between them."""

    def __init__(self, pipe):
        self.pipe, self.values = pipe, {}

    def set(self, key, value):
        self.pipe.send((key, value))

    def get(self, key):
        while key not in self.values:
            assert self.pipe.poll(PATIENCE_S)
            name, value = self.pipe.recv()
            self.values[name] = value
        return self.values[key]


def read_frames(pipe, sizes):
    """A receiving process: gives what arrived."""
    store = PipeStore(pipe)
    assert are_on_one_device(store, RECEIVER_RANK, CUDA)
    group = DeviceGroup(store, CUDA, is_sender=False)
    for size in sizes:
        frame = torch.empty(size, dtype=torch.uint8, device=CUDA)
        group.recv([frame], SENDER_RANK, 0)
        pipe.send_bytes(frame.cpu().numpy().tobytes())
    pipe.recv()


@contextmanager
def reading(sizes):
    """The pipe to such a process."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=read_frames, args=(theirs, sizes))
    process.start()
    theirs.close()
    try:
        yield ours
        ours.send("done")
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def test_frames_of_any_size_arrive_byte_for_byte(spare):
    draw = random.Random(5)
    sizes = [1, 7, SLOT_BYTES, SLOT_BYTES + 1, (2 * NUM_SLOTS + 1) * SLOT_BYTES + 3]
    sizes += [draw.randrange(1, SLOT_BYTES) for _ in range(3 * NUM_SLOTS)]
    numbers = []
    for _ in range(2):  # the second pair takes the area of the first, and numbers its parts on
        with reading(sizes) as pipe:
            store = PipeStore(pipe)
            assert are_on_one_device(store, SENDER_RANK, CUDA)
            group = DeviceGroup(store, CUDA, is_sender=True)
            for size in sizes:
                frame = draw.randbytes(size)
                group.send([torch.frombuffer(bytearray(frame), dtype=torch.uint8).to(CUDA)], RECEIVER_RANK, 0)
                assert pipe.recv_bytes() == frame
            group.abort()
        (area,) = spare
        numbers.append(area.number)
    num_parts = sum(-(-size // SLOT_BYTES) for size in sizes)
    assert numbers == [NUM_SLOTS + num_parts, NUM_SLOTS + 2 * num_parts]


def test_a_sender_waits_for_slots_and_not_for_ever(monkeypatch):
    class Nobody:
        def set(self, key, value):
            pass

    monkeypatch.setattr(dist_stream, "TIMEOUT_S", 0.2)
    group = DeviceGroup(Nobody(), CUDA, is_sender=True)
    frame = torch.zeros(10, dtype=torch.uint8, device=CUDA)
    for _ in range(NUM_SLOTS):
        group.send([frame], RECEIVER_RANK, 0)
    with pytest.raises(TransferError, match="moved nothing for too long"):
        group.send([frame], RECEIVER_RANK, 0)


def test_what_is_no_area_is_not_opened():
    """Nor leads to anything but an error of the kinds that a pair ends with."""
    told = unpack(Area.taken(CUDA).packed_handle, MAX_HANDLE_BYTES)
    wrong = [told[:-1], [*told, 1], ["1", *told[1:]], [0, *told[1:]]]
    wrong += [[*told[:place], other, *told[place + 1 :]] for place in range(2, 8) for other in ("text", -1, 1.5, [])]
    wrong += [[*told[:3], size, *told[4:]] for size in (AREA_BYTES - 1, AREA_BYTES + 1)]
    for fields in wrong:
        with pytest.raises(TransferError):
            Area.opened(pack(fields), CUDA)
    with pytest.raises(RuntimeError):  # of CUDA: it is this process's own
        Area.opened(pack(told), CUDA)
