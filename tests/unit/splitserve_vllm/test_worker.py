"""The transfers of vLLM's workers: real threads, sockets and sessions. Tests report steps as vLLM does, and lead the
workers as nodes do.
"""

import asyncio
import contextlib

import pytest
import torch

from protos import ranks_pb2
from serving_node.ranks.leading import Followers
from splitserve_vllm.scheduling import Chunk, Load, StepTransfers
from splitserve_vllm.store import VllmStore
from splitserve_vllm.worker import Worker

BLOCK, LAYERS = 4, 3
DEADLINE_S = 60.0


class Side:
    """A worker, and what its node hears of it."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.caches = {f"layers.{layer}.attn": torch.randn(8, 2, BLOCK, 6) for layer in range(LAYERS)}
        self.leader = Followers(1)
        self.events = asyncio.Queue()
        self.leader.on_event = lambda rank, event: self.events.put_nowait(event)
        self.sent, self.received, self.failed = set(), set(), set()

    def start(self, tmp_path, meeting, rank=0, tp_size=1, **config):
        defaults = {
            "kv_bind": f"ipc://{tmp_path}/{id(self)}",
            "kv_shared_memory": False,
            "is_encrypted": False,
            "transfer_timeout_s": DEADLINE_S,
            "reservation_ttl_s": DEADLINE_S,
            "hold_s": DEADLINE_S,
            "secret": "01" * 32,
        }
        store = VllmStore(self.caches, BLOCK)
        whole = store.layout.with_heads(tp_size * store.layout.num_kv_heads)
        self.worker = Worker(store, {"meeting": meeting.hex(), **defaults, **config}, whole, rank, tp_size)
        return []

    @contextlib.asynccontextmanager
    async def started(self, tmp_path, **config):
        def start(meeting):
            return self.start(tmp_path, meeting, **config)

        await self.leader.gather(start, "127.0.0.1")
        hearing = asyncio.create_task(self.leader.hear())
        try:
            yield self
        finally:
            hearing.cancel()
            await asyncio.to_thread(self.worker.close)
            for stream in self.leader.streams.values():
                stream.close()

    def step(self, **what):
        """As vLLM's model runner: the step begins, its layers are computed one after the other, it ends."""
        self.worker.begin_step(StepTransfers(**what))
        for name in self.caches:
            self.worker.layer_done(name)
        self.worker.end_step()
        results = self.worker.take_results()
        self.sent |= results.sent
        self.received |= results.received
        self.failed |= results.failed

    async def event(self, kind):
        async with asyncio.timeout(DEADLINE_S):
            event = await self.events.get()
        assert event.HasField(kind), event
        return getattr(event, kind)

    async def steps_until(self, condition):
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.step()
                await asyncio.sleep(0.01)

    @property
    def addresses(self):
        return [self.leader.kv_addresses[rank] for rank in sorted(self.leader.kv_addresses)]

    def send(self, epoch, descriptor):
        self.leader.send(send=ranks_pb2.Send(epoch=epoch, descriptor=descriptor))

    def finish(self, epoch, tail=b"tail"):
        self.leader.send(finish_send=ranks_pb2.FinishSend(epoch=epoch, tail=tail))

    def cancel(self, epoch):
        self.leader.send(cancel_transfer=ranks_pb2.CancelTransfer(epoch=epoch))


@contextlib.asynccontextmanager
async def two_ranks(tmp_path, seed):
    """The workers of a node with two tensor-parallel ranks."""
    ranks, leader = [Side(seed), Side(seed + 1)], Followers(2)
    leader.on_event = lambda rank, event: ranks[rank - 1].events.put_nowait(event)
    for each in ranks:
        each.leader = leader

    def start(meeting):
        return [each.start(tmp_path, meeting, rank, 2) for rank, each in enumerate(ranks)]

    await leader.gather(start, "127.0.0.1")
    hearing = asyncio.create_task(leader.hear())
    try:
        yield ranks
    finally:
        hearing.cancel()
        for each in ranks:
            await asyncio.to_thread(each.worker.close)
        for stream in leader.streams.values():
            stream.close()


