"""Be the receiving process of `splitserve bench transfer`. What both processes need is here too.

`python -m splitserve_bench.transfer.peer FOLDER` reads commands, one JSON object a line on stdin, replies to each with
one on stdout, and ends with its stdin. FOLDER is for the files of its sockets.
"""

import asyncio
import json
import random
import socket
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from engine.cache.kv_pool import PagedKVPool
from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.payload import KVStore, Payload, blocks_per_message
from kv_transfer.receiver import KVReceiver, Received, TransferFailed
from kv_transfer.transports.tensor_payload import TensorStore
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from kv_transfer.transports.transport import Dialer, Listener
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from kv_transfer.transports.zmq_keys import Keyring
from serving_core.errors import SettingsError, SplitServeError
from serving_core.layout import KVLayout
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import SEED

ZMQ_SHM = "zmq-shm"  # as nodes of one machine do it; the other ZeroMQ transports share no memory
ZMQ_IPC, ZMQ_TCP, ZMQ_CURVE, GLOO = "zmq-ipc", "zmq-tcp", "zmq-curve", "torch_dist-gloo"
NCCL, CUDA_IPC = "torch_dist-nccl", "torch_dist-ipc"  # between two CUDA devices, and on one
BY_TORCH: Final = (GLOO, NCCL, CUDA_IPC)
CPU: Final = torch.device("cpu")
DEADLINE_S: Final = 60.0  # of one transfer, and of everything else that one end waits for
ACKNOWLEDGED: Final = b"."
MAX_LINE_BYTES: Final = 2**16


@dataclass(frozen=True, slots=True)
class Arrival:
    """One transfer at its receiver: CPU seconds from the credit to the last byte, and a digest of the blocks."""

    cpu_s: float
    digest: int


class Target:
    """Receive transfers into a KV pool, with a receiver for each transport.

    Belongs to the event loop it was made on.
    """

    def __init__(self, pool: PagedKVPool, listeners: Mapping[str, Listener]) -> None:
        self._pool = pool
        self._receivers = {name: KVReceiver(listener, store_of(name, pool)) for name, listener in listeners.items()}
        self._epoch = 0

    def expect(self, transport: str, num_blocks: int, is_scattered: bool) -> bytes:
        """Fill so many blocks with zeros, let a transfer write them, and return its encoded transfer descriptor.

        `is_scattered`: blocks anywhere in the pool instead of the first ones.
        """
        receiver = self._receivers[transport]
        block_ids = block_ids_of(num_blocks, self._pool.num_blocks, is_scattered)
        fill(self._pool, block_ids, is_random=False)
        self._epoch += 1
        descriptor = TransferDescriptor.draw(
            epoch=self._epoch,
            layout=self._pool.layout,
            prefill_tp=1,
            decode_tp=1,
            addresses=[receiver.address],
            num_blocks=len(block_ids),
            num_cached_blocks=0,
            ttl_s=DEADLINE_S,
        )
        self._transport, self._block_ids = transport, block_ids
        self._result: asyncio.Future[Received | TransferFailed] = asyncio.get_running_loop().create_future()
        receiver.expect(descriptor, block_ids, self._take)
        self._cpu_at_start_s = time.process_time()
        return descriptor.encode()

    async def arrival(self) -> Arrival:
        """Wait for the last expected transfer, and return its account. Raises BenchError when it failed."""
        result = await self._result
        if isinstance(result, TransferFailed):
            raise BenchError(f"a transfer over {self._transport} failed: {result.message}")
        receiver = self._receivers[self._transport]
        return Arrival(self._cpu_s, digest_of(receiver.store, receiver.transport.payload, self._block_ids))

    async def close(self) -> None:
        """Close all receivers."""
        for receiver in self._receivers.values():
            await receiver.close()

    def _take(self, result: Received | TransferFailed) -> None:
        self._cpu_s = time.process_time() - self._cpu_at_start_s
        self._result.set_result(result)


def check_device(transports: Sequence[str], device: str) -> None:
    """Raise SettingsError when a transport cannot transfer from such a device, or there are too few for it."""
    num_devices = torch.cuda.device_count()
    if device != CPU.type and not num_devices:
        raise SettingsError(f"--device {device}: there is no CUDA device here")
    if NCCL in transports and (device == CPU.type or num_devices < 2):
        raise SettingsError(f"{NCCL} moves blocks between two CUDA devices: --device cuda, where there are two")
    if CUDA_IPC in transports and (device == CPU.type or num_devices > 1):
        raise SettingsError(f"{CUDA_IPC} moves blocks on one CUDA device: --device cuda, where there is one")
    if GLOO in transports and device != CPU.type:
        raise SettingsError(f"{GLOO} moves blocks in host memory, and --device is {device}")


def device_of(name: str, *, is_sender: bool) -> torch.device:
    """Return the device of the sender's or the receiver's pool: of several CUDA devices each end has one."""
    return CPU if name == CPU.type else torch.device(name, 0 if is_sender else torch.cuda.device_count() - 1)


