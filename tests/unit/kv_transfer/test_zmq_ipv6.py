"""ZeroMQ's transport at addresses of IPv6."""

import psutil
import pytest

from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.ends.sender import KVSender
from kv_transfer.transports.curve import Keyring
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from tests.unit.kv_transfer.transfer_kit import LAYOUT, PATIENCE_S, ByteStore, check_arrived, run, transfer

ADDRESSES = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
IDS = [2, 0, 3]


@pytest.mark.skipif("::1" not in ADDRESSES, reason="there is no IPv6 loopback here")
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_blocks_arrive(is_encrypted):
    source, target = ByteStore(LAYOUT, 4, seed=1), ByteStore(LAYOUT, 4)

    async def scenario():
        keyring = Keyring() if is_encrypted else None
        listener, dialer = ZmqListener("tcp://[::1]:*", keyring), ZmqDialer(Keyring())
        listener.allow([dialer.key])
        assert "://[::1]:" in listener.address
        sender, receiver = KVSender(dialer, source, deadline_s=PATIENCE_S), KVReceiver(listener, target)
        check_arrived(source, IDS, target, IDS, await transfer(sender, receiver, IDS, IDS))
        await sender.close()
        await receiver.close()

    run(scenario())
