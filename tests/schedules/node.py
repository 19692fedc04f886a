"""A simulated node process: the real runner, scheduler, link and KV transfers, over a pool and an engine of bytes.

A step of the engine writes KV to the pool layer by layer, and samples from what it finds there.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace

from engine.engine import StepClock
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from serving_core.layout import KVLayout
from serving_core.node.costs import StepRates
from serving_core.node.prefix import numerics_of
from serving_core.requests import SampledToken
from serving_core.settings import EngineSettings
from serving_node.link import FleetLink, LinkSettings
from serving_node.ranks.leading import Followers
from serving_node.runner import NodeRunner
from serving_node.settings import NodeSettings
from tests.schedules.history import Rest, Wrote
from tests.schedules.model import KEY_BYTES, NUM_LAYERS, first_key, key_after, next_token, value_of
from tests.unit.kv_transfer.transfer_kit import ByteStore

BLOCK_SIZE = 4
LAYOUT = KVLayout.uniform(NUM_LAYERS, num_kv_heads=1, head_dim=KEY_BYTES // 4, block_size=BLOCK_SIZE, dtype="float32")
FINGERPRINT = {"model": "bytes"}
PREFILL_TOKENS_PER_S = 2000.0
TRANSFER_TIMEOUT_S = 5.0
CREDIT_TIMEOUT_S = 10.0


class InjectedError(Exception):
    """A step fails because the schedule says so."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of every node of a fleet."""

    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    overlap_min_tokens: int
    is_batch_invariant: bool
    num_state_blocks: int = 0  # of a request, beside its KV

    @property
    def layout(self):
        return replace(LAYOUT, state_bytes=self.num_state_blocks * LAYOUT.block_bytes)


