"""The receiving end of `splitserve bench transfer`, and what both ends share.

`python -m splitserve_bench.corridor.transfer_peer FOLDER` is the receiving process. It obeys commands, one JSON object
a line on stdin, answers each with one on stdout, and ends with its stdin. FOLDER is for the files of its sockets.
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
from pathlib import Path
from typing import Any, Final

import torch
from xxhash import xxh3_64_intdigest

from engine.cache.kv_pool import PagedKVPool
from kv_transfer.ends.receiver import KVReceiver, Received, TransferFailed
from kv_transfer.payload import KVStore, Payload, blocks_per_message
from kv_transfer.ticket import Ticket
from kv_transfer.transports.curve import Keyring
from kv_transfer.transports.tensor_payload import TensorStore
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from kv_transfer.transports.transport import Dialer, Listener
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from serving_core.errors import SettingsError, SplitServeError
from serving_core.layout import KVLayout
from splitserve_bench.corridor.yardsticks import CHECKED_BYTES
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import SEED

ZMQ_SHM = "zmq-shm"  # as nodes of one machine do it; the others of ZeroMQ share no memory
ZMQ_IPC, ZMQ_TCP, ZMQ_CURVE, GLOO, LOOPBACK = "zmq-ipc", "zmq-tcp", "zmq-curve", "torch_dist-gloo", "loopback"
NCCL, CUDA_IPC = "torch_dist-nccl", "torch_dist-ipc"
TRANSPORTS: Final = (ZMQ_SHM, ZMQ_IPC, ZMQ_TCP, ZMQ_CURVE, GLOO, LOOPBACK)
BY_TORCH: Final = (GLOO, NCCL, CUDA_IPC)
CPU: Final = torch.device("cpu")
DEADLINE_S: Final = 60.0  # of one transfer, and of everything else that one end waits for
ACKNOWLEDGED: Final = b"."
MAX_LINE_BYTES: Final = 2**16


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the receiving end saw of one transfer: the CPU time of its process from the grant to the last byte in
    place, that of the checksums alone, and the digest of what arrived."""

    cpu_s: float
    checksum_s: float
    digest: int


