"""One end of a transfer in a process of its own, to be killed.

`python -m tests.unit.kv_transfer.transfer_peer receive ENDPOINT KIND` prints its descriptor in hex and waits for
blocks; `python -m tests.unit.kv_transfer.transfer_peer send TICKET KIND` sends the first half of the blocks and never
the rest. The kind is a Fabric's."""

import asyncio
import sys

from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from tests.unit.kv_transfer.transfer_kit import BIG_LAYOUT, BIG_NUM_BLOCKS, PATIENCE_S, ByteStore, Fabric, grant


async def receive(endpoint, kind):
    receiver = KVReceiver(ZmqListener(endpoint, shares_memory=kind == "shm"), ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS))
    descriptor = grant(receiver, range(BIG_NUM_BLOCKS), print)
    sys.stdout.write(descriptor.encode().hex() + "\n")
    sys.stdout.flush()
    await asyncio.sleep(600)


async def send(descriptor, kind):
    dialer, packed = ZmqDialer(shares_memory=kind == "shm"), bytes.fromhex(descriptor)
    sender = KVSender(dialer, ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=1), deadline_s=PATIENCE_S)
    transfer = sender.start(packed, print)
    await Fabric(kind, None).meet(dialer, TransferDescriptor.decode(packed).ends[0].address)
    transfer.blocks_ready(range(BIG_NUM_BLOCKS // 2))
    await asyncio.sleep(600)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    asyncio.run(receive(*arguments) if role == "receive" else send(*arguments))
