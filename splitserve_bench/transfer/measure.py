"""Measure how long KV transfers of a computed prompt take, from the sender's `finish` until the receiver has all of it.

The sender is this process and the receiver another, each with a KV pool and, where there are two, a core of its own.
Every repeat runs once through all transports and yardsticks, so that a disturbance hits all alike. The connection
exists before; the received bytes are compared with those sent. Rates, and ratios to those of the yardsticks, are those
of the fastest repeats.
"""

import asyncio
import json
import socket
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from engine.cache.kv_pool import PagedKVPool
from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.sender import KVSender, Sent, TransferFailed
from kv_transfer.transports.transport import Dialer
from kv_transfer.transports.zmq import ZmqDialer
from serving_core.layout import KVLayout
from serving_core.net.ports import SocketFolder
from serving_core.process.cpus import allowed_cpus, confined
from splitserve.launch.models import Report
from splitserve_bench.child import start_child
from splitserve_bench.engine.driver import threads
from splitserve_bench.errors import BenchError
from splitserve_bench.transfer.peer import (
    DEADLINE_S,
    MAX_LINE_BYTES,
    ZMQ_SHM,
    Arrival,
    block_ids_of,
    check_device,
    device_of,
    dialer_of,
    digest_of,
    fill,
    store_of,
)

TAIL: Final = b"tail"
STOP_S: Final = 10.0
SHARE_S: Final = 10.0  # until both processes share memory
COPY, TCP = "memory copy", "TCP socket"  # the yardsticks


@dataclass(frozen=True, slots=True)
class TransferBench:
    """Which transports, prompt lengths and devices are measured, and how often."""

    transports: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    repeats: int
    is_scattered: bool  # whether a prompt's blocks lie anywhere in the pool, instead of side by side
    device: str = "cpu"  # where both pools are; of several CUDA devices on two


@dataclass(frozen=True, slots=True)
class Spread:
    """The fastest and the median of several repeats, in seconds."""

    fastest_s: float
    median_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer: seconds from finish to commit, the sender's CPU seconds until then, and the receiver's account."""

    commit_s: float
    cpu_s: float
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """One transport and one prompt length, whose KV takes num_bytes. CPU seconds are medians.

    The ratios are of rates for the same bytes: how fast the transfer is in comparison.
    """

    transport: str
    prompt_tokens: int
    num_bytes: int
    commit: Spread
    bytes_per_s: float
    tcp_ratio: float  # to a plain TCP socket between the two processes
    copy_ratio: float  # to copying the bytes in memory once
    sender_cpu_s: float
    receiver_cpu_s: float


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Everything that was measured with one KV layout, on `num_cpus` CPUs (0: not known)."""

    layout: KVLayout
    num_cpus: int
    transfers: tuple[TransferFigures, ...]


async def measure_transfer(layout: KVLayout, sizes: TransferBench, report: Report) -> TransferReport:
    """Start the receiving process, measure all transports and lengths, stop the process, and return the figures.

    `report` gets progress. Raises BenchError when a transfer fails or brings other bytes, and SettingsError when the
    pools do not fit into memory, or a transport does not transfer from such a device.
    """
    check_device(sizes.transports, sizes.device)
    pool_blocks = layout.num_blocks_for(max(sizes.prompt_tokens))
    transfers: list[TransferFigures] = []
    with SocketFolder() as folder:
        async with (
            peer_process(str(folder.path)) as (peer, num_cpus),
            open_sender(layout, pool_blocks, sizes.transports, peer, sizes.device) as sender,
        ):
            for prompt_tokens in sizes.prompt_tokens:
                report(f"blocks of {layout.block_size}, prompts of {prompt_tokens} tokens ...")
                num_blocks = layout.num_blocks_for(prompt_tokens)
                num_bytes = num_blocks * layout.block_bytes
                for name in sizes.transports:  # connects
                    await sender.sample(name, num_blocks, sizes.is_scattered)
                samples: dict[str, list[Sample]] = {name: [] for name in sizes.transports}
                plain_s: dict[str, list[float]] = {COPY: [], TCP: []}
                for _ in range(sizes.repeats):
                    for name, taken in samples.items():
                        taken.append(await sender.sample(name, num_blocks, sizes.is_scattered))
                    plain_s[COPY].append(copy_s(num_bytes))
                    plain_s[TCP].append(await peer.plain_s(num_bytes))
                fastest = {name: min(seconds) for name, seconds in plain_s.items()}
                transfers += [figures_of(name, prompt_tokens, num_bytes, samples[name], fastest) for name in samples]
    return TransferReport(layout, num_cpus, tuple(transfers))


def figures_of(
    transport: str, prompt_tokens: int, num_bytes: int, samples: Sequence[Sample], plain_s: Mapping[str, float]
) -> TransferFigures:
    """Return the figures of one or more samples of a transport. `plain_s` has the fastest seconds of COPY and TCP."""
    commits_s = [sample.commit_s for sample in samples]
    commit = Spread(min(commits_s), statistics.median(commits_s))
    return TransferFigures(
        transport=transport,
        prompt_tokens=prompt_tokens,
        num_bytes=num_bytes,
        commit=commit,
        bytes_per_s=num_bytes / commit.fastest_s,
        tcp_ratio=plain_s[TCP] / commit.fastest_s,
        copy_ratio=plain_s[COPY] / commit.fastest_s,
        sender_cpu_s=statistics.median(sample.cpu_s for sample in samples),
        receiver_cpu_s=statistics.median(sample.arrival.cpu_s for sample in samples),
    )


def copy_s(num_bytes: int) -> float:
    """Copy `num_bytes` bytes once between two buffers that are in memory already, and return the seconds it took."""
    source, target = bytearray(b"\1") * num_bytes, bytearray(b"\2") * num_bytes
    start_s = time.perf_counter()
    memoryview(target)[:] = source
    return time.perf_counter() - start_s


