"""KV blocks between two processes on one device, where NCCL has no group."""

import asyncio
import multiprocessing
import random
import signal
from contextlib import contextmanager

import pytest
import torch

from kv_transfer.receiver import KVReceiver
from kv_transfer.results import TransferError
from kv_transfer.sender import KVSender, Sent, TransferFailed
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
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from kv_transfer.transports.torch_pair import RECEIVER_RANK, SENDER_RANK
from kv_transfer.wire import pack, unpack
from tests.unit.kv_transfer.torch_dist_kit import bytes_of, tensor_store
from tests.unit.kv_transfer.torch_dist_processes import ANY_PORT, BIG_IDS, descriptor_of, leaving, peer_process
from tests.unit.kv_transfer.transfer_kit import (
    BIG_LAYOUT,
    BIG_NUM_BLOCKS,
    PATIENCE_S,
    Once,
    grant,
    line_from,
    run,
    until,
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


def test_transfers_to_one_process_after_the_other(spare):
    source = tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=6, device=CUDA)

    async def scenario():
        for _ in range(2):
            sender = KVSender(TorchDistDialer(CUDA), source, deadline_s=PATIENCE_S)
            async with peer_process("receive", ANY_PORT, "cuda") as process:
                for _ in range(2):
                    sent = Once()
                    sender.start(await descriptor_of(process), sent).finish(BIG_IDS, b"tail")
                    assert isinstance(await sent.result(), Sent)
                    assert await line_from(process) == "Received"
            await sender.close()
            assert len(spare) == 1

    run(scenario())


@pytest.mark.nightly
def test_the_receiving_process_is_killed_and_another_takes_its_place(spare):
    source = tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=6, device=CUDA)

    async def scenario():
        sender = KVSender(TorchDistDialer(CUDA), source, deadline_s=PATIENCE_S)
        async with peer_process("receive", ANY_PORT, "cuda") as process:
            sent, has_begun = Once(), asyncio.Event()
            sending = sender.start(await descriptor_of(process), sent, has_begun.set)
            sending.blocks_ready(BIG_IDS[:1])
            await has_begun.wait()
            process.send_signal(signal.SIGSTOP)
            sending.finish(BIG_IDS, b"tail")
            await asyncio.sleep(0.02)
            assert not sent.is_done
            process.kill()
            assert (await sent.result()).message == "the receiver is gone"
        await until(lambda: len(spare) == 1)
        async with peer_process("receive", ANY_PORT, "cuda") as process:
            sent = Once()
            sender.start(await descriptor_of(process), sent).finish(BIG_IDS, b"tail")
            assert isinstance(await sent.result(), Sent)
            assert await line_from(process) == "Received"
            assert not spare, "it has an area of its own"
        await sender.close()

    run(scenario())


def test_the_sending_process_is_killed_and_another_takes_its_place():
    target = tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, device=CUDA)
    half = BIG_IDS[: BIG_NUM_BLOCKS // 2]
    expected = bytes_of(tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=1), half)

    async def scenario():
        receiver = KVReceiver(TorchDistListener(ANY_PORT, CUDA), target)
        for num_killed in range(2):
            received = Once()
            descriptor = grant(receiver, BIG_IDS, received)
            num_bytes = receiver.num_bytes + len(expected)
            async with peer_process("send", descriptor.encode().hex(), "cuda"):
                await until(lambda num_bytes=num_bytes: receiver.num_bytes == num_bytes)
            assert bytes_of(target, half) == expected
            receiver.cancel(descriptor.epoch)
            assert isinstance(await received.result(), TransferFailed), num_killed
        await receiver.close()

    run(scenario())


@pytest.mark.nightly
def test_a_process_that_closes_nothing_ends_cleanly():
    run(leaving(CUDA))
