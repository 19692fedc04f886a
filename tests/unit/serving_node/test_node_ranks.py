"""All ranks of two nodes, each with its own sender and receiver, led over real sockets."""

import asyncio
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from engine.stepper import Stepper
from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.receiver import KVReceiver
from kv_transfer.results import Received, Sent, TransferFailed
from kv_transfer.sender import KVSender
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from kv_transfer.transports.zmq_keys import Keyring
from serving_core import reasons
from serving_core.layout import KVLayout
from serving_core.requests import Request, SamplingParams, Work
from serving_core.sharding import head_range
from serving_node.ranks.follower import Follower
from serving_node.ranks.transfers import FollowerTransfers, NodeTransfers
from tests.unit.kv_transfer.transfer_kit import ByteStore
from tests.unit.serving_node.rank_kit import crew

LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=4, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 12
IDS = list(range(NUM_BLOCKS))
DEADLINE_S = 240.0


class Ends:
    """What a node hears of its transfers in one direction."""

    def __init__(self):
        self.results = {}
        self.granted = []
        self.caught_up = []
        self.coming = []
        self._news = asyncio.Event()

    def ended(self, epoch, result):
        assert epoch not in self.results, "a transfer ended twice"
        self.results[epoch] = result
        self._news.set()

    def was_granted(self, epoch):
        self.granted.append(epoch)
        self._news.set()

    def comes(self, epoch):
        assert epoch not in self.results, "the first of it came behind the last"
        self.coming.append(epoch)
        self._news.set()

    def has_caught_up(self, epoch):
        self.caught_up.append(epoch)
        self._news.set()

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def until_passed(self, condition):
        """For what nobody is told of."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.001)


class Node:
    """The ranks of a node without its scheduler: their stores and ends, and what rank 0 hears."""

    def __init__(self, network, name, tp_size, seed, *, may_lag=False):
        whole = ByteStore(LAYOUT, NUM_BLOCKS, seed=seed)
        self.name, self.tp_size, self.may_lag = name, tp_size, may_lag
        self.stores = [_slice(whole, rank, tp_size) for rank in range(tp_size)]
        self.senders = [
            KVSender(network.dialer(), store, rank=rank, tp_size=tp_size, deadline_s=DEADLINE_S)
            for rank, store in enumerate(self.stores)
        ]
        self.receivers = [
            KVReceiver(network.listener(f"{name}-{rank}"), store, rank=rank, tp_size=tp_size)
            for rank, store in enumerate(self.stores)
        ]
        self.sent, self.received = Ends(), Ends()
        self.steps = [[] for _ in range(tp_size)]
        self.lets_steps_end = threading.Event()
        self.lets_steps_end.set()

    def lead(self, followers, overlap_min_tokens):
        self.followers = followers
        events = SimpleNamespace(
            credited=lambda epoch, descriptor: self.received.was_granted(epoch),
            receiving=self.received.comes,
            received=self.received.ended,
            caught_up=self.sent.has_caught_up,
            sent=self.sent.ended,
        )
        ends = self.senders[0], self.receivers[0]
        options = {"pp_size": 1, "overlap_min_tokens": overlap_min_tokens, "ttl_s": DEADLINE_S}
        self.transfers = NodeTransfers(LAYOUT, *ends, followers, events, **options)

    def follow(self, rank, leader, overlap_min_tokens):
        transfers = FollowerTransfers(
            self.senders[rank],
            self.receivers[rank],
            leader,
            overlap_min_tokens,
            may_lag=self.may_lag,
        )
        return Follower(leader, Stepper(self._compute(rank)), transfers)

    def _compute(self, rank):
        """What stands where a follower's engine does: tells of each layer."""

        def step(shares, on_layer):
            self.steps[rank].append([(share.start, share.num_tokens) for share in shares])
            assert self.lets_steps_end.wait(DEADLINE_S)
            if on_layer is not None:
                for layer in range(LAYOUT.num_layers):
                    on_layer(layer + 1)

        return step

    def descriptor(self, epoch, source, num_cached=0):
        """That lets `source` write to this node."""
        return TransferDescriptor.draw(
            epoch=epoch,
            layout=LAYOUT,
            prefill_tp=source.tp_size,
            decode_tp=self.tp_size,
            addresses=self.transfers.addresses,
            num_blocks=NUM_BLOCKS,
            num_cached_blocks=num_cached,
            ttl_s=DEADLINE_S,
        )

    def receive(self, descriptor, block_ids=IDS):
        self.transfers.open(descriptor, block_ids)

    async def open_to(self, source, epoch, **cached):
        """Credits all blocks to what `source` sends; gives the descriptor."""
        descriptor = self.descriptor(epoch, source, **cached)
        self.receive(descriptor)
        await self.received.until(lambda: epoch in self.received.granted)
        return descriptor.encode()

    def bytes_of(self, ids):
        return [store.bytes_of(ids) for store in self.stores]

    async def close(self):
        for end in (*self.senders, *self.receivers):
            await end.close()
            assert end.num_open == 0


