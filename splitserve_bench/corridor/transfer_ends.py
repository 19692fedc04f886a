"""Both ends of `splitserve bench transfer`, as the measuring process drives them."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from engine.cache.kv_pool import PagedKVPool
from kv_transfer.ends.sender import KVSender, Sent, TransferFailed
from kv_transfer.ticket import Ticket
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.transports.transport import Dialer
from kv_transfer.transports.zmq import ZmqDialer
from serving_core.cpus import confined
from serving_core.layout import KVLayout
from splitserve_bench.child import start_child
from splitserve_bench.corridor.transfer_peer import (
    CPU,
    DEADLINE_S,
    LOOPBACK,
    MAX_LINE_BYTES,
    ZMQ_SHM,
    Arrival,
    Target,
    block_ids_of,
    device_of,
    dialer_of,
    digest_of,
    fill,
    store_of,
)
from splitserve_bench.corridor.yardsticks import Plain
from splitserve_bench.errors import BenchError

TAIL: Final = b"tail"
STOP_S: Final = 10.0
SHARE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer: seconds from finish to commit, CPU seconds of the sending process until then, of its checksums
    alone, and what the other end saw."""

    commit_s: float
    cpu_s: float
    checksum_s: float
    arrival: Arrival


class Receiving(Protocol):
    """The receiving end, wherever it is."""

    async def grant(self, transport: str, num_blocks: int, is_scattered: bool) -> bytes:
        """A ticket for so many blocks."""
        ...

    async def arrival(self) -> Arrival:
        """What became of the last grant. Raises BenchError when it failed."""
        ...


class PeerProcess:
    """The receiving process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, **command: Any) -> Any:
        """One command and its answer. Raises BenchError when it cannot be obeyed, or is not in time."""
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
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer

    async def grant(self, transport: str, num_blocks: int, is_scattered: bool) -> bytes:
        answer = await self.ask(grant=transport, num_blocks=num_blocks, is_scattered=is_scattered)
        return bytes.fromhex(answer["ticket"])

    async def arrival(self) -> Arrival:
        return Arrival(**await self.ask(arrival=True))

    async def plain_s(self, plain: Plain, kind: str, *, is_checked: bool = False) -> float:
        """Seconds that the bytes take through a plain socket to the process, tcp or unix; is_checked: with their
        XXH3 computed at both ends."""
        answer = await self.ask(sink=kind, num_bytes=len(plain.source), is_checked=is_checked)
        return plain.send_s(answer["address"], DEADLINE_S, is_checked=is_checked)


class _Here:
    """A receiving end in this process."""

    def __init__(self, target: Target) -> None:
        self._target = target

    async def grant(self, transport: str, num_blocks: int, is_scattered: bool) -> bytes:
        return self._target.grant(transport, num_blocks, is_scattered)

    async def arrival(self) -> Arrival:
        return await self._target.arrival()


class Ends:
    """A filled pool, a sender for each transport, and who receives from it. Belongs to the event loop it was made
    on."""

    def __init__(
        self, pool: PagedKVPool, senders: dict[str, KVSender], receiving: dict[str, Receiving], is_scattered: bool
    ) -> None:
        self._pool = pool
        self._senders = senders
        self._receiving = receiving
        self._is_scattered = is_scattered

    async def sample(self, transport: str, num_blocks: int) -> Sample:
        """One transfer. Raises BenchError when it fails, or when what arrived is not what was sent."""
        sender, receiving = self._senders[transport], self._receiving[transport]
        block_ids = block_ids_of(num_blocks, self._pool.num_blocks, self._is_scattered)
        ticket = await receiving.grant(transport, num_blocks, self._is_scattered)
        done: asyncio.Future[Sent | TransferFailed] = asyncio.get_running_loop().create_future()
        transfer = sender.start(ticket, done.set_result)
        if transport == ZMQ_SHM:
            await _until_shared(sender.transport, ticket)
        cpu_at_start_s, start_s = time.process_time(), time.perf_counter()
        transfer.finish(block_ids, TAIL)
        result = await done
        commit_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_at_start_s
        if isinstance(result, TransferFailed):
            raise BenchError(f"a transfer over {transport} failed: {result.message}")
        arrival = await receiving.arrival()
        digest, checksum_s = digest_of(sender.store, sender.transport.payload, block_ids)
        if arrival.digest != digest:
            raise BenchError(f"{transport} committed other bytes than were sent")
        return Sample(commit_s, cpu_s, checksum_s, arrival)


async def _until_shared(dialer: Dialer, ticket: bytes) -> None:
    """Returns when blocks for the ticket's receiver go through shared memory. Raises BenchError when they never do."""
    assert isinstance(dialer, ZmqDialer)
    address = Ticket.decode(ticket).ends[0].address
    give_up_s = time.perf_counter() + SHARE_S
    while not dialer.shares_with(address):
        if time.perf_counter() > give_up_s:
            raise BenchError("the two processes share no memory; the log says why")
        await asyncio.sleep(0.001)


@asynccontextmanager
async def open_ends(
    layout: KVLayout,
    pool_blocks: int,
    transports: tuple[str, ...],
    is_scattered: bool,
    peer: PeerProcess,
    device_name: str = CPU.type,
) -> AsyncIterator[Ends]:
    """Both ends of each transport, connected on the first transfer. Raises SettingsError when a pool is too large."""
    device = device_of(device_name, is_sender=True)
    pool = PagedKVPool(layout, pool_blocks, device)
    fill(pool, range(pool_blocks), is_random=True)
    remote = [name for name in transports if name != LOOPBACK]
    network, here = LoopbackNetwork(), None
    dialers = {name: network.dialer() if name == LOOPBACK else dialer_of(name, device) for name in transports}
    keys = [dialer.key.hex() for dialer in dialers.values() if dialer.key]
    await peer.ask(
        open=layout.uniform_fields(), pool_blocks=pool_blocks, device=device_name, transports=remote, keys=keys
    )
    receiving: dict[str, Receiving] = dict.fromkeys(remote, peer)
    if LOOPBACK in transports:
        here = Target(PagedKVPool(layout, pool_blocks, device), {LOOPBACK: network.listener(LOOPBACK)})
        receiving[LOOPBACK] = _Here(here)
    senders = {name: KVSender(dialers[name], store_of(name, pool), deadline_s=DEADLINE_S) for name in transports}
    try:
        yield Ends(pool, senders, receiving, is_scattered)
    finally:
        for sender in senders.values():
            await sender.close()
        if here is not None:
            await here.close()
    await peer.ask(close=True)


@asynccontextmanager
async def peer_process(folder: str) -> AsyncIterator[tuple[PeerProcess, int]]:
    """The receiving process, and how many CPUs the two have: one each where there are two. This process stays on its
    own CPU until the end."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with confined(cpus[1:2] or cpus):  # the child inherits it
        module = "splitserve_bench.corridor.transfer_peer"
        process = await start_child(module, folder, limit=MAX_LINE_BYTES, OMP_NUM_THREADS="1")
    try:
        with confined(cpus[:1]), _one_thread():
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch computes with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
