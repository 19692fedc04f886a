"""All ranks of a prefill node and of a decode node, each with its own sender or receiver, led over real sockets."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from decode_node.ranks import DecodeFollower, DecodeRanks
from prefill_node.ranks import PrefillFollower, PrefillRanks

from engine.stepper import Stepper
from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.ends.sender import KVSender
from kv_transfer.results import Received, Sent, TransferFailed
from kv_transfer.ticket import Ticket
from kv_transfer.transports.loopback import LoopbackNetwork
from serving_core.layout import KVLayout
from serving_core.requests import Request, SamplingParams, Work
from serving_core.sharding import head_range
from serving_node.ranks.follower import Follower
from tests.unit.kv_transfer.transfer_kit import ByteStore
from tests.unit.node.rank_kit import crew

LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 12


class Ends:
    """What a node hears of its transfers."""

    def __init__(self):
        self.results = {}
        self.granted = []
        self._news = asyncio.Event()

    def ended(self, epoch, result):
        assert epoch not in self.results, "a transfer ended twice"
        self.results[epoch] = result
        self._news.set()

    def was_granted(self, epoch):
        self.granted.append(epoch)
        self._news.set()

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                self._news.clear()
                await self._news.wait()


class Pair:
    """A prefill node and a decode node without their schedulers: their ranks, stores and what they hear."""

    def __init__(self, prefill_tp, decode_tp, overlap_min_tokens=0):
        whole = ByteStore(LAYOUT, NUM_BLOCKS, seed=1)
        self.network = LoopbackNetwork()
        self.sources = [_slice(whole, rank, prefill_tp) for rank in range(prefill_tp)]
        self.expected = [_slice(whole, rank, decode_tp) for rank in range(decode_tp)]
        self.targets = [ByteStore(store.layout, NUM_BLOCKS) for store in self.expected]
        self.senders = [
            KVSender(self.network.dialer(), store, rank=rank, tp_size=prefill_tp, deadline_s=5.0)
            for rank, store in enumerate(self.sources)
        ]
        self.receivers = [
            KVReceiver(self.network.listener(f"rank-{rank}"), store, rank=rank, tp_size=decode_tp)
            for rank, store in enumerate(self.targets)
        ]
        self.sent, self.received = Ends(), Ends()
        self.overlap_min_tokens = overlap_min_tokens
        self.steps = [[] for _ in range(prefill_tp)]

    def ticket(self, epoch, num_cached=0):
        return Ticket.draw(
            epoch=epoch,
            layout=LAYOUT,
            prefill_tp=len(self.sources),
            decode_tp=len(self.targets),
            addresses=self.decode.addresses,
            num_blocks=NUM_BLOCKS,
            num_cached_blocks=num_cached,
            ttl_s=10.0,
        )

    def compute(self, rank):
        """What stands where a follower's engine does: tells of each layer."""

        def step(shares, on_layer):
            self.steps[rank].append([(share.start, share.num_tokens) for share in shares])
            if on_layer is not None:
                for layer in range(LAYOUT.num_layers):
                    on_layer(layer + 1)

        return step

    def check_bytes(self, first_block=0):
        ids = range(first_block, NUM_BLOCKS)
        for target, expected in zip(self.targets, self.expected, strict=True):
            assert target.bytes_of(ids) == expected.bytes_of(ids)


def _slice(whole, rank, tp_size):
    heads = head_range(rank, tp_size, LAYOUT.num_kv_heads)
    store = ByteStore(LAYOUT.with_heads(len(heads)), NUM_BLOCKS)
    for layer in range(LAYOUT.num_layers):
        ids = range(NUM_BLOCKS)
        store.write(layer, ids, *whole.heads(heads).read(layer, ids))
    return store


@asynccontextmanager
async def nodes(monkeypatch, prefill_tp, decode_tp, **options):
    """A Pair whose followers obey."""
    pair = Pair(prefill_tp, decode_tp, **options)
    addresses = {rank: receiver.address for rank, receiver in enumerate(pair.receivers)}
    async with (
        crew(monkeypatch, prefill_tp - 1) as (prefill_followers, prefill_leaders),
        crew(monkeypatch, decode_tp - 1, addresses) as (decode_followers, decode_leaders),
    ):
        layout, overlap = pair.sources[0].layout, pair.overlap_min_tokens
        pair.prefill = PrefillRanks(layout, pair.senders[0], prefill_followers, overlap, pair.sent.ended)
        pair.decode = DecodeRanks(pair.receivers[0], decode_followers, pair.received.was_granted, pair.received.ended)
        tasks = [asyncio.create_task(each.watch()) for each in (prefill_followers, decode_followers)]
        for rank, leader in enumerate(prefill_leaders, start=1):
            role = PrefillFollower(pair.sources[rank].layout, pair.senders[rank], leader, overlap)
            tasks.append(asyncio.create_task(Follower(leader, Stepper(pair.compute(rank)), role).run()))
        for rank, leader in enumerate(decode_leaders, start=1):
            role = DecodeFollower(pair.receivers[rank], leader)
            tasks.append(asyncio.create_task(Follower(leader, Stepper(lambda *_: None), role).run()))
        try:
            yield pair
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (*pair.senders, *pair.receivers):
                await end.close()
                assert end.num_open == 0