def _slice(whole, rank, tp_size):
    heads = head_range(rank, tp_size, LAYOUT.num_kv_heads)
    store = ByteStore(LAYOUT.with_heads(len(heads)), NUM_BLOCKS)
    for layer in range(LAYOUT.num_layers):
        store.write(layer, IDS, *whole.heads(heads).read(layer, IDS))
    return store


def sliced_bytes(seed, tp_size, ids=IDS):
    """What the ranks of a node of another size hold of the same blocks."""
    whole = ByteStore(LAYOUT, NUM_BLOCKS, seed=seed)
    return [_slice(whole, rank, tp_size).bytes_of(ids) for rank in range(tp_size)]


A_SEED, B_SEED = 1, 2


@asynccontextmanager
async def nodes(monkeypatch, a_size, b_size, overlap_min_tokens=0, network=None, *, may_lag=False):
    """Two nodes, a and b, whose followers obey."""
    network = network or LoopbackNetwork()
    a, b = (
        Node(network, name, size, seed, may_lag=may_lag)
        for name, size, seed in (("a", a_size, A_SEED), ("b", b_size, B_SEED))
    )
    async with (
        crew(monkeypatch, a_size - 1, addresses(a), keys(a)) as a_crew,
        crew(monkeypatch, b_size - 1, addresses(b), keys(b)) as b_crew,
    ):
        tasks = []
        for node, (followers, leaders) in ((a, a_crew), (b, b_crew)):
            node.lead(followers, overlap_min_tokens)
            tasks.append(asyncio.create_task(followers.watch()))
            for rank, leader in enumerate(leaders, start=1):
                tasks.append(asyncio.create_task(node.follow(rank, leader, overlap_min_tokens).run()))
        try:
            yield a, b
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await a.close()
            await b.close()


def addresses(node):
    return {rank: receiver.address for rank, receiver in enumerate(node.receivers)}


def keys(node):
    return {rank: sender.transport.key for rank, sender in enumerate(node.senders)}


class GuardedNetwork:
    """Encrypted connections, to which no key is known at first."""

    def listener(self, _):
        return ZmqListener("tcp://127.0.0.1:*", Keyring())

    def dialer(self):
        return ZmqDialer(Keyring())


@pytest.mark.parametrize(("a_size", "b_size"), [(1, 1), (1, 3), (2, 3), (4, 2)])
async def test_every_rank_lets_in_the_ranks_that_it_has_heard_of(a_size, b_size, monkeypatch):
    async with nodes(monkeypatch, a_size, b_size, network=GuardedNetwork()) as (a, b):
        assert len({*a.transfers.keys}) == a_size
        b.transfers.admit(a.transfers.keys)
        descriptor = await b.open_to(a, 5)
        a.transfers.send(5, descriptor, IDS)
        a.transfers.finish(5, IDS, b"tail")
        await a.sent.until(lambda: a.sent.results)
        await b.received.until(lambda: b.received.results)
        assert isinstance(a.sent.results[5], Sent)
        assert b.bytes_of(IDS) == sliced_bytes(A_SEED, b_size)


SIZES = [(1, 1), (2, 1), (1, 3), (2, 3), (4, 2), (8, 4)]