class Target:
    """Receives into a pool, with a receiver for each transport. Belongs to the event loop it was made on."""

    def __init__(self, pool: PagedKVPool, listeners: Mapping[str, Listener]) -> None:
        self._pool = pool
        self._receivers = {name: KVReceiver(listener, store_of(name, pool)) for name, listener in listeners.items()}
        self._epoch = 0

    def grant(self, transport: str, num_blocks: int, is_scattered: bool) -> bytes:
        """A ticket for so many blocks, which are emptied first."""
        receiver = self._receivers[transport]
        block_ids = block_ids_of(num_blocks, self._pool.num_blocks, is_scattered)
        fill(self._pool, block_ids, is_random=False)
        self._epoch += 1
        ticket = Ticket.draw(
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
        self._cpu_s = 0.0
        self._result: asyncio.Future[Received | TransferFailed] = asyncio.get_running_loop().create_future()
        receiver.expect(ticket, block_ids, self._take)
        self._cpu_at_start_s = time.process_time()
        return ticket.encode()

    async def arrival(self) -> Arrival:
        """What became of the last grant. Raises BenchError when it failed."""
        result = await self._result
        if isinstance(result, TransferFailed):
            raise BenchError(f"a transfer over {self._transport} failed: {result.message}")
        receiver = self._receivers[self._transport]
        digest, checksum_s = digest_of(receiver.store, receiver.transport.payload, self._block_ids)
        return Arrival(self._cpu_s, checksum_s, digest)

    async def close(self) -> None:
        for receiver in self._receivers.values():
            await receiver.close()

    def _take(self, result: Received | TransferFailed) -> None:
        self._cpu_s = time.process_time() - self._cpu_at_start_s
        self._result.set_result(result)


def check_device(transports: Sequence[str], device: str) -> None:
    """Raises SettingsError for what does not move blocks of this kind of device, or wants more of them than there
    are."""
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
    """Where one end has its pool: of several CUDA devices each has one."""
    return CPU if name == CPU.type else torch.device(name, 0 if is_sender else torch.cuda.device_count() - 1)


def listener_of(transport: str, folder: str, keys: Sequence[bytes], device: torch.device) -> Listener:
    """A new receiving end of a transport between processes, for dialers with these keys."""
    if transport in BY_TORCH:
        return TorchDistListener("dist://127.0.0.1:*", device)
    endpoint = f"ipc://{folder}/kv.sock" if transport == ZMQ_IPC else "tcp://127.0.0.1:*"
    keyring = Keyring() if transport == ZMQ_CURVE else None
    listener = ZmqListener(endpoint, keyring, shares_memory=transport == ZMQ_SHM)
    listener.allow(keys)
    return listener


def dialer_of(transport: str, device: torch.device) -> Dialer:
    """The sending end that goes with listener_of."""
    return TorchDistDialer(device) if transport in BY_TORCH else ZmqDialer(shares_memory=transport == ZMQ_SHM)


def store_of(transport: str, pool: PagedKVPool) -> KVStore:
    """The pool as the transport wants it."""
    return TensorStore(pool) if transport in BY_TORCH else pool


def block_ids_of(num_blocks: int, pool_blocks: int, is_scattered: bool) -> list[int]:
    """Which blocks of a pool hold a prompt: the first ones, or random ones, the same in every process."""
    return random.Random(SEED).sample(range(pool_blocks), num_blocks) if is_scattered else [*range(num_blocks)]


def fill(pool: PagedKVPool, block_ids: Sequence[int], *, is_random: bool) -> None:
    """Writes random bytes, the same ones for every layer, or zeros."""
    num_bytes = 2 * len(block_ids) * pool.layout.plane.num_bytes
    planes = random.Random(SEED).randbytes(num_bytes) if is_random else bytes(num_bytes)
    for layer in pool.layout.layers:
        shift = 64 * layer % num_bytes if is_random else 0  # so that no two layers are alike
        shifted = memoryview(planes[shift:] + planes[:shift])
        pool.write(layer, block_ids, shifted[: num_bytes // 2], shifted[num_bytes // 2 :])


def digest_of(store: KVStore, payload: Payload, block_ids: Sequence[int]) -> tuple[int, float]:
    """A digest of all blocks, made of checksums as in a transfer, and the CPU seconds of these checksums."""
    digest, checksum_s = 0, 0.0
    part_blocks = blocks_per_message(store.layout)
    for layer in store.layout.layers:
        for first in range(0, len(block_ids), part_blocks):
            keys, values = store.read(layer, block_ids[first : first + part_blocks])
            start_s = time.process_time()
            checksum = payload.checksum(keys, values)
            checksum_s += time.process_time() - start_s
            digest = zlib.crc32(checksum.to_bytes(8), digest)
    return digest, checksum_s


class _Peer:
    """The receiving process: what its commands do."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._target: Target | None = None
        self._sink = bytearray()

    async def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """What a command gives. Raises BenchError."""
        match command:
            case {"open": dict(layout), "transports": [*transports], "keys": [*hexes]}:
                device = device_of(command.get("device", CPU.type), is_sender=False)
                pool = PagedKVPool(KVLayout.uniform(**layout), command["pool_blocks"], device)
                keys = [*map(bytes.fromhex, hexes)]
                listeners = {name: listener_of(name, self._folder, keys, device) for name in transports}
                self._target = Target(pool, listeners)
                return {}
            case {"grant": transport, "num_blocks": num_blocks, "is_scattered": is_scattered}:
                assert self._target is not None
                return {"ticket": self._target.grant(transport, num_blocks, is_scattered).hex()}
            case {"arrival": True}:
                assert self._target is not None
                return asdict(await self._target.arrival())
            case {"close": True}:
                assert self._target is not None
                await self._target.close()
                self._target = None
                return {}
            case _:
                raise BenchError("a command that the receiving process does not know")

    def sink(self, kind: str, num_bytes: int, is_checked: bool) -> None:
        """Answers with the address of a plain socket, reads so many bytes from it, and acknowledges them."""
        path = Path(self._folder) / "plain.sock"
        family = socket.AF_INET if kind == "tcp" else socket.AF_UNIX
        if len(self._sink) != num_bytes:
            self._sink = bytearray(num_bytes)
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.settimeout(DEADLINE_S)
            listening.bind(("127.0.0.1", 0) if kind == "tcp" else str(path))
            listening.listen()
            write_line({"address": listening.getsockname()})
            connection, _ = listening.accept()
            path.unlink(missing_ok=True)
        with connection:
            connection.settimeout(DEADLINE_S)
            piece_bytes = CHECKED_BYTES if is_checked else num_bytes
            for start in range(0, num_bytes, piece_bytes):
                piece = memoryview(self._sink)[start : start + piece_bytes]
                _receive(connection, piece)
                if is_checked:
                    xxh3_64_intdigest(piece)
            connection.sendall(ACKNOWLEDGED)


def _receive(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target)
        if not count:
            raise BenchError("a plain socket was closed too early")
        target = target[count:]


def write_line(fields: Mapping[str, Any]) -> None:
    """One answer."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def _obey(folder: str) -> None:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    peer = _Peer(folder)
    while line := await reader.readline():
        command = json.loads(line)
        try:
            if "sink" in command:
                peer.sink(command["sink"], command["num_bytes"], command["is_checked"])
            else:
                write_line(await peer.answer(command))
        except SplitServeError as error:
            write_line({"error": str(error)})
    pipe.close()


if __name__ == "__main__":
    asyncio.run(_obey(sys.argv[1]))