SIZES = [(1, 1), (2, 1), (1, 3), (2, 3), (4, 2), (8, 4)]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
async def test_a_transfer_over_all_ranks(prefill_tp, decode_tp, monkeypatch):
    """Blocks of two chunks leave as they are computed, those of the first when the ticket comes."""
    async with nodes(monkeypatch, prefill_tp, decode_tp) as pair:
        ids, ticket = list(range(NUM_BLOCKS)), pair.ticket(5)
        pair.decode.grant(ticket, ids)
        await pair.received.until(lambda: pair.received.granted == [5])
        num_tokens = NUM_BLOCKS * LAYOUT.block_size
        prompt = Request("r", 5, list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=4))
        chunks = [Work(prompt, 0, 30, ids), Work(prompt, 30, num_tokens - 30, ids)]
        pair.prefill.announce(chunks[:1])
        pair.prefill.send(5, ticket.encode(), ids[: 30 // LAYOUT.block_size])
        pair.prefill.announce(chunks[1:])
        on_layer = pair.prefill.on_layer(chunks[1:])
        for layer in range(LAYOUT.num_layers):
            on_layer(layer + 1)
        pair.prefill.finish(5, ids, b"tail")
        await pair.sent.until(lambda: pair.sent.results)
        await pair.received.until(lambda: pair.received.results)
        num_bytes = sum(NUM_BLOCKS * store.layout.block_bytes for store in pair.expected)
        assert pair.sent.results == {5: Sent(num_bytes)}
        assert pair.received.results == {5: Received(b"tail", num_bytes)}
        pair.check_bytes()
        assert pair.steps[1:] == [[[(0, 30)], [(30, num_tokens - 30)]]] * (prefill_tp - 1)


async def test_cached_blocks_stay_as_they_are(monkeypatch):
    async with nodes(monkeypatch, 2, 3) as pair:
        ids, ticket = list(range(NUM_BLOCKS)), pair.ticket(1, num_cached=7)
        pair.decode.grant(ticket, ids)
        await pair.received.until(lambda: pair.received.granted)
        pair.prefill.send(1, ticket.encode(), ids)
        pair.prefill.finish(1, ids, b"t")
        await pair.received.until(lambda: pair.received.results)
        pair.check_bytes(first_block=7)
        assert not any(any(target.bytes_of(range(7))) for target in pair.targets)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_cancel_ends_it_on_every_rank(side, monkeypatch):
    async with nodes(monkeypatch, 3, 2) as pair:
        ids, ticket = list(range(NUM_BLOCKS)), pair.ticket(9)
        pair.decode.grant(ticket, ids)
        await pair.received.until(lambda: pair.received.granted)
        pair.prefill.send(9, ticket.encode(), ids[:5])
        (pair.prefill if side == "prefill" else pair.decode).cancel(9)
        ended = pair.sent if side == "prefill" else pair.received
        await ended.until(lambda: ended.results)
        (pair.prefill if side == "decode" else pair.decode).cancel(9)
        await pair.sent.until(lambda: pair.sent.results)
        await pair.received.until(lambda: pair.received.results)
        for results in (pair.sent.results, pair.received.results):
            assert type(results[9]) is TransferFailed
        assert all(end.num_open == 0 for end in (*pair.senders, *pair.receivers))


async def test_one_rank_that_cannot_send_fails_the_transfer(monkeypatch):
    async with nodes(monkeypatch, 3, 3) as pair:
        ids, ticket = list(range(NUM_BLOCKS)), pair.ticket(2)
        pair.decode.grant(ticket, ids)
        await pair.received.until(lambda: pair.received.granted)
        await pair.senders[2].close()
        pair.prefill.send(2, ticket.encode(), ids)
        pair.prefill.finish(2, ids, b"t")
        await pair.sent.until(lambda: pair.sent.results)
        assert type(pair.sent.results[2]) is TransferFailed
        pair.decode.cancel(2)
        await pair.received.until(lambda: pair.received.results)


async def test_one_rank_that_cannot_receive_gives_no_ticket(monkeypatch):
    async with nodes(monkeypatch, 1, 3) as pair:
        await pair.receivers[1].close()
        pair.decode.grant(pair.ticket(3), list(range(NUM_BLOCKS)))
        await pair.received.until(lambda: pair.received.results)
        assert type(pair.received.results[3]) is TransferFailed
        assert pair.received.granted == []


async def test_tickets_that_cannot_be_read_fail_on_every_rank(monkeypatch):
    async with nodes(monkeypatch, 3, 1) as pair:
        pair.prefill.send(4, b"not a ticket", [])
        await pair.sent.until(lambda: pair.sent.results)
        assert "ticket" in pair.sent.results[4].message or "msgpack" in pair.sent.results[4].message


async def test_short_prompts_leave_at_once(monkeypatch):
    """At the threshold blocks leave layer by layer, below it the step reports nothing."""
    async with nodes(monkeypatch, 1, 1, overlap_min_tokens=16) as pair:

        def work(num_tokens, start=0, known=None):
            tokens = list(range(known or num_tokens))
            return Work(
                Request("r", 1, tokens, len(tokens), SamplingParams(max_tokens=1)), start, num_tokens, range(12)
            )

        assert pair.prefill.on_layer([work(15)]) is None
        assert pair.prefill.on_layer([work(16)]) is not None
        assert pair.prefill.on_layer([work(15), work(16)]) is not None
        assert pair.prefill.on_layer([work(8, start=8)]) is not None
        assert pair.prefill.on_layer([work(8, known=40)]) is not None, "a chunk of a long prompt"
