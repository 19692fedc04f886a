"""What the tests of KV transfers share: a store of plain bytes, a network of each kind, a network that misbehaves."""

import asyncio
import itertools
import math
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import zmq

from kv_transfer.descriptor import ChannelEnd, TransferDescriptor
from kv_transfer.receiver import KVReceiver, Received
from kv_transfer.sender import KVSender, Sent
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from kv_transfer.transports.zmq_keys import Keyring
from kv_transfer.wire import decode
from serving_core.layout import KVLayout
from tests import forked
from tests.unit.engine.some_heads import SomeHeads
from tests.unit.kv_transfer.torch_dist_kit import HostDialer, HostListener

LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
BIG_LAYOUT = KVLayout.uniform(num_layers=20, num_kv_heads=8, head_dim=64, block_size=16, dtype="bfloat16")
SMOLLM2 = KVLayout.uniform(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
BIG_NUM_BLOCKS = 64  # 42 MB
TEST_TIMEOUT_S = 300.0
PATIENCE_S = 120.0  # of transfers that are to succeed, also where a process has to start first


def run(scenario, runner=asyncio.run):
    """Runs a scenario to its end, which must come."""

    async def bounded():
        async with asyncio.timeout(TEST_TIMEOUT_S):
            return await scenario

    return runner(bounded())


async def until(condition):
    """Returns once a condition holds of counters, which tell nobody when they change."""
    while not condition():
        await asyncio.sleep(0.001)


@asynccontextmanager
async def peer_process(module, *arguments):
    """Start `python -m module *arguments` as the other end of a transfer, with pipes, and kill it at the end."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with forked.popen(module, *arguments, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


async def line_from(process):
    """Return the next line that a process prints."""
    return (await asyncio.to_thread(process.stdout.readline)).decode().strip()


def skip(seconds):
    """So much time is over at once, for all that the running loop of asyncio has timers for."""
    loop = asyncio.get_running_loop()
    loop.time = lambda time=loop.time: time() + seconds


def try_to_send(dealer, message):
    """Unless it was sent away already: then its socket has nowhere to put a message, and would wait forever."""
    with suppress(zmq.Again):
        dealer.send(message, zmq.NOBLOCK)


class ByteStore:
    """A KVStore on the host: random bytes for a seed, zeros without."""

    def __init__(self, layout: KVLayout, num_blocks: int, seed: int | None = None):
        self.layout = layout
        self.num_blocks = num_blocks
        fill = bytes if seed is None else random.Random(seed).randbytes
        self._block_bytes = {
            layer: [cache.num_bytes for cache in layout.cache_shapes(layer)] for layer in layout.layers
        }
        self._caches = {
            layer: [bytearray(fill(num_blocks * num_bytes)) for num_bytes in sizes]
            for layer, sizes in self._block_bytes.items()
        }

    def read(self, layer, block_ids):
        """Views of neighbours, copies of others."""
        keys, values = (
            [memoryview(ours)[start:stop].toreadonly() for start, stop in spans]
            for ours, spans in self._kinds(layer, block_ids)
        )
        if len(keys) == 1:
            return keys[0], values[0]
        return memoryview(b"".join(keys)), memoryview(b"".join(values))

    def write(self, layer, block_ids, keys, values):
        for (ours, spans), caches in zip(self._kinds(layer, block_ids), (keys, values), strict=True):
            assert len(caches) == sum(stop - start for start, stop in spans)
            offset = 0
            for start, stop in spans:
                ours[start:stop] = caches[offset : offset + stop - start]
                offset += stop - start

    def heads(self, heads):
        return self if heads == range(self.layout.num_kv_heads) else SomeHeads(self, heads)

    def bytes_of(self, block_ids):
        """Every byte of these blocks."""
        return b"".join(bytes(view) for layer in self.layout.layers for view in self.read(layer, block_ids))

    @property
    def is_held(self):
        """Whether anybody holds a view of its bytes."""
        try:
            for cache in itertools.chain(*self._caches.values()):
                cache.append(0)
                cache.pop()
        except BufferError:
            return True
        return False

    def flip(self, layer, block_id):
        """Flips a bit of a block."""
        self._caches[layer][0][block_id * self._block_bytes[layer][0]] ^= 1

    def _kinds(self, layer, block_ids):
        """All caches of K, and where in them these blocks lie; the same of V."""
        runs = []
        for _, members in itertools.groupby(enumerate(block_ids), key=lambda pair: pair[1] - pair[0]):
            first, *rest = [block_id for _, block_id in members]
            runs.append((first, first + len(rest) + 1))
        for ours, num_bytes in zip(self._caches[layer], self._block_bytes[layer], strict=True):
            yield ours, [(start * num_bytes, stop * num_bytes) for start, stop in runs]


@dataclass
class Fabric:
    """Makes both ends of one kind of transport."""

    kind: str
    folder: object
    loopback: LoopbackNetwork = field(default_factory=LoopbackNetwork)
    keyring: Keyring = field(default_factory=Keyring)  # of all its dialers
    _names: itertools.count = field(default_factory=itertools.count)

    def listener(self):
        match self.kind:
            case "loopback":
                return self.loopback.listener(f"node-{next(self._names)}")
            case "tcp":
                return ZmqListener("tcp://127.0.0.1:*")
            case "shm":
                return ZmqListener("tcp://127.0.0.1:*", shares_memory=True)
            case "curve":
                keyring = Keyring()
                keyring.allow([self.keyring.public])
                return ZmqListener("tcp://127.0.0.1:*", keyring)
            case "ipc":
                return ZmqListener(f"ipc://{self.folder}/{next(self._names)}")
            case "torch_dist":
                return HostListener()

    def dialer(self):
        match self.kind:
            case "loopback":
                return self.loopback.dialer()
            case "torch_dist":
                return HostDialer()
            case _:
                return ZmqDialer(self.keyring, shares_memory=self.kind == "shm")

    async def meet(self, dialer, address):
        """Returns when the two share memory, if that is what is to be tried."""
        while self.kind == "shm" and not dialer.shares_with(address):
            dialer.connect(address)  # again, where it took too long
            await asyncio.sleep(0.001)


class TappedListener:
    """A Listener that passes its messages to a function, whose first argument is the handler of the receiver."""

    def __init__(self, inner, tap):
        self._inner, self._tap = inner, tap

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def start(self, on_message):
        self._inner.start(partial(self._tap, on_message))


@asynccontextmanager
async def pair(fabric, source, target, *, deadline_s=PATIENCE_S, wrap=lambda dialer: dialer, tap=None):
    """A sender of one store and a receiver into another. In the end nothing may be open."""
    listener, dialer = fabric.listener(), fabric.dialer()
    receiver = KVReceiver(TappedListener(listener, tap) if tap else listener, target)
    sender = KVSender(wrap(dialer), source, deadline_s=deadline_s)
    await fabric.meet(dialer, receiver.address)
    try:
        yield sender, receiver
    finally:
        await sender.close()
        await receiver.close()
        assert (sender.num_open, receiver.num_open) == (0, 0)


class Once:
    """An on_done that may be called once; `result` waits for it."""

    def __init__(self):
        self._result = asyncio.get_running_loop().create_future()

    def __call__(self, result):
        self._result.set_result(result)  # raises the second time

    @property
    def is_done(self):
        return self._result.done()

    async def result(self):
        return await asyncio.shield(self._result)


@dataclass
class Faults:
    """How likely each thing happens to one message, drawn from one seeded stream."""

    rng: random.Random
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0  # long enough to be overtaken
    truncate: float = 0.0
    flip: float = 0.0
    num_per_transfer: float = math.inf  # of messages spoilt for one transfer; replies are spoilt without limit

    def happens(self, rate):
        return self.rng.random() < rate


class FaultyDialer:
    """A Dialer that does to messages and replies what networks and memories do."""

    def __init__(self, inner, faults: Faults):
        self._inner = inner
        self._faults = faults
        self._num_spoilt = Counter()
        self._is_closed = False
        self.payload = inner.payload

    def start(self, on_reply: Callable[[memoryview], None], on_lost: Callable[[str], None]):
        def faulty_reply(header):
            spoilt = self._spoilt([header])
            for _ in range(1 + self._faults.happens(self._faults.duplicate)):
                if spoilt:
                    on_reply(spoilt[0])

        self._inner.start(faulty_reply, on_lost)

    def connect(self, address):
        self._inner.connect(address)

    def send(self, address, header, frames: Sequence[memoryview] = ()):
        return asyncio.ensure_future(self._send(address, header, frames))

    def hang_up(self, address):
        self._inner.hang_up(address)

    async def close(self):
        self._is_closed = True
        await self._inner.close()

    async def _send(self, address, header, frames):
        transfer_id = decode(header).transfer_id
        parts, delay_s = [memoryview(header), *frames], 0.0
        if self._num_spoilt[transfer_id] < self._faults.num_per_transfer:
            is_delayed = self._faults.happens(self._faults.delay)
            spoilt = self._spoilt(parts)
            self._num_spoilt[transfer_id] += is_delayed or spoilt is not parts  # before others take their turn
            parts, delay_s = spoilt, 0.003 * is_delayed
        await asyncio.sleep(delay_s)  # also without a delay: what is not spoilt keeps its order
        for _ in range(1 + self._faults.happens(self._faults.duplicate)):
            if parts and not self._is_closed:
                await self._inner.send(address, bytes(parts[0]), parts[1:])

    def _spoilt(self, parts):
        """The same list, or a changed one; nothing is left of a message that is dropped."""
        faults, rng = self._faults, self._faults.rng
        number = rng.randrange(len(parts))
        part = parts[number]
        if faults.happens(faults.drop):
            return []
        if faults.happens(faults.flip) and len(part):
            flipped = bytearray(part)
            flipped[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
            return [*parts[:number], memoryview(flipped), *parts[number + 1 :]]
        if faults.happens(faults.truncate) and len(part):
            return [*parts[:number], part[: rng.randrange(len(part))], *parts[number + 1 :]]
        return parts


epochs = itertools.count(1)  # no two attempts share one


def grant(receiver, target_ids, on_done, *, epoch=None, ttl_s=PATIENCE_S, num_cached_blocks=0, address=None):
    """Lets a prefill node of one rank write these blocks of a decode node of one; the descriptor, which may send it by
    way of another address."""
    descriptor = TransferDescriptor.draw(
        epoch=next(epochs) if epoch is None else epoch,
        layout=receiver.store.layout,
        prefill_tp=1,
        decode_tp=1,
        addresses=[address or receiver.address],
        num_blocks=len(target_ids),
        num_cached_blocks=num_cached_blocks,
        ttl_s=ttl_s,
    )
    receiver.expect(descriptor, target_ids, on_done)
    return descriptor


async def transfer(sender, receiver, source_ids, target_ids, *, tail=b"tail", num_cached_blocks=0):
    """One undisturbed transfer; its two results."""
    sent, received = Once(), Once()
    descriptor = grant(receiver, target_ids, received, num_cached_blocks=num_cached_blocks)
    sender.start(descriptor.encode(), sent).finish(source_ids, tail)
    return await sent.result(), await received.result()


def check_arrived(source, source_ids, target, target_ids, results, tail=b"tail"):
    num_bytes = len(source_ids) * source.layout.block_bytes
    assert results == (Sent(num_bytes), Received(tail, num_bytes))
    assert target.bytes_of(target_ids) == source.bytes_of(source_ids)


def a_descriptor(address, transfer_id=bytes(16), num_blocks=4, epoch=1):
    """A descriptor that no receiver has granted."""
    return TransferDescriptor(epoch, LAYOUT, 1, 1, num_blocks, 0, 0, PATIENCE_S, (ChannelEnd(transfer_id, address),))
