"""Whatever becomes of the process at the other end, frames come back, no wait is without end and nothing more is
written."""

import asyncio
import signal
import subprocess
from contextlib import asynccontextmanager

import pytest

from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender, Sent, TransferFailed
from kv_transfer.transports import dist_stream, zmq
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from tests import forked
from tests.effort import few
from tests.unit.kv_transfer import torch_dist_processes
from tests.unit.kv_transfer.torch_dist_kit import CPU, HostDialer, bytes_of, tensor_store
from tests.unit.kv_transfer.torch_dist_processes import ANY_PORT, BIG_IDS, descriptor_of, leaving
from tests.unit.kv_transfer.transfer_kit import (
    BIG_LAYOUT,
    BIG_NUM_BLOCKS,
    PATIENCE_S,
    ByteStore,
    Once,
    grant,
    line_from,
    peer_process,
    run,
    until,
)

PEER = "tests.unit.kv_transfer.transfer_peer"
of_processes = pytest.mark.parametrize("zmq_fabric", few(["tcp", "shm", "ipc"], "tcp"), indirect=True)

# ---- over ZeroMQ ----


@asynccontextmanager
async def receiving_process(fabric):
    """The process and its descriptor."""
    endpoint = f"ipc://{fabric.folder}/peer" if fabric.kind == "ipc" else "tcp://127.0.0.1:*"
    async with peer_process(PEER, "receive", endpoint, fabric.kind) as process:
        yield process, bytes.fromhex(await line_from(process))


@of_processes
def test_the_receiving_process_is_killed(zmq_fabric):
    """Stopped first, so that frames are stuck on their way, which the sender must get back."""
    source, ids = ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=15), range(BIG_NUM_BLOCKS)

    async def scenario():
        async with receiving_process(zmq_fabric) as (process, descriptor):
            sender, sent = KVSender(zmq_fabric.dialer(), source, deadline_s=PATIENCE_S), Once()
            await zmq_fabric.meet(sender.transport, TransferDescriptor.decode(descriptor).ends[0].address)
            sending = sender.start(descriptor, sent)
            sending.blocks_ready(ids[:1])
            await until(lambda: sender.num_messages)
            process.send_signal(signal.SIGSTOP)
            sending.finish(ids, b"tail")
            await until(lambda: source.is_held or zmq_fabric.kind == "shm")  # where the blocks may be free already
            assert not sent.is_done
            process.kill()
            assert (await sent.result()).message == "the receiver is gone"
            await sender.close()
            assert sender.num_open == 0

    run(scenario())


@of_processes
def test_the_receiving_process_hangs(zmq_fabric, monkeypatch):
    """A cancelled transfer waits for its frames, and gets them back when nothing has moved for a while."""
    source, ids = ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=15), range(BIG_NUM_BLOCKS)

    async def scenario():
        async with receiving_process(zmq_fabric) as (process, descriptor):
            held, has_begun = [], asyncio.Event()
            sender, sent = KVSender(zmq_fabric.dialer(), source, deadline_s=PATIENCE_S), Once()
            await zmq_fabric.meet(sender.transport, TransferDescriptor.decode(descriptor).ends[0].address)
            sending = sender.start(
                descriptor, lambda result: (held.append(source.is_held), sent(result)), has_begun.set
            )
            sending.blocks_ready(ids[:1])
            await has_begun.wait()
            monkeypatch.setattr(zmq, "TIMEOUT_MS", 1000)  # of a connection that stands
            process.send_signal(signal.SIGSTOP)
            sending.finish(ids, b"tail")
            await until(lambda: source.is_held or zmq_fabric.kind == "shm")  # where the blocks may be free already
            sending.cancel()
            assert "cancelled" in (await sent.result()).message
            assert held == [False]
            await sender.close()

    run(scenario())