@pytest.fixture
async def sides(tmp_path):
    prefill, decode = Side(1), Side(2)
    async with prefill.started(tmp_path), decode.started(tmp_path):
        yield prefill, decode


async def opened(decode, epoch=7, block_ids=(3, 1, 6), num_cached=0, num_tokens=10):
    """The descriptor of blocks that vLLM has allocated."""
    decode.step(loads=[Load(epoch, f"d{epoch}", list(block_ids), num_cached, num_tokens, decode.addresses)])
    return (await decode.event("credited")).descriptor


def same_blocks(prefill, decode, sent, taken):
    pairs = zip(prefill.caches.values(), decode.caches.values(), strict=True)
    return all(torch.equal(ours[list(sent)], theirs[list(taken)]) for ours, theirs in pairs)


async def test_a_prompt_arrives_with_what_follows_it(sides):
    prefill, decode = sides
    descriptor = await opened(decode)
    prefill.send(7, descriptor)
    prefill.step(chunks=[Chunk(7, [5])])
    prefill.step(chunks=[Chunk(7, [5, 2, 0])])
    prefill.finish(7)
    prefill.step(held={"p7": 7})
    received = await decode.event("transfer_ended")
    assert (received.ok, received.tail) == (True, b"tail")
    assert (await prefill.event("transfer_ended")).ok
    await prefill.steps_until(lambda: prefill.sent == {"p7"})
    await decode.steps_until(lambda: decode.received == {"d7"})
    assert same_blocks(prefill, decode, (5, 2, 0), (3, 1, 6))
    assert not decode.failed


async def test_a_descriptor_may_come_after_the_prefill(sides):
    prefill, decode = sides
    prefill.step(chunks=[Chunk(7, [5, 2, 0])])
    prefill.finish(7)
    prefill.step(held={"p7": 7})
    prefill.send(7, await opened(decode))
    assert (await decode.event("transfer_ended")).ok
    await prefill.steps_until(lambda: prefill.sent == {"p7"})
    assert same_blocks(prefill, decode, (5, 2, 0), (3, 1, 6))


async def test_cached_blocks_do_not_travel(sides):
    prefill, decode = sides
    before = [cache[3].clone() for cache in decode.caches.values()]
    prefill.send(7, await opened(decode, num_cached=1))
    prefill.step(chunks=[Chunk(7, [5, 2, 0])])
    prefill.finish(7)
    received = await decode.event("transfer_ended")
    await prefill.event("transfer_ended")
    assert received.num_bytes == 2 * LAYERS * 2 * BLOCK * 6 * 4
    assert same_blocks(prefill, decode, (2, 0), (1, 6))
    assert all(torch.equal(cache[3], old) for cache, old in zip(decode.caches.values(), before, strict=True))


async def test_what_does_not_come_is_reported_as_failed_to_vllm(sides):
    prefill, decode = sides
    prefill.send(7, await opened(decode, num_cached=1))
    prefill.step(chunks=[Chunk(7, [5])])
    prefill.step(held={"p7": 7})
    prefill.cancel(7)
    assert not (await decode.event("transfer_ended")).ok
    await decode.steps_until(lambda: decode.received == {"d7"})
    assert decode.failed == {"d7"}
    await prefill.steps_until(lambda: prefill.sent == {"p7"})


async def test_a_cancelled_credit_is_void(sides):
    prefill, decode = sides
    descriptor = await opened(decode)
    decode.cancel(7)
    assert not (await decode.event("transfer_ended")).ok
    prefill.send(7, descriptor)
    prefill.step(chunks=[Chunk(7, [5, 2, 0])])
    prefill.finish(7)
    prefill.step(held={"p7": 7})
    prefill.cancel(7)
    await prefill.steps_until(lambda: prefill.sent == {"p7"})
    assert not same_blocks(prefill, decode, (5, 2, 0), (3, 1, 6))


