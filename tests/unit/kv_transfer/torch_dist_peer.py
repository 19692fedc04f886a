"""One end of a transfer between two pools over torch.distributed, in a process of its own.

`receive ENDPOINT` prints a ticket in hex for each line of its input, and "received" or why not when it has ended.
`send TICKET` sends the first half of the blocks and never the rest.
`leave TICKET` does so and then ends without closing anything.
"""

import asyncio
import sys

from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.ends.sender import KVSender
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from tests.unit.kv_transfer.torch_dist_kit import CPU, tensor_store
from tests.unit.kv_transfer.transfer_kit import BIG_LAYOUT, BIG_NUM_BLOCKS, PATIENCE_S, grant, until


def tell(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def receive(endpoint):
    receiver = KVReceiver(TorchDistListener(endpoint, CPU), tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS))
    while await asyncio.to_thread(sys.stdin.readline):
        ticket = grant(receiver, range(BIG_NUM_BLOCKS), lambda result: tell(type(result).__name__))
        tell(ticket.encode().hex())
    await receiver.close()


async def send(ticket, seconds):
    store = tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=1)
    sender = KVSender(TorchDistDialer(CPU), store, deadline_s=PATIENCE_S)
    transfer = sender.start(bytes.fromhex(ticket), print)
    transfer.blocks_ready(range(BIG_NUM_BLOCKS // 2))
    await until(lambda: sender.num_messages > 2)
    await asyncio.sleep(seconds)


if __name__ == "__main__":
    role, argument = sys.argv[1:]
    asyncio.run(receive(argument) if role == "receive" else send(argument, 0.0 if role == "leave" else 600.0))