class PeerProcess:
    """The receiving process.

    Every method raises BenchError when it reports an error, ends, or does not reply in time.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, **command: Any) -> Any:
        """Send a command, and return the process's reply. Both are JSON objects (see `reply_to` in peer.py)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        try:
            async with asyncio.timeout(DEADLINE_S):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise BenchError(f"the receiving process did not answer within {DEADLINE_S:g} s") from error
        if not line:
            raise BenchError("the receiving process has ended")
        reply = json.loads(line)
        if "error" in reply:
            raise BenchError(reply["error"])
        return reply

    async def expect(self, transport: str, num_blocks: int, is_scattered: bool) -> bytes:
        """Have the process prepare to receive `num_blocks` blocks by this transport; return its transfer descriptor.

        `is_scattered`: into blocks anywhere in its pool, not the first. Raises BenchError when the process reports an
        error, ends, or does not reply in time.
        """
        reply = await self.ask(expect=transport, num_blocks=num_blocks, is_scattered=is_scattered)
        return bytes.fromhex(reply["descriptor"])

    async def arrival(self) -> Arrival:
        """Wait until the last transfer has arrived, and return the receiver's account of it."""
        return Arrival(**await self.ask(arrival=True))

    async def plain_s(self, num_bytes: int) -> float:
        """Send so many bytes by a plain TCP socket, and return the seconds until the process has acknowledged them."""
        source = bytearray(b"\1") * num_bytes
        address = (await self.ask(plain_bytes=num_bytes))["address"]
        with socket.create_connection(tuple(address), timeout=DEADLINE_S) as connection:
            start_s = time.perf_counter()
            connection.sendall(source)
            connection.recv(1)
            return time.perf_counter() - start_s


class Sender:
    """A KV pool with random content, and a sender of it for each transport.

    Belongs to the event loop it was made on.
    """

    def __init__(self, pool: PagedKVPool, senders: Mapping[str, KVSender], peer: PeerProcess) -> None:
        self._pool = pool
        self._senders = senders
        self._peer = peer

    async def sample(self, transport: str, num_blocks: int, is_scattered: bool) -> Sample:
        """Make one transfer of so many blocks and return its times.

        `is_scattered`: blocks anywhere in the pool, not the first. Raises BenchError when it fails, or when other bytes
        arrive than were sent.
        """
        sender = self._senders[transport]
        block_ids = block_ids_of(num_blocks, self._pool.num_blocks, is_scattered)
        descriptor = await self._peer.expect(transport, num_blocks, is_scattered)
        done: asyncio.Future[Sent | TransferFailed] = asyncio.get_running_loop().create_future()
        transfer = sender.start(descriptor, done.set_result)
        if transport == ZMQ_SHM:
            await _until_shared(sender.transport, descriptor)
        cpu_at_start_s, start_s = time.process_time(), time.perf_counter()
        transfer.finish(block_ids, TAIL)
        result = await done
        commit_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_at_start_s
        if isinstance(result, TransferFailed):
            raise BenchError(f"a transfer over {transport} failed: {result.message}")
        arrival = await self._peer.arrival()
        if arrival.digest != digest_of(sender.store, sender.transport.payload, block_ids):
            raise BenchError(f"{transport} committed other bytes than were sent")
        return Sample(commit_s, cpu_s, arrival)


async def _until_shared(dialer: Dialer, descriptor: bytes) -> None:
    """Wait until blocks to the receiver go through shared memory. Raises BenchError when they do not within SHARE_S."""
    assert isinstance(dialer, ZmqDialer)
    address = TransferDescriptor.decode(descriptor).ends[0].address
    give_up_s = time.perf_counter() + SHARE_S
    while not dialer.shares_with(address):
        if time.perf_counter() > give_up_s:
            raise BenchError("the two processes share no memory; the log says why")
        await asyncio.sleep(0.001)


@asynccontextmanager
async def open_sender(
    layout: KVLayout, pool_blocks: int, transports: Sequence[str], peer: PeerProcess, device_name: str
) -> AsyncIterator[Sender]:
    """Return an async context manager that opens the pools of both ends and yields the sender.

    Transports connect on the first transfer. Raises SettingsError when a pool does not fit into memory.
    """
    device = device_of(device_name, is_sender=True)
    pool = PagedKVPool(layout, pool_blocks, device)
    fill(pool, range(pool_blocks), is_random=True)
    dialers = {name: dialer_of(name, device) for name in transports}
    keys = [dialer.key.hex() for dialer in dialers.values() if dialer.key]
    await peer.ask(
        open=layout.uniform_fields(), pool_blocks=pool_blocks, device=device_name, transports=transports, keys=keys
    )
    senders = {name: KVSender(dialers[name], store_of(name, pool), deadline_s=DEADLINE_S) for name in transports}
    try:
        yield Sender(pool, senders, peer)
    finally:
        for sender in senders.values():
            await sender.close()


@asynccontextmanager
async def peer_process(folder: str) -> AsyncIterator[tuple[PeerProcess, int]]:
    """Return an async context manager that starts the receiving process and yields it, and how many CPUs the two have.

    Each has a CPU of its own where there are two. Until its end this process stays on its CPU, and torch computes with
    one thread.
    """
    cpus = allowed_cpus()
    with confined(cpus[1:2] or cpus):  # the child inherits it
        module = "splitserve_bench.transfer.peer"
        process = await start_child(module, folder, limit=MAX_LINE_BYTES, OMP_NUM_THREADS="1")
    try:
        with confined(cpus[:1]), threads(1):
            yield PeerProcess(process), min(2, len(cpus))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