@of_processes
def test_the_sending_process_is_killed(zmq_fabric):
    target, ids = ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS), range(BIG_NUM_BLOCKS)

    async def scenario():
        receiver, received = KVReceiver(zmq_fabric.listener(), target), Once()
        descriptor = grant(receiver, ids, received)
        async with peer_process(PEER, "send", descriptor.encode().hex(), zmq_fabric.kind):
            await until(lambda: receiver.num_bytes)
        receiver.cancel(descriptor.epoch)
        assert isinstance(await received.result(), TransferFailed)
        frozen = target.bytes_of(ids)
        await asyncio.sleep(0.02)
        assert target.bytes_of(ids) == frozen
        await receiver.close()
        assert receiver.num_open == 0

    run(scenario())


def test_a_dialer_dials_with_the_spares():
    """In a process of its own: libzmq would end this one."""
    with forked.popen("tests.unit.kv_transfer.spares_dialer", stdout=subprocess.PIPE) as process:
        told, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, told) == (0, b"done\n")


# ---- over torch.distributed ----


def test_the_receiving_process_is_killed_over_torch_distributed():
    """While frames are on their way, which the sender must get back."""
    source = tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=6)

    async def scenario():
        async with torch_dist_processes.peer_process("receive", ANY_PORT, "cpu") as process:
            sender, sent = KVSender(TorchDistDialer(CPU), source, deadline_s=PATIENCE_S), Once()
            sending = sender.start(await descriptor_of(process), sent)
            sending.blocks_ready(BIG_IDS[:1])
            await until(lambda: sender.num_messages)
            process.send_signal(signal.SIGSTOP)
            num_messages = sender.num_messages
            sending.finish(BIG_IDS, b"tail")
            await until(lambda: sender.num_messages > num_messages)
            assert not sent.is_done
            process.kill()
            assert (await sent.result()).message == "the receiver is gone"
            await sender.close()
            assert sender.num_open == 0

    run(scenario())


def test_the_receiving_process_hangs_and_comes_back(monkeypatch):
    """The pair is dropped when nothing has moved for a while, which gives a cancelled transfer its frames back, and is
    made again for the next transfer."""
    source = ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=7)

    async def scenario():
        async with torch_dist_processes.peer_process("receive", ANY_PORT, "cpu") as process:
            held, sent, has_begun = [], Once(), asyncio.Event()
            sender = KVSender(HostDialer(), source, deadline_s=PATIENCE_S)
            first, second = await descriptor_of(process), await descriptor_of(process)
            sending = sender.start(first, lambda result: (held.append(source.is_held), sent(result)), has_begun.set)
            sending.blocks_ready(BIG_IDS[:1])
            await has_begun.wait()
            monkeypatch.setattr(dist_stream, "TIMEOUT_S", 1.0)  # of a pair that stands
            process.send_signal(signal.SIGSTOP)
            sending.finish(BIG_IDS, b"tail")
            await until(lambda: source.is_held)
            sending.cancel()
            assert "cancelled" in (await sent.result()).message
            assert held == [False]
            monkeypatch.undo()
            process.send_signal(signal.SIGCONT)
            sent = Once()
            sender.start(second, sent).finish(BIG_IDS, b"tail")
            assert isinstance(await sent.result(), Sent)
            while (outcome := await line_from(process)) != "Received":
                assert outcome, "the process has ended"
            await sender.close()
            assert not source.is_held

    run(scenario())


def test_the_sending_process_is_killed_and_another_takes_its_place():
    target = tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS)

    async def scenario():
        receiver = KVReceiver(TorchDistListener(ANY_PORT, CPU), target)
        for num_killed in range(2):
            received = Once()
            descriptor = grant(receiver, BIG_IDS, received)
            num_bytes = receiver.num_bytes
            async with torch_dist_processes.peer_process("send", descriptor.encode().hex(), "cpu"):
                await until(lambda num_bytes=num_bytes: receiver.num_bytes > num_bytes)
            receiver.cancel(descriptor.epoch)
            assert isinstance(await received.result(), TransferFailed), num_killed
        frozen = bytes_of(target, BIG_IDS)
        await asyncio.sleep(0.02)
        assert bytes_of(target, BIG_IDS) == frozen
        await receiver.close()

    run(scenario())


@pytest.mark.nightly
def test_a_process_that_closes_nothing_ends_cleanly():
    run(leaving(CPU))
