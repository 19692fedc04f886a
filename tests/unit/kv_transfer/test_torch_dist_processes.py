"""Whatever becomes of the process at the other end of a pair of torch.distributed, frames come back and pairs are made
again."""

import asyncio
import signal

from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.ends.sender import KVSender, Sent, TransferFailed
from kv_transfer.transports import dist_stream
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from tests.unit.kv_transfer.torch_dist_kit import CPU, HostDialer, bytes_of, tensor_store
from tests.unit.kv_transfer.torch_dist_processes import ANY_PORT, BIG_IDS, leaving, peer_process, ticket_of
from tests.unit.kv_transfer.transfer_kit import (
    BIG_LAYOUT,
    BIG_NUM_BLOCKS,
    PATIENCE_S,
    ByteStore,
    Once,
    grant,
    run,
    until,
)


def test_the_receiving_process_is_killed():
    """While frames are on their way, which the sender must get back."""
    source = tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=6)

    async def scenario():
        async with peer_process("receive", ANY_PORT, "cpu") as process:
            sender, sent = KVSender(TorchDistDialer(CPU), source, deadline_s=PATIENCE_S), Once()
            sending = sender.start(await ticket_of(process), sent)
            sending.blocks_ready(BIG_IDS[:1])
            await until(lambda: sender.num_messages)
            process.send_signal(signal.SIGSTOP)
            sending.finish(BIG_IDS, b"tail")
            await asyncio.sleep(0.02)
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
        async with peer_process("receive", ANY_PORT, "cpu") as process:
            held, sent, has_begun = [], Once(), asyncio.Event()
            sender = KVSender(HostDialer(), source, deadline_s=PATIENCE_S)
            first, second = await ticket_of(process), await ticket_of(process)
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
            while await process.stdout.readline() != b"Received\n":
                assert not process.stdout.at_eof()
            await sender.close()
            assert not source.is_held

    run(scenario())


def test_the_sending_process_is_killed_and_another_takes_its_place():
    target = tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS)

    async def scenario():
        receiver = KVReceiver(TorchDistListener(ANY_PORT, CPU), target)
        for num_killed in range(2):
            received = Once()
            ticket = grant(receiver, BIG_IDS, received)
            num_bytes = receiver.num_bytes
            async with peer_process("send", ticket.encode().hex(), "cpu"):
                await until(lambda num_bytes=num_bytes: receiver.num_bytes > num_bytes)
            receiver.cancel(ticket.epoch)
            assert isinstance(await received.result(), TransferFailed), num_killed
        frozen = bytes_of(target, BIG_IDS)
        await asyncio.sleep(0.02)
        assert bytes_of(target, BIG_IDS) == frozen
        await receiver.close()

    run(scenario())


def test_a_process_that_closes_nothing_ends_cleanly():
    run(leaving(CPU))
