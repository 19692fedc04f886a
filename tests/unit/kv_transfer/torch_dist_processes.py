"""Processes at the other end of a pair of torch.distributed, for tests."""

import asyncio
import os
import sys
from contextlib import asynccontextmanager

from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.transports.torch_dist import TorchDistListener
from tests.unit.kv_transfer.torch_dist_kit import tensor_store
from tests.unit.kv_transfer.transfer_kit import BIG_LAYOUT, BIG_NUM_BLOCKS, Once, grant

ANY_PORT = "dist://127.0.0.1:*"
BIG_IDS = range(BIG_NUM_BLOCKS)


@asynccontextmanager
async def peer_process(*arguments):
    command = [sys.executable, "-m", "tests.unit.kv_transfer.torch_dist_peer", *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(*command, **pipes, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ticket_of(process):
    process.stdin.write(b"\n")
    return bytes.fromhex((await process.stdout.readline()).decode())


async def leaving(device):
    """Groups that are in use when the interpreter ends do not abort it."""
    receiver = KVReceiver(TorchDistListener(ANY_PORT, device), tensor_store(BIG_LAYOUT, BIG_NUM_BLOCKS, device=device))
    ticket = grant(receiver, BIG_IDS, Once())
    async with peer_process("leave", ticket.encode().hex(), device.type) as process:
        _, errors = await process.communicate()
        assert process.returncode == 0
        assert b"terminate" not in errors
    await receiver.close()