class Pool(ByteStore):
    """The KV of one node; garbage at first. Whoever writes to it is noted.

    With a fixed state, the key of a request's last token lies there too, again and again, and is read from there.
    """

    def __init__(self, num_blocks, seed, wrote, layout=LAYOUT):
        super().__init__(layout, num_blocks, seed)
        self.wrote = wrote
        self.opening = -1  # the epoch whose channels are being made
        self.num_continued = 0  # steps, in each layer, that read a checkpoint of the state

    def heads(self, heads):
        return _Opened(self, self.opening)

    @property
    def num_state_blocks(self):
        return self.layout.num_state_blocks

    def compute(self, share, request_salt, epoch, layer):
        """Writes the KV of a share in one layer, from that of the token before as it lies there."""
        keys, values = self._caches[layer]
        position = share.start
        before = self._key_before(share, layer) if position else first_key(request_salt)
        for token_id in share.token_ids:
            before, start = key_after(before, token_id, layer), self._place(share, position)
            keys[start : start + KEY_BYTES] = before
            values[start : start + KEY_BYTES] = value_of(token_id, position)
            position += 1
        states = share.block_ids[: self.num_state_blocks]
        if states:
            self.write(layer, states, *[before * BLOCK_SIZE * len(states)] * 2)
        written = share.block_ids[len(states) :][share.start // BLOCK_SIZE : -(-position // BLOCK_SIZE)]
        self.wrote([*states, *written], epoch, "step")

    def sample(self, share):
        """What follows the last token of a share."""
        num_tokens = share.start + share.num_tokens
        block_ids = share.block_ids[self.num_state_blocks :][: -(-num_tokens // BLOCK_SIZE)]
        caches = chain.from_iterable(self.read(layer, block_ids) for layer in LAYOUT.layers)
        return next_token([bytes(cache[: num_tokens * KEY_BYTES]) for cache in caches])

    def flip_key(self, share, position, layer):
        """Flips a bit of a token's key."""
        self._caches[layer][0][self._place(share, position)] ^= 1

    def _key_before(self, share, layer):
        if not self.num_state_blocks:
            start = self._place(share, share.start - 1)
            return bytes(self._caches[layer][0][start : start + KEY_BYTES])
        self.num_continued += bool(share.state_ids)
        states = share.state_ids or share.block_ids[: self.num_state_blocks]
        kept = b"".join(self.read(layer, states))
        before = kept[:KEY_BYTES]
        return before if kept == before * (len(kept) // KEY_BYTES) else b"of several tokens"

    def _place(self, share, position):
        block, offset = divmod(position, BLOCK_SIZE)
        return (share.block_ids[self.num_state_blocks + block] * BLOCK_SIZE + offset) * KEY_BYTES


class _Opened:
    """The pool as the channels of one transfer see it."""

    def __init__(self, pool, epoch):
        self.layout = pool.layout
        self._pool, self._epoch = pool, epoch

    def heads(self, heads):
        return self

    def read(self, layer, block_ids):
        return self._pool.read(layer, block_ids)

    def write(self, layer, block_ids, keys, values):
        self._pool.write(layer, block_ids, keys, values)
        self._pool.wrote(block_ids, self._epoch, "transfer")


class _Receiver(KVReceiver):
    """Lets the pool know whose channels are made."""

    def expect(self, descriptor, *arguments):
        self.store.opening = descriptor.epoch
        super().expect(descriptor, *arguments)


class SimulatedEngine:
    """What NodeRunner asks of an engine. A step is a generator: it yields seconds, and returns tokens."""

    fingerprint = FINGERPRINT
    eos_token_ids = ()
    kv_pool_bytes = weight_bytes = 0
    group = SimpleNamespace(rank=0)
    grammars = SimpleNamespace(load=lambda: None)  # nobody asks for one
    can_schedule_async = False
    reuses_prefixes = True

    def __init__(self, name, sizes, pool, random):
        self.num_blocks, self.is_batch_invariant = sizes.num_blocks, sizes.is_batch_invariant
        self.layout = self.model_layout = sizes.layout
        self.max_model_len = (sizes.num_blocks - sizes.num_state_blocks) * BLOCK_SIZE
        self.numerics = numerics_of({"node": name})
        self.description = self.numerics_facts = {}
        self.pool, self._random = pool, random
        self._step_s, self._token_s = random.choice([0.004, 0.015, 0.04]), random.choice([0.0001, 0.002])
        self.stalls_s = 0.0  # in the next step
        self.fails = False  # the next step
        self.clock = StepClock()

    def step(self, works, on_layer=None):
        parts = [(work.share, work.request.cache_salt, work.request.epoch) for work in works]
        stalls_s, self.stalls_s = self.stalls_s, 0.0
        fails, self.fails = self.fails, False
        seconds = self._step_s * (0.5 + self._random.random()) + self._token_s * sum(work.num_tokens for work in works)
        for number, layer in enumerate(LAYOUT.layers, 1):
            yield seconds / NUM_LAYERS + (stalls_s if number == 1 else 0.0)
            for share, salt, epoch in parts:
                self.pool.compute(share, salt, epoch, layer)
            if fails:
                raise InjectedError
            if on_layer is not None:
                on_layer(number)
        return [SampledToken(self.pool.sample(share)) for share, _, _ in parts if share.samples]


class SimulatedNode:
    """One life of a node process. To be made within its process."""

    def __init__(self, name, role, sizes, network, process, record, random):
        self.name, self.role, self.process = name, role, process
        self._record, self._loop = record, network.loop
        pool = Pool(sizes.num_blocks, random.getrandbits(32), self._wrote, sizes.layout)
        self.engine = SimulatedEngine(name, sizes, pool, random)
        self.sender = KVSender(network.dialer(), pool, deadline_s=TRANSFER_TIMEOUT_S)
        self.receiver = _Receiver(network.listener(name), pool)
        self._link = FleetLink(LinkSettings())
        settings = NodeSettings(
            engine=EngineSettings(),
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_num_seqs=sizes.max_num_seqs,
            overlap_min_tokens=sizes.overlap_min_tokens,
            transfer_timeout_s=TRANSFER_TIMEOUT_S,
            credit_timeout_s=CREDIT_TIMEOUT_S,
        )
        ends = self.sender, self.receiver
        rates = StepRates(PREFILL_TOKENS_PER_S)
        self.runner = NodeRunner(settings, role, name, self.engine, *ends, Followers(0), self._link, rates)

    def start(self, loop):
        """The tasks whose end is the end of the process."""
        return [loop.start(self.process, self.runner.run()), loop.start(self.process, self._link.run(self.runner))]

    @property
    def is_quiet(self):
        return not len(self.runner.node_requests) and not self.sender.num_open and not self.receiver.num_open

    @property
    def seen(self):
        """What has happened in this life."""
        return Counter(
            {
                "lives": 1,
                "handed over": self.receiver.num_bytes // LAYOUT.block_bytes,
                "continued": self.engine.pool.num_continued,
                "corrupt": self.receiver.num_corrupt_blocks,
                "preempted": self.runner.load().num_preemptions,
            }
        )

    def rests(self):
        """What it holds; everything is counted from scratch."""
        held = self.runner.num_held() | {
            "incoming transfers": self.receiver.num_open,
            "outgoing transfers": self.sender.num_open,
            "channels": self.receiver.num_channels + self.sender.num_channels,
        }
        return [Rest(self._loop.now, self.name, what, count) for what, count in held.items()]

    def _wrote(self, block_ids, epoch, by):
        holders = {block: [] for block in block_ids}
        for key, lease in self.runner.leases:
            for block in lease.block_ids:
                if block in holders:
                    holders[block].append(key)
        for block, who in holders.items():
            self._record(Wrote(self._loop.now, self.name, block, epoch, by, tuple(who)))