@pytest.mark.parametrize(("a_size", "b_size"), SIZES)
async def test_a_transfer_over_all_ranks(a_size, b_size, monkeypatch):
    """Blocks of two chunks leave as they are computed, those of the first when the descriptor comes."""
    async with nodes(monkeypatch, a_size, b_size) as (a, b):
        descriptor = await b.open_to(a, 5)
        num_tokens = NUM_BLOCKS * LAYOUT.block_size
        prompt = Request("r", 5, list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=4))
        chunks = [Work(prompt, 0, 30, IDS), Work(prompt, 30, num_tokens - 30, IDS)]
        a.followers.announce(chunks[:1])
        a.transfers.send(5, descriptor, IDS[: 30 // LAYOUT.block_size])
        a.followers.announce(chunks[1:])
        on_layer = a.transfers.on_layer(chunks[1:])
        for layer in range(LAYOUT.num_layers):
            on_layer(layer + 1)
        a.transfers.finish(5, IDS, b"tail")
        await a.sent.until(lambda: a.sent.results)
        await b.received.until(lambda: b.received.results)
        num_bytes = sum(NUM_BLOCKS * store.layout.block_bytes for store in b.stores)
        assert a.sent.results == {5: Sent(num_bytes)}
        assert b.received.results == {5: Received(b"tail", num_bytes)}
        assert b.received.coming == [5]
        assert b.bytes_of(IDS) == sliced_bytes(A_SEED, b_size)
        assert a.steps[1:] == [[[(0, 30)], [(30, num_tokens - 30)]]] * (a_size - 1)


@pytest.mark.parametrize(("a_size", "b_size"), [(1, 1), (2, 1), (2, 3)])
async def test_both_directions_at_once(a_size, b_size, monkeypatch):
    """Half of each pool goes to the other half of the other's, while theirs comes."""
    async with nodes(monkeypatch, a_size, b_size) as (a, b):
        half = NUM_BLOCKS // 2
        mine, theirs = IDS[:half], IDS[half:]
        for node, source, epoch in ((b, a, 1), (a, b, 2)):
            descriptor = TransferDescriptor.draw(
                epoch=epoch,
                layout=LAYOUT,
                prefill_tp=source.tp_size,
                decode_tp=node.tp_size,
                addresses=node.transfers.addresses,
                num_blocks=half,
                num_cached_blocks=0,
                ttl_s=DEADLINE_S,
            )
            node.receive(descriptor, theirs)
            await node.received.until(lambda node=node: node.received.granted)
            source.transfers.send(epoch, descriptor.encode(), mine)
        a.transfers.finish(1, mine, b"from a")
        b.transfers.finish(2, mine, b"from b")
        for node in (a, b):
            await node.sent.until(lambda node=node: node.sent.results)
            await node.received.until(lambda node=node: node.received.results)
        assert [type(result) for node in (a, b) for result in node.sent.results.values()] == [Sent, Sent]
        assert b.received.results[1].tail == b"from a"
        assert a.received.results[2].tail == b"from b"
        assert b.bytes_of(theirs) == sliced_bytes(A_SEED, b_size, mine)
        assert a.bytes_of(theirs) == sliced_bytes(B_SEED, a_size, mine)
        assert a.bytes_of(mine) == sliced_bytes(A_SEED, a_size, mine)


@pytest.mark.parametrize(("a_size", "b_size"), SIZES)
async def test_a_node_has_caught_up_once_when_all_of_its_ranks_have(a_size, b_size, monkeypatch):
    async with nodes(monkeypatch, a_size, b_size) as (a, b):
        a.transfers.send(5, await b.open_to(a, 5), IDS[:4])
        await a.sent.until(lambda: a.sent.caught_up)
        num_bytes = [store.layout.block_bytes * 4 for store in b.stores]
        assert [receiver.num_bytes for receiver in b.receivers] == num_bytes
        a.transfers.send_more(5, IDS[:7])
        await b.received.until_passed(lambda: b.receivers[-1].num_bytes == 7 * b.stores[-1].layout.block_bytes)
        a.transfers.finish(5, IDS[:9], b"tail")
        await a.sent.until(lambda: a.sent.results)
        await b.received.until(lambda: b.received.results)
        assert b.received.results[5].tail == b"tail"
        assert b.bytes_of(IDS[:9]) == sliced_bytes(A_SEED, b_size, IDS[:9])
        assert a.sent.caught_up == [5]


async def test_a_rank_whose_steps_lag_takes_nothing_of_an_ended_transfer_for_the_next_one(monkeypatch):
    """Of what a follower was told behind its step, the transfer that it was about has ended when the step ends."""
    async with nodes(monkeypatch, 2, 1) as (a, b):
        a.lets_steps_end.clear()
        request = Request("r", 9, list(range(30)), 30, SamplingParams(max_tokens=4))
        a.followers.announce([Work(request, 0, 30, IDS)])
        a.transfers.send(9, await b.open_to(a, 9), IDS[:5])
        a.transfers.send_more(9, IDS[5:])
        a.transfers.finish(9, IDS[6:], b"old")
        a.transfers.cancel(9)
        await a.sent.until(lambda: a.sent.results)
        await b.received.until(lambda: b.received.results)
        for ends in (a.sent, b.received):
            ends.results.clear()
            ends.granted.clear()
        a.transfers.send(9, await b.open_to(a, 9), IDS[:3])
        a.lets_steps_end.set()
        await a.sent.until(lambda: a.sent.caught_up)
        a.transfers.finish(9, IDS, b"new")
        await a.sent.until(lambda: a.sent.results)
        await b.received.until(lambda: b.received.results)
        assert b.received.results[9].tail == b"new"
        assert b.bytes_of(IDS) == sliced_bytes(A_SEED, 1)


async def test_blocks_that_a_running_step_writes_to_leave_behind_it(monkeypatch):
    """An answer begins to move while a step of it has draft tokens: its last block is written to later, too."""
    async with nodes(monkeypatch, 2, 1, overlap_min_tokens=16) as (a, b):
        descriptor = await b.open_to(a, 5)
        answer = Request("r", 5, list(range(17)), 8, SamplingParams(max_tokens=99))
        a.lets_steps_end.clear()
        a.followers.announce([Work(answer, 16, 1, IDS[:5], draft_tokens=(7,))])
        a.transfers.send(5, descriptor, IDS[:4])
        await a.sent.until_passed(lambda: a.senders[1].num_open)
        a.lets_steps_end.set()
        await a.sent.until(lambda: a.sent.caught_up)
        for store in a.stores:  # what later steps do
            store.flip(0, 4)
        a.transfers.finish(5, IDS[:5], b"tail")
        await b.received.until(lambda: b.received.results)
        heads = [b.stores[0].heads(head_range(rank, 2, LAYOUT.num_kv_heads)) for rank in range(2)]
        for layer in range(LAYOUT.num_layers):
            sent = [list(map(bytes, store.read(layer, IDS[:5]))) for store in a.stores]
            assert [list(map(bytes, store.read(layer, IDS[:5]))) for store in heads] == sent


async def test_a_descriptor_that_comes_during_a_chunk_sends_no_block_twice(monkeypatch):
    monkeypatch.setattr("kv_transfer.payload.MESSAGE_BYTES", 1)  # a message for each block
    async with nodes(monkeypatch, 2, 1) as (a, b):
        descriptor = await b.open_to(a, 5)
        prompt = Request("r", 5, list(range(48)), 48, SamplingParams(max_tokens=4))
        a.lets_steps_end.clear()
        a.followers.announce([Work(prompt, 0, 48, IDS)])
        a.transfers.send(5, descriptor, [])
        await a.sent.until_passed(lambda: a.senders[1].num_open)
        a.lets_steps_end.set()
        a.transfers.finish(5, IDS, b"tail")
        await b.received.until(lambda: b.received.results)
        assert b.received.results[5].tail == b"tail"
        assert b.receivers[0].num_corrupt_blocks == 0
        assert b.bytes_of(IDS) == sliced_bytes(A_SEED, 1)


async def test_a_rank_whose_steps_lag_opens_no_block_that_its_step_may_write_to(monkeypatch):
    """Rank 0 is done with the step, and has given the blocks of a request that ended with it to another."""
    async with nodes(monkeypatch, 2, 2, may_lag=True) as (a, b):
        request = Request("old", 4, list(range(30)), 30, SamplingParams(max_tokens=4))
        to_a = await a.open_to(b, 6)
        b.lets_steps_end.clear()
        b.followers.announce([Work(request, 0, 30, IDS)])
        b.receive(b.descriptor(5, a))
        b.receive(b.descriptor(7, a))
        b.transfers.cancel(7)
        b.transfers.send(6, to_a, [])
        await b.sent.until_passed(lambda: b.senders[1].num_open)  # the follower has heard of all of that
        assert (b.receivers[1].num_open, b.received.granted, b.received.results) == (0, [], {})
        b.lets_steps_end.set()
        await b.received.until(lambda: b.received.granted == [5] and 7 in b.received.results)
        assert type(b.received.results[7]) is TransferFailed
        for node, epoch in ((b, 5), (b, 6), (a, 6)):
            node.transfers.cancel(epoch)
        await b.received.until(lambda: 5 in b.received.results)
        await b.sent.until(lambda: 6 in b.sent.results)
        await a.received.until(lambda: 6 in a.received.results)


async def test_cached_blocks_stay_as_they_are(monkeypatch):
    async with nodes(monkeypatch, 2, 3) as (a, b):
        descriptor = await b.open_to(a, 1, num_cached=7)
        a.transfers.send(1, descriptor, IDS)
        a.transfers.finish(1, IDS, b"t")
        await b.received.until(lambda: b.received.results)
        assert b.bytes_of(IDS[7:]) == sliced_bytes(A_SEED, 3, IDS[7:])
        assert b.bytes_of(IDS[:7]) == sliced_bytes(B_SEED, 3, IDS[:7])


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (4, 1)])
@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("may_lag", [False, True])
async def test_cancel_ends_it_on_every_rank(side, sizes, may_lag, monkeypatch):
    async with nodes(monkeypatch, *sizes, may_lag=may_lag) as (a, b):
        descriptor = await b.open_to(a, 9)
        a.transfers.send(9, descriptor, IDS[:5])
        (a if side == "sender" else b).transfers.cancel(9)
        ended = a.sent if side == "sender" else b.received
        await ended.until(lambda: ended.results)
        (a if side == "receiver" else b).transfers.cancel(9)
        await a.sent.until(lambda: a.sent.results)
        await b.received.until(lambda: b.received.results)
        for results in (a.sent.results, b.received.results):
            assert type(results[9]) is TransferFailed
        assert all(end.num_open == 0 for end in (*a.senders, *b.receivers))


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (2, 3), (4, 1)])
async def test_a_sender_whose_receiver_takes_its_blocks_back_hears_that_and_sends_by_the_next_descriptor(
    sizes, monkeypatch
):
    async with nodes(monkeypatch, *sizes) as (a, b):
        descriptor = await b.open_to(a, 9)
        a.transfers.send(9, descriptor, IDS[:5])
        b.transfers.cancel(9)
        await b.received.until(lambda: b.received.results)
        await a.sent.until(lambda: a.sent.results)
        assert a.sent.results.pop(9).reason == reasons.TRANSFER_REVOKED
        b.received.results.clear()
        b.received.granted.clear()
        a.transfers.send(9, await b.open_to(a, 9), IDS)
        a.transfers.finish(9, IDS, b"t")
        await a.sent.until(lambda: a.sent.results)
        await b.received.until(lambda: b.received.results)
        assert b.received.results[9].tail == b"t"
        assert b.bytes_of(IDS) == sliced_bytes(A_SEED, sizes[1])