@pytest.mark.parametrize("is_early", [False, True])
async def test_a_prompt_whose_credit_is_revoked_goes_by_its_next_descriptor(sides, is_early):
    """Which may come while the transfer by the void one is ending. Our own decode nodes revoke credits."""
    prefill, decode = sides
    void = await opened(decode)
    prefill.send(7, void)
    prefill.step(chunks=[Chunk(7, [5])])
    await decode.steps_until(lambda: same_blocks(prefill, decode, [5], [3]))
    decode.cancel(7)
    assert not (await decode.event("transfer_ended")).ok
    descriptor = await opened(decode, block_ids=(4, 2, 7))
    if is_early:
        prefill.send(7, descriptor)
    prefill.step(chunks=[Chunk(7, [5, 2, 0])])
    prefill.finish(7)
    prefill.step(held={"p7": 7})
    if not is_early:
        await asyncio.sleep(0.1)
        prefill.send(7, descriptor)
    received = await decode.event("transfer_ended")
    assert (received.ok, received.tail) == (True, b"tail")
    assert (await prefill.event("transfer_ended")).ok
    await prefill.steps_until(lambda: prefill.sent == {"p7"})
    assert same_blocks(prefill, decode, (5, 2, 0), (4, 2, 7))


async def test_a_prompt_whose_next_descriptor_does_not_come_fails(tmp_path):
    prefill, decode = Side(1), Side(2)
    async with prefill.started(tmp_path, hold_s=0.3), decode.started(tmp_path):
        void = await opened(decode)
        decode.cancel(7)
        await decode.event("transfer_ended")
        prefill.send(7, void)
        prefill.step(chunks=[Chunk(7, [5, 2, 0])])
        prefill.finish(7)
        prefill.step(held={"p7": 7})
        ended = await prefill.event("transfer_ended")
        assert not ended.ok
        await prefill.steps_until(lambda: prefill.sent == {"p7"})


async def test_a_prompt_that_is_released_first_is_let_go_when_it_finishes(sides):
    prefill, _ = sides
    prefill.step(chunks=[Chunk(7, [5, 2, 0])])
    prefill.cancel(7)
    prefill.step(held={"p7": 7})
    await prefill.steps_until(lambda: prefill.sent == {"p7"})


async def test_a_dropped_prompt_sends_no_more(sides):
    prefill, decode = sides
    prefill.send(7, await opened(decode))
    prefill.step(chunks=[Chunk(7, [5])])
    await decode.steps_until(lambda: same_blocks(prefill, decode, [5], [3]))
    prefill.step(dropped=[7])
    assert not (await prefill.event("transfer_ended")).ok
    assert not (await decode.event("transfer_ended")).ok
    prefill.step()
    assert not prefill.sent  # vLLM has freed the blocks by itself


async def test_a_prompt_that_nobody_wants_is_let_go_in_time(tmp_path):
    async with Side(1).started(tmp_path, hold_s=0.05) as prefill:
        prefill.step(chunks=[Chunk(7, [5, 2, 0])])
        prefill.step(held={"p7": 7})
        await prefill.steps_until(lambda: prefill.sent == {"p7"})


async def test_ranks_make_the_same_descriptor_and_each_sends_to_its_own(tmp_path):
    async with two_ranks(tmp_path, 1) as prefill, two_ranks(tmp_path, 3) as decode:
        load = Load(7, "d7", [3, 1, 6], 0, 10, decode[0].addresses, prefill_tp=2)
        for each in decode:
            each.step(loads=[load])
        first, second = [(await each.event("credited")).descriptor for each in decode]
        assert first == second
        prefill[0].send(7, first)  # to both
        for each in prefill:
            each.step(chunks=[Chunk(7, [5, 2, 0])])
        prefill[0].finish(7)
        for each in prefill:
            each.step(held={"p7": 7})
        for sender, receiver in zip(prefill, decode, strict=True):
            received = await receiver.event("transfer_ended")
            assert (received.ok, received.tail) == (True, b"tail")
            assert same_blocks(sender, receiver, (5, 2, 0), (3, 1, 6))
            await sender.steps_until(lambda sender=sender: sender.sent == {"p7"})
            await receiver.steps_until(lambda receiver=receiver: receiver.received == {"d7"})
