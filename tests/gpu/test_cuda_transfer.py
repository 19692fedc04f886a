"""KV blocks that stay on their devices all the way: NCCL between pools, and checksums computed there."""

import asyncio

import pytest
import torch

from engine.cache.kv_pool import PagedKVPool
from kv_transfer.receiver import KVReceiver, Received
from kv_transfer.sender import KVSender, Sent
from kv_transfer.transports.tensor_payload import TensorPayload, TensorStore, device_checksum
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from serving_core.layout import KVLayout
from tests.unit.kv_transfer.transfer_kit import Once, grant, run, transfer

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
NUM_BLOCKS = 80

needs_two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL wants a device of its own for each rank, and there are not two here"
)


def random_pool(device):
    pool = PagedKVPool(LAYOUT, NUM_BLOCKS, torch.device(device))
    for layer in range(LAYOUT.num_layers):
        pool.keys(layer).normal_()
        pool.values(layer).normal_()
    return pool


def check_arrived(source, source_ids, target, target_ids):
    for layer in range(LAYOUT.num_layers):
        for sent, arrived in (
            (source.keys(layer), target.keys(layer)),
            (source.values(layer), target.values(layer)),
        ):
            assert torch.equal(sent[source_ids].cpu(), arrived[target_ids].cpu())


def test_a_device_computes_the_checksums_of_the_host():
    """tests/unit compares those with numpy."""
    pool = random_pool("cuda")
    views = pool.read_tensors(1, [3, 4, 5, 40, 7])
    assert TensorPayload().checksum(*views) == device_checksum(*(view.cpu() for view in views))


def test_frames_are_gathered_and_cut_on_the_device():
    store, payload = TensorStore(random_pool("cuda")), TensorPayload()
    views = store.read(2, [5, 6, 70, 9, 8])
    frames = payload.gather(views)
    whole = torch.cat(views)
    assert all(frame.is_cuda for frame in frames)
    assert torch.equal(torch.cat(frames), whole)
    pieces = payload.cut(frames, [4 * LAYOUT.cache_shape.num_bytes, 6 * LAYOUT.cache_shape.num_bytes])
    assert torch.equal(torch.cat(pieces), whole)


@needs_two_devices
def test_blocks_go_from_device_to_device():
    source, target = random_pool("cuda:0"), PagedKVPool(LAYOUT, NUM_BLOCKS, torch.device("cuda:1"))
    source_ids, target_ids = list(range(NUM_BLOCKS))[::-1], list(range(NUM_BLOCKS))

    async def scenario():
        sender = KVSender(TorchDistDialer(torch.device("cuda:0")), TensorStore(source), deadline_s=60.0)
        listener = TorchDistListener("dist://127.0.0.1:*", torch.device("cuda:1"))
        receiver = KVReceiver(listener, TensorStore(target))
        for _ in range(2):
            sent, received = await transfer(sender, receiver, source_ids, target_ids)
            assert (type(sent), type(received)) == (Sent, Received)
        await sender.close()
        await receiver.close()

    run(scenario())
    check_arrived(source, source_ids, target, target_ids)


@needs_two_devices
def test_a_receiver_that_closes_is_made_good_by_another():
    source, target = random_pool("cuda:0"), PagedKVPool(LAYOUT, NUM_BLOCKS, torch.device("cuda:1"))
    ids = list(range(NUM_BLOCKS))

    async def scenario():
        sender = KVSender(TorchDistDialer(torch.device("cuda:0")), TensorStore(source), deadline_s=60.0)
        for closes_early in (True, False):
            listener = TorchDistListener("dist://127.0.0.1:*", torch.device("cuda:1"))
            receiver = KVReceiver(listener, TensorStore(target))
            sent, received = Once(), Once()
            sending = sender.start(grant(receiver, ids, received).encode(), sent)
            if closes_early:
                sending.blocks_ready(ids[:1])
                await receiver.close()
            sending.finish(ids, b"tail")
            assert isinstance(await sent.result(), Sent) != closes_early
        await receiver.close()
        await sender.close()

    run(scenario())
    check_arrived(source, ids, target, ids)


@needs_two_devices
def test_two_devices_send_to_each_other_at_once():
    """Each end queues its sending before its receiving: on one stream both would wait for the other end for ever."""
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    pools = [random_pool(device) for device in devices]
    half = NUM_BLOCKS // 2
    source_ids, target_ids = list(range(half)), list(range(half, NUM_BLOCKS))

    async def scenario():
        senders = [
            KVSender(TorchDistDialer(device), TensorStore(pool), deadline_s=60.0)
            for device, pool in zip(devices, pools, strict=True)
        ]
        receivers = [
            KVReceiver(TorchDistListener("dist://127.0.0.1:*", device), TensorStore(pool))
            for device, pool in zip(devices, pools, strict=True)
        ]
        for _ in range(3):
            ways = [transfer(senders[0], receivers[1], source_ids, target_ids)]
            ways.append(transfer(senders[1], receivers[0], source_ids, target_ids))
            for sent, received in await asyncio.gather(*ways):
                assert (type(sent), type(received)) == (Sent, Received)
        for end in (*senders, *receivers):
            await end.close()

    run(scenario())
    check_arrived(pools[0], source_ids, pools[1], target_ids)
    check_arrived(pools[1], source_ids, pools[0], target_ids)