async def test_one_rank_that_cannot_send_fails_the_transfer(monkeypatch):
    async with nodes(monkeypatch, 3, 3) as (a, b):
        descriptor = await b.open_to(a, 2)
        await a.senders[2].close()
        a.transfers.send(2, descriptor, IDS)
        a.transfers.finish(2, IDS, b"t")
        await a.sent.until(lambda: a.sent.results)
        assert type(a.sent.results[2]) is TransferFailed
        b.transfers.cancel(2)
        await b.received.until(lambda: b.received.results)


async def test_one_rank_that_cannot_receive_gives_no_descriptor(monkeypatch):
    async with nodes(monkeypatch, 1, 3) as (a, b):
        await b.receivers[1].close()
        b.receive(b.descriptor(3, a))
        await b.received.until(lambda: b.received.results)
        assert type(b.received.results[3]) is TransferFailed
        assert b.received.granted == []


async def test_descriptors_that_cannot_be_read_fail_on_every_rank(monkeypatch):
    async with nodes(monkeypatch, 3, 1) as (a, _):
        a.transfers.send(4, b"not a descriptor", [])
        await a.sent.until(lambda: a.sent.results)
        assert "descriptor" in a.sent.results[4].message or "msgpack" in a.sent.results[4].message


async def test_short_prompts_leave_at_once(monkeypatch):
    """At the threshold blocks leave layer by layer, below it the step reports nothing."""
    async with nodes(monkeypatch, 1, 1, overlap_min_tokens=16) as (a, _):

        def work(num_tokens, start=0, known=None):
            tokens = list(range(known or num_tokens))
            return Work(
                Request("r", 1, tokens, len(tokens), SamplingParams(max_tokens=1)), start, num_tokens, range(12)
            )

        on_layer = a.transfers.on_layer
        assert on_layer([work(15)]) is None
        assert on_layer([work(1, start=30, known=31)]) is None, "one token is as good as nothing"
        assert on_layer([work(16)]) is not None
        assert on_layer([work(15), work(16)]) is not None
        assert on_layer([work(8, start=8)]) is not None
        assert on_layer([work(8, known=40)]) is not None, "a chunk of a long prompt"
