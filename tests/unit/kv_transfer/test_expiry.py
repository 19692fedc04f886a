"""Grants end with their time to live on either event loop: uvloop's timers may ring up to a millisecond early."""

import asyncio

import pytest
import uvloop

from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.transports.loopback import LoopbackNetwork
from tests.unit.kv_transfer.transfer_kit import LAYOUT, ByteStore, grant

NUM_GRANTS = 100


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_every_grant_expires(run):
    async def grant_and_wait():
        receiver = KVReceiver(LoopbackNetwork().listener("decode"), ByteStore(LAYOUT, 1))
        results = []
        for _ in range(NUM_GRANTS):
            grant(receiver, [0], results.append, ttl_s=0.3)
            await asyncio.sleep(0.0007)
        async with asyncio.timeout(60):
            while receiver.num_open:
                await asyncio.sleep(0.01)
        await receiver.close()
        return results

    assert [result.reason for result in run(grant_and_wait())] == ["TRANSFER_FAILED"] * NUM_GRANTS
