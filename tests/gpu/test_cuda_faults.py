"""What strikes a pair of processes between which KV blocks go from device to device, and how it is made again.

Over CUDA IPC both are on one device, over NCCL each has its own. The simulated device shows what our code does. Only a
card shows whether NCCL lets go: that aborting ends a kernel which waits for the other end, that a killed process costs
no driver reset, and that memory comes back. `python -m splitserve_bench.device` runs this file there.
"""

import asyncio
import signal

import pytest
import torch

from kv_transfer.receiver import KVReceiver, Received
from kv_transfer.sender import KVSender, Sent, TransferFailed
from kv_transfer.transports import dist_stream, torch_pair
from kv_transfer.transports.cuda_ipc import Area
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from kv_transfer.transports.torch_pair import RECEIVER_RANK, SENDER_RANK, Pair
from tests.gpu.devices import need_devices
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
    transfer,
    until,
)

HERE = torch.device("cuda", 0)
HALF = BIG_IDS[: BIG_NUM_BLOCKS // 2]


@pytest.fixture(params=["ipc", "nccl"])
def there(request):
    """The device of the other process."""
    if request.param == "nccl":
        need_devices(2)
    return torch.device("cuda", int(request.param == "nccl"))


@pytest.fixture(autouse=True)
def spare():
    """The areas that pairs over CUDA IPC which have ended leave."""
    Area.spare[HERE].clear()
    return Area.spare[HERE]


def blocks_here():
    return tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=6, device=HERE)


async def check_sent(sender, process):
    """All blocks arrive in the process."""
    sent = Once()
    sender.start(await descriptor_of(process), sent).finish(BIG_IDS, b"tail")
    assert isinstance(await sent.result(), Sent)
    assert await line_from(process) == "Received"


def test_transfers_to_one_process_after_the_other(spare, there):
    source = blocks_here()

    async def scenario():
        for _ in range(2):
            sender = KVSender(TorchDistDialer(HERE), source, deadline_s=PATIENCE_S)
            async with peer_process("receive", ANY_PORT, str(there)) as process:
                for _ in range(2):
                    await check_sent(sender, process)
            await sender.close()
            assert len(spare) == (there == HERE)

    run(scenario())


@pytest.mark.nightly
@pytest.mark.parametrize("ends", ["killed", "hangs"])
def test_the_receiving_process_is_lost_and_another_takes_its_place(spare, there, ends, monkeypatch):
    """While frames are on their way."""
    source = blocks_here()

    async def scenario():
        sender = KVSender(TorchDistDialer(HERE), source, deadline_s=PATIENCE_S)
        async with peer_process("receive", ANY_PORT, str(there)) as process:
            sent, has_begun = Once(), asyncio.Event()
            sending = sender.start(await descriptor_of(process), sent, has_begun.set)
            sending.blocks_ready(BIG_IDS[:1])
            await has_begun.wait()
            process.send_signal(signal.SIGSTOP)
            if ends == "hangs":
                monkeypatch.setattr(dist_stream, "TIMEOUT_S", 1.0)  # of a pair that stands
            sending.finish(BIG_IDS, b"tail")
            await asyncio.sleep(0.02)
            assert not sent.is_done
            if ends == "hangs":
                sending.cancel()
                assert "cancelled" in (await sent.result()).message
                monkeypatch.undo()
            else:
                process.kill()
                assert (await sent.result()).message == "the receiver is gone"
        await until(lambda: sender.num_open == 0 and len(spare) == (there == HERE))
        async with peer_process("receive", ANY_PORT, str(there)) as process:
            await check_sent(sender, process)
            assert not spare, "it has an area of its own"
        await sender.close()

    run(scenario())


def test_the_sending_process_is_killed_and_another_takes_its_place(there):
    target = tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, device=HERE)
    expected = bytes_of(tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=1), HALF)

    async def scenario():
        receiver = KVReceiver(TorchDistListener(ANY_PORT, HERE), target)
        for num_killed in range(2):
            received = Once()
            descriptor = grant(receiver, BIG_IDS, received)
            num_bytes = receiver.num_bytes + len(expected)
            async with peer_process("send", descriptor.encode().hex(), str(there)):
                await until(lambda num_bytes=num_bytes: receiver.num_bytes == num_bytes)
            assert bytes_of(target, HALF) == expected
            receiver.cancel(descriptor.epoch)
            assert isinstance(await received.result(), TransferFailed), num_killed
        await receiver.close()

    run(scenario())


def test_a_receiver_without_memory_for_a_message_gets_it_again(monkeypatch, caplog):
    """The pair ends, another is made, and the transfer goes on."""
    need_devices(2)
    other = torch.device("cuda", 1)
    source, target = blocks_here(), tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, device=other)
    failing, empty = ["once"], torch.empty

    def bounded(size, **options):
        if failing and options.get("device") == other and size > 1:
            failing.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(size, **options)

    async def scenario():
        sender = KVSender(TorchDistDialer(HERE), source, deadline_s=PATIENCE_S)
        receiver = KVReceiver(TorchDistListener(ANY_PORT, other), target)
        monkeypatch.setattr(torch, "empty", bounded)
        sent, received = await transfer(sender, receiver, BIG_IDS, BIG_IDS)
        assert (type(sent), type(received)) == (Sent, Received)
        await sender.close()
        await receiver.close()

    run(scenario())
    assert "the group of a pair of ranks broke: CUDA out of memory" in caplog.text
    assert bytes_of(target, BIG_IDS) == bytes_of(source, BIG_IDS)


@pytest.mark.parametrize("ends", ["stopped", "given up"])
def test_a_pair_whose_other_end_stays_silent_ends(ends, monkeypatch):
    """The other end said that its device is another one, and then nothing: the sender waits for NCCL's first value."""
    monkeypatch.setattr(torch_pair, "NCCL_TIMEOUT_S", 0.5 if ends == "given up" else PATIENCE_S)

    async def scenario():
        told = []
        pair = Pair(SENDER_RANK, HERE, "127.0.0.1", lambda key, value: told.append(key))
        pair.put(f"device {RECEIVER_RANK}", b"another device")
        await until(lambda: told)
        if ends == "stopped":
            pair.stop()
        await asyncio.wait_for(pair.ended, PATIENCE_S)
        assert not pair.ready.done()

    run(scenario())


@pytest.mark.nightly
def test_a_process_that_closes_nothing_ends_cleanly(there):
    run(leaving(there))
