"""Processes at the other end of a transfer over torch.distributed."""

import asyncio
import subprocess
import sys

from kv_transfer.receiver import KVReceiver
from kv_transfer.transports.torch_dist import TorchDistListener
from tests.unit.kv_transfer import transfer_kit
from tests.unit.kv_transfer.torch_dist_kit import tensor_store
from tests.unit.kv_transfer.transfer_kit import BIG_LAYOUT, BIG_NUM_BLOCKS, Once, grant, line_from

PEER = "tests.unit.kv_transfer.torch_dist_peer"
ANY_PORT = "dist://127.0.0.1:*"
BIG_IDS = range(BIG_NUM_BLOCKS)


def peer_process(*arguments):
    return transfer_kit.peer_process(PEER, *arguments)


async def descriptor_of(process):
    process.stdin.write(b"\n")
    process.stdin.flush()
    return bytes.fromhex(await line_from(process))


async def leaving(device):
    """Check that groups which are in use when the interpreter ends do not abort it."""
    receiver = KVReceiver(TorchDistListener(ANY_PORT, device), tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, device=device))
    descriptor = grant(receiver, BIG_IDS, Once())
    command = [sys.executable, "-m", PEER, "leave", descriptor.encode().hex(), device.type]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True)
    assert ended.returncode == 0
    assert b"terminate" not in ended.stderr
    await receiver.close()
