"""One end of a transfer between two pools over torch.distributed, in a process of its own.

`receive ENDPOINT DEVICE` prints a descriptor in hex for each line of its input, and what it ended with.
`send TICKET DEVICE` sends the first half of the blocks and never the rest.
`leave TICKET DEVICE` does so and then ends without closing anything.
"""

import asyncio
import sys

import torch

from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from tests.unit.kv_transfer.torch_dist_kit import tensor_store
from tests.unit.kv_transfer.transfer_kit import BIG_LAYOUT, BIG_NUM_BLOCKS, PATIENCE_S, grant, until


def tell(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def receive(endpoint, device):
    store = tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, device=device)
    receiver = KVReceiver(TorchDistListener(endpoint, device), store)
    while await asyncio.to_thread(sys.stdin.readline):
        descriptor = grant(receiver, range(BIG_NUM_BLOCKS), lambda result: tell(type(result).__name__))
        tell(descriptor.encode().hex())
    await receiver.close()


async def send(descriptor, device, seconds):
    store = tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=1, device=device)
    sender = KVSender(TorchDistDialer(device), store, deadline_s=PATIENCE_S)
    transfer = sender.start(bytes.fromhex(descriptor), print)
    transfer.blocks_ready(range(BIG_NUM_BLOCKS // 2))
    await until(lambda: sender.num_messages)
    await asyncio.sleep(seconds)


if __name__ == "__main__":
    role, argument, device = sys.argv[1], sys.argv[2], torch.device(sys.argv[3])
    seconds = 0.0 if role == "leave" else 600.0
    asyncio.run(receive(argument, device) if role == "receive" else send(argument, device, seconds))
