"""the KV offload of a node of two ranks: each keeps its own part, in order with its own steps."""

import asyncio
import threading
from contextlib import asynccontextmanager, closing

import torch

from engine.cache import tier_store
from engine.cache.kv_pool import PagedKVPool
from engine.cache.tier_store import TierStore
from engine.stepper import Stepper
from protos import ranks_pb2
from serving_core.layout import KVLayout
from serving_core.node.tiers import Copies
from serving_core.requests import Request, SamplingParams, Work
from serving_node.decisions import CancelLoad, Load, Offload
from serving_node.ranks.follower import Follower
from serving_node.ranks.tiers import NodeTier
from tests.unit.serving_node.rank_kit import crew

LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
NUM_BLOCKS = 4
DEADLINE_S = 240.0


def fill(pool, block_id, value):
    caches = [torch.full((size,), value, dtype=torch.uint8) for size in LAYOUT.cache_bytes(0)]
    pool.write_tensors(0, [block_id], *caches)


def value_of(pool, block_id):
    keys, values = pool.read_tensors(0, [block_id])
    (value,) = {*keys.tolist(), *values.tolist()}
    return value


class NoTransfers:
    """Notes what a follower's transfers are told, and with what in block 0."""

    def __init__(self, pool):
        self._pool = pool
        self.told = []

    def handle(self, command):
        self.told.append((command.WhichOneof("command"), value_of(self._pool, 0)))

    def after_step(self, command):
        pass

    def on_layer(self, epochs, shares):
        return None


class TwoRanks:
    """Rank 0's side of the tier, and a whole follower whose steps write 9 into block 0 when they are let."""

    def __init__(self, followers, leader, stores, pools):
        self.pools, self.stores = pools, stores
        self.loaded, self.lost = asyncio.Queue(), []
        self.tier = NodeTier(stores[0], followers, lambda *each: self.loaded.put_nowait(each), self.lost.extend)
        self.followers = followers
        self.lets_step_end = threading.Event()
        self.transfers = NoTransfers(pools[1])
        self.follower = Follower(leader, Stepper(self._compute), self.transfers, stores[1])

    def _compute(self, shares, on_layer):
        assert self.lets_step_end.wait(DEADLINE_S)
        fill(self.pools[1], 0, 9)

    async def next_loaded(self):
        return await asyncio.wait_for(self.loaded.get(), DEADLINE_S)


@asynccontextmanager
async def two_ranks(monkeypatch):
    pools = [PagedKVPool(LAYOUT, NUM_BLOCKS, torch.device("cpu")) for _ in range(2)]
    with closing(TierStore(pools[0], 2, 2)) as first, closing(TierStore(pools[1], 2, 2)) as second:
        async with crew(monkeypatch, 1) as (followers, leaders):
            followers.on_event = lambda rank, event: None  # of transfers, which there are none of
            ranks = TwoRanks(followers, leaders[0], (first, second), pools)
            tasks = [asyncio.create_task(each) for each in (ranks.follower.run(), followers.watch())]
            try:
                yield ranks
            finally:
                ranks.lets_step_end.set()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_load_is_done_when_all_ranks_have_done_it(monkeypatch):
    async with two_ranks(monkeypatch) as ranks:
        for rank, pool in enumerate(ranks.pools):
            fill(pool, 0, 10 + rank)
            fill(pool, 1, 20 + rank)
        ranks.tier.carry_out(Offload(Copies([], [0, 1], [0, 3])))
        ranks.tier.carry_out(Load(1, [0, 3], [3, 2]))
        assert await ranks.next_loaded() == (1, 2)
        assert [value_of(pool, 3) for pool in ranks.pools] == [10, 11]
        assert [value_of(pool, 2) for pool in ranks.pools] == [20, 21]
        ranks.stores[1]._checksums[3] ^= 1  # damaged on one of them
        ranks.tier.carry_out(Load(2, [0, 3], [3, 2]))
        assert await ranks.next_loaded() == (2, 1)


async def test_what_rank_0_could_not_copy_is_told(monkeypatch):
    monkeypatch.setattr(tier_store, "OFFLOADED_BYTES", LAYOUT.block_bytes)
    async with two_ranks(monkeypatch) as ranks:
        ranks.tier.carry_out(Offload(Copies([], [0, 1], [1, 0])))
        assert ranks.lost == [1]
        ranks.tier.carry_out(Load(1, [0], [3]))
        assert await ranks.next_loaded() == (1, 1)


async def test_a_follower_copies_what_its_steps_have_written(monkeypatch):
    """And lets nobody write to a block before: credits wait for the copy, where they would not wait for the step."""
    async with two_ranks(monkeypatch) as ranks:
        fill(ranks.pools[1], 0, 5)
        request = Request("r", 1, [1, 2], 2, SamplingParams(max_tokens=1))
        ranks.followers.announce([Work(request, 0, 2, [0])])
        ranks.followers.send(credit=ranks_pb2.Credit(epoch=6))
        ranks.tier.carry_out(Offload(Copies([], [0], [0])))
        ranks.followers.send(credit=ranks_pb2.Credit(epoch=7))
        ranks.tier.carry_out(Load(1, [0], [2]))
        async with asyncio.timeout(DEADLINE_S):
            while not ranks.transfers.told:
                await asyncio.sleep(0.001)
        assert ranks.transfers.told == [("credit", 5)]
        ranks.lets_step_end.set()
        assert await ranks.next_loaded() == (1, 1)
        assert ranks.transfers.told == [("credit", 5), ("credit", 9)]
        assert value_of(ranks.pools[1], 2) == 9


async def test_a_cancel_does_not_overtake_the_grant_that_waited_for_a_copy(monkeypatch):
    """Behind the copy comes another step, and the cancel while that one runs."""
    async with two_ranks(monkeypatch) as ranks:
        request = Request("r", 1, [1, 2], 2, SamplingParams(max_tokens=1))
        copied = asyncio.Event()
        monkeypatch.setattr(ranks.stores[1], "offload", lambda copies: copied.set())
        ranks.followers.announce([Work(request, 0, 2, [0])])
        ranks.tier.carry_out(Offload(Copies([], [0], [0])))
        ranks.followers.announce([Work(request, 0, 2, [0])])
        ranks.followers.send(credit=ranks_pb2.Credit(epoch=7))
        ranks.lets_step_end.set()
        await asyncio.wait_for(copied.wait(), DEADLINE_S)
        ranks.followers.send(cancel_transfer=ranks_pb2.CancelTransfer(epoch=7))
        async with asyncio.timeout(DEADLINE_S):
            while len(ranks.transfers.told) < 2:
                await asyncio.sleep(0.001)
        assert [kind for kind, _ in ranks.transfers.told] == ["credit", "cancel_transfer"]


async def test_a_load_that_was_given_up_is_not_told(monkeypatch):
    async with two_ranks(monkeypatch) as ranks:
        ranks.tier.carry_out(Offload(Copies([], [0], [0])))
        ranks.tier.carry_out(Load(1, [0], [2]))
        ranks.tier.carry_out(CancelLoad(1))
        ranks.tier.carry_out(Load(2, [0], [3]))
        assert await ranks.next_loaded() == (2, 1)
        assert ranks.loaded.empty()