def listener_of(transport: str, folder: str, keys: Sequence[bytes], device: torch.device) -> Listener:
    """Return a new receiving end of a transport, which lets dialers with these keys connect.

    Socket files are in `folder`.
    """
    if transport in BY_TORCH:
        return TorchDistListener("dist://127.0.0.1:*", device)
    endpoint = f"ipc://{folder}/kv.sock" if transport == ZMQ_IPC else "tcp://127.0.0.1:*"
    keyring = Keyring() if transport == ZMQ_CURVE else None
    listener = ZmqListener(endpoint, keyring, shares_memory=transport == ZMQ_SHM)
    listener.allow(keys)
    return listener


def dialer_of(transport: str, device: torch.device) -> Dialer:
    """Return a new sending end of a transport, for the receiving end that `listener_of` makes."""
    return TorchDistDialer(device) if transport in BY_TORCH else ZmqDialer(shares_memory=transport == ZMQ_SHM)


def store_of(transport: str, pool: PagedKVPool) -> KVStore:
    """Return the pool in the form in which the transport reads and writes it: as tensors, or as bytes."""
    return TensorStore(pool) if transport in BY_TORCH else pool


def block_ids_of(num_blocks: int, pool_blocks: int, is_scattered: bool) -> list[int]:
    """Return `num_blocks` block ids of a pool: the first ones, or random ones, which are the same in every process."""
    return random.Random(SEED).sample(range(pool_blocks), num_blocks) if is_scattered else [*range(num_blocks)]


def fill(pool: PagedKVPool, block_ids: Sequence[int], *, is_random: bool) -> None:
    """Write zeros to these blocks, or random bytes that differ by layer and are the same in every process."""
    num_bytes = 2 * len(block_ids) * pool.layout.cache_shape.num_bytes
    caches = random.Random(SEED).randbytes(num_bytes) if is_random else bytes(num_bytes)
    for layer in pool.layout.layers:
        shift = 64 * layer % num_bytes if is_random else 0
        shifted = memoryview(caches[shift:] + caches[:shift])
        pool.write(layer, block_ids, shifted[: num_bytes // 2], shifted[num_bytes // 2 :])


def digest_of(store: KVStore, payload: Payload, block_ids: Sequence[int]) -> int:
    """Return a digest of these blocks, made of the checksums that a transfer would send."""
    digest, part_blocks = 0, blocks_per_message(store.layout)
    for layer in store.layout.layers:
        for first in range(0, len(block_ids), part_blocks):
            checksum = payload.checksum(*store.read(layer, block_ids[first : first + part_blocks]))
            digest = zlib.crc32(checksum.to_bytes(8), digest)
    return digest


async def reply_to(target: Target, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out a command that is a JSON object, and return the reply's fields.

    `expect` (a transport) with `num_blocks` and `is_scattered` gives a transfer descriptor in hex digits, `arrival` the
    fields of Arrival. Raises BenchError for another command, and when a transfer failed.
    """
    match command:
        case {"expect": transport, "num_blocks": num_blocks, "is_scattered": is_scattered}:
            return {"descriptor": target.expect(transport, num_blocks, is_scattered).hex()}
        case {"arrival": True}:
            return asdict(await target.arrival())
        case _:
            raise BenchError("a command that the receiving process does not know")


def receive_plainly(num_bytes: int) -> None:
    """Write the address of a plain TCP socket to stdout, receive so many bytes there, and acknowledge them.

    Raises BenchError when the connection ends too early.
    """
    sink = memoryview(bytearray(b"\1") * num_bytes)  # which touches its pages
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE_S)
        write_line({"address": listening.getsockname()})
        connection, _ = listening.accept()
    with connection:
        connection.settimeout(DEADLINE_S)
        while sink:
            count = connection.recv_into(sink)
            if not count:
                raise BenchError("a plain socket was closed too early")
            sink = sink[count:]
        connection.sendall(ACKNOWLEDGED)


def write_line(fields: Mapping[str, Any]) -> None:
    """Write a reply, as one line of JSON, to stdout."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _open(folder: str, command: Mapping[str, Any]) -> Target:
    device = device_of(command["device"], is_sender=False)
    pool = PagedKVPool(KVLayout.uniform(**command["open"]), command["pool_blocks"], device)
    keys = [*map(bytes.fromhex, command["keys"])]
    return Target(pool, {name: listener_of(name, folder, keys, device) for name in command["transports"]})


async def _obey(folder: str) -> None:
    """Run commands until stdin ends: the first opens the pool, each other one is about a transfer or a yardstick."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    target: Target | None = None
    while line := await reader.readline():
        command = json.loads(line)
        try:
            if target is None:
                target = _open(folder, command)
                write_line({})
            elif "plain_bytes" in command:
                receive_plainly(command["plain_bytes"])
            else:
                write_line(await reply_to(target, command))
        except SplitServeError as error:
            write_line({"error": str(error)})
    if target is not None:
        await target.close()
    pipe.close()


if __name__ == "__main__":
    asyncio.run(_obey(sys.argv[1]))
