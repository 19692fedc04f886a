"""What the tests of unequal TP share: whole nodes, rank by rank."""

import itertools
from contextlib import asynccontextmanager

import torch

from engine.cache.kv_pool import PagedKVPool
from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.plan import Grid, holdings, plan_nodes
from kv_transfer.receiver import KVReceiver, Received, TransferFailed
from kv_transfer.sender import KVSender, Sent
from serving_core import reasons
from serving_core.layout import KVLayout
from tests.unit.engine.some_heads import caches_of
from tests.unit.kv_transfer.transfer_kit import PATIENCE_S, ByteStore, Once, epochs

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=4, head_dim=4, block_size=2, dtype="float32")
IDS = range(4)
TAIL = b"tail"
SOURCE_IDS, TARGET_IDS = [4, 0, 1, 5, 3], [6, 2, 3, 1, 0]  # of pools of 6 and 8 blocks
CANCELLED_BY_SENDER = TransferFailed(reasons.TRANSFER_FAILED, "the sender's node cancelled the transfer")


def cut_caches(store, layer, block_id, heads):
    """The K and V cache of a block, these heads alone: worked out token by token, apart from the stores' own code."""
    layout = store.layout
    cut = []
    for (data,), cache in zip(caches_of(store, layer, [block_id]), layout.cache_shapes(layer), strict=True):
        num_columns = layout.block_size * layout.num_kv_heads
        size = cache.width * {"float32": 4, "bfloat16": 2}.get(layout.dtype, 1)
        columns = [data[place * size :][:size] for place in range(num_columns)]
        scales = [data[start : start + 4] for start in range(num_columns * size, len(data), 4)]
        parts = [column for place, column in enumerate(columns) if place % layout.num_kv_heads in heads]
        parts += [scale for head, scale in enumerate(scales) if head in heads]
        cut.append(memoryview(b"".join(parts)))
    return cut


def sliced(whole, tp_size, pp_size=1):
    """What each rank of a node holds of a whole model's KV."""
    stores = []
    for held in holdings(Grid(tp_size, pp_size), whole.layout.num_kv_heads, whole.layout.layers):
        store = ByteStore(whole.layout.with_layers(held.layers).with_heads(len(held.heads)), whole.num_blocks)
        for layer in held.layers:
            for block_id in range(whole.num_blocks):
                store.write(layer, [block_id], *cut_caches(whole, layer, block_id, held.heads))
        stores.append(store)
    return stores


