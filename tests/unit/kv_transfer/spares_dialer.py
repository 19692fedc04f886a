"""A process that has spare file descriptors alone, the first connection that it dials, and the transfer over it."""

import sys

from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from serving_core.net.descriptors import Spares
from tests.unit.kv_transfer.transfer_kit import LAYOUT, PATIENCE_S, ByteStore, check_arrived, run, transfer
from tests.unit.serving_core.scarcity import no_descriptors_left


async def dial():
    source, target = ByteStore(LAYOUT, 4, seed=1), ByteStore(LAYOUT, 4)
    spares = Spares()
    receiver = KVReceiver(ZmqListener("tcp://127.0.0.1:*"), target)
    sender = KVSender(ZmqDialer(spares=spares), source, deadline_s=PATIENCE_S)
    spares.hold()
    with no_descriptors_left():
        results = await transfer(sender, receiver, range(4), range(4))
    check_arrived(source, range(4), target, range(4), results)
    await sender.close()
    await receiver.close()


if __name__ == "__main__":
    run(dial())
    sys.stdout.write("done\n")
