"""One end of a transfer in a process of its own, to be killed.

`python -m tests.unit.kv_transfer.transfer_peer receive ENDPOINT` prints its ticket in hex and waits for blocks;
`python -m tests.unit.kv_transfer.transfer_peer send TICKET` sends the first half of the blocks and never the rest.
"""

import asyncio
import sys

from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.ends.sender import KVSender
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from tests.unit.kv_transfer.transfer_kit import BIG_LAYOUT, BIG_NUM_BLOCKS, ByteStore, grant


async def receive(endpoint):
    receiver = KVReceiver(ZmqListener(endpoint), ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS))
    ticket = grant(receiver, range(BIG_NUM_BLOCKS), print, ttl_s=60.0)
    sys.stdout.write(ticket.encode().hex() + "\n")
    sys.stdout.flush()
    await asyncio.sleep(600)


async def send(ticket):
    sender = KVSender(ZmqDialer(), ByteStore(BIG_LAYOUT, BIG_NUM_BLOCKS, seed=1), deadline_s=60.0)
    transfer = sender.start(bytes.fromhex(ticket), print)
    transfer.blocks_ready(range(BIG_NUM_BLOCKS // 2))
    await asyncio.sleep(600)


if __name__ == "__main__":
    role, argument = sys.argv[1:]
    asyncio.run(receive(argument) if role == "receive" else send(argument))