class Nodes:
    """Every rank of a prefill node and of a decode node."""

    def __init__(
        self,
        fabric,
        layout,
        sources,
        targets,
        *,
        prefill_pp=1,
        decode_pp=1,
        deadline_s=PATIENCE_S,
        wrap=lambda dialer: dialer,
    ):
        self.layout, self.sources, self.targets = layout, sources, targets
        self.prefill = Grid(len(sources) // prefill_pp, prefill_pp)
        self.decode = Grid(len(targets) // decode_pp, decode_pp)
        self.receivers = [
            KVReceiver(fabric.listener(), store, rank=rank, tp_size=self.decode.tp, pp_size=decode_pp)
            for rank, store in enumerate(targets)
        ]
        self._fabric, self._dialers = fabric, [fabric.dialer() for _ in sources]
        self.senders = [
            KVSender(
                wrap(dialer),
                store,
                rank=rank,
                tp_size=self.prefill.tp,
                pp_size=prefill_pp,
                deadline_s=deadline_s,
            )
            for rank, (store, dialer) in enumerate(zip(sources, self._dialers, strict=True))
        ]

    async def meet(self):
        """Returns when each may send to each as the fabric is to try it."""
        for dialer, receiver in itertools.product(self._dialers, self.receivers):
            await self._fabric.meet(dialer, receiver.address)

    @property
    def copies(self):
        return plan_nodes(self.prefill, self.decode, self.layout.num_kv_heads, self.layout.layers)

    def descriptor(self, num_blocks, *, num_cached_blocks=0, ttl_s=PATIENCE_S):
        return TransferDescriptor.draw(
            epoch=next(epochs),
            layout=self.layout,
            prefill_tp=self.prefill.tp,
            prefill_pp=self.prefill.pp,
            decode_tp=self.decode.tp,
            decode_pp=self.decode.pp,
            addresses=[receiver.address for receiver in self.receivers],
            num_blocks=num_blocks,
            num_cached_blocks=num_cached_blocks,
            ttl_s=ttl_s,
        )

    def begin(self, target_ids, **kwargs):
        return Attempt(self, self.descriptor(len(target_ids), **kwargs), target_ids)

    def expected(self, num_blocks):
        """How an undisturbed transfer of so many blocks ends on each rank: of the senders, of the receivers."""
        sent, received = [0] * len(self.senders), [0] * len(self.receivers)
        for copy in self.copies:
            moved = self.layout.with_layers(copy.layers).with_heads(len(copy.source_heads))
            sent[copy.source_rank] += num_blocks * moved.block_bytes
            received[copy.destination_rank] += num_blocks * moved.block_bytes
        return [Sent(num_bytes) for num_bytes in sent], [Received(TAIL, num_bytes) for num_bytes in received]

    def bytes_of(self, block_ids):
        return [target.bytes_of(block_ids) for target in self.targets]

    async def close(self):
        for end in (*self.senders, *self.receivers):
            await end.close()
            assert end.num_open == 0


class Attempt:
    """One transfer, on all ranks of both nodes."""

    def __init__(self, nodes, descriptor, target_ids):
        self.descriptor = descriptor
        self.received = [Once() for _ in nodes.receivers]
        self.sent = [Once() for _ in nodes.senders]
        for receiver, received in zip(nodes.receivers, self.received, strict=True):
            receiver.expect(descriptor, target_ids, received)
        self.sendings = [
            sender.start(descriptor.encode(), sent) for sender, sent in zip(nodes.senders, self.sent, strict=True)
        ]

    def blocks_ready(self, block_ids, num_layers=None):
        for sending in self.sendings:
            sending.blocks_ready(block_ids, num_layers)

    def finish(self, block_ids, tail=TAIL):
        for sending in self.sendings:
            sending.finish(block_ids, tail)

    async def results(self):
        return [await sent.result() for sent in self.sent], [await received.result() for received in self.received]


@asynccontextmanager
async def nodes_of(fabric, whole, prefill_tp, decode_tp, num_target_blocks, *, prefill_pp=1, decode_pp=1, **kwargs):
    """Both nodes of a model whose KV is `whole`; the decode node's blocks are blank. In the end nothing is open."""
    sources = sliced(whole, prefill_tp, prefill_pp)
    targets = sliced(ByteStore(whole.layout, num_target_blocks), decode_tp, decode_pp)
    stages = {"prefill_pp": prefill_pp, "decode_pp": decode_pp}
    nodes = Nodes(fabric, whole.layout, sources, targets, **stages, **kwargs)
    try:
        await nodes.meet()
        yield nodes
    finally:
        await nodes.close()


async def check_pools(fabric, whole, prefill_tp, decode_tp):
    """A transfer between pools of the engine, whose bytes lie where the plain bytes of the tests have them."""
    sources = _pools(sliced(whole, prefill_tp))
    targets = _pools(sliced(ByteStore(whole.layout, 8), decode_tp))
    nodes = Nodes(fabric, whole.layout, sources, targets)
    await nodes.meet()
    attempt = nodes.begin(TARGET_IDS)
    attempt.finish(SOURCE_IDS)
    assert await attempt.results() == nodes.expected(len(SOURCE_IDS))
    await nodes.close()
    for target, expected in zip(targets, sliced(whole, decode_tp), strict=True):
        for layer in whole.layout.layers:
            assert b"".join(target.read(layer, TARGET_IDS)) == b"".join(expected.read(layer, SOURCE_IDS))
            assert not any(b"".join(target.read(layer, [4, 5, 7])))


def _pools(stores):
    pools = []
    for store in stores:
        pool = PagedKVPool(store.layout, store.num_blocks, torch.device("cpu"))
        for layer in store.layout.layers:
            pool.write(layer, range(store.num_blocks), *store.read(layer, range(store.num_blocks)))
        pools.append(pool)
    return pools
