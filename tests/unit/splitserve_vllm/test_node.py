"""A node with vLLM as the coordinator sees it. vLLM is stood in for by what it would generate, its worker by what it
would report; tests/system/test_vllm.py has the real ones.
"""

import asyncio
from types import SimpleNamespace

import pytest

from kv_transfer.descriptor import TransferDescriptor
from protos import convert, fleet_pb2, inference_pb2, ranks_pb2
from serving_core import reasons
from serving_core.errors import RankLost
from serving_core.layout import KVLayout
from serving_core.node.costs import StepRates
from serving_core.requests import Request, SamplingParams
from serving_core.shapes import Shape
from serving_node.ranks.leading import Followers
from splitserve_vllm.node import VllmNode
from splitserve_vllm.scheduling import ADDRESSES, RECEIVE, SEND, SENDERS
from splitserve_vllm.seam import Stats, Token, VllmFacts
from tests import fleet_events as events

EOS = 257
FACTS = VllmFacts(
    num_blocks=10,
    block_size=4,
    max_model_len=100,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    dtype="float32",
    kv_cache_dtype="auto",
    quantization="none",
    device="cpu",
    tp_size=1,
)
LAYOUT = KVLayout.uniform(2, 2, 12, 4, "float32", is_latent=True)
DEADLINE_S = 30.0


class Engine:
    """Generates the ids behind the last token of a prompt: 5, 6, 7 behind [..., 4]; a prompt that ends in 0 fails."""

    facts = FACTS
    is_dead = False

    def __init__(self):
        self.calls, self.aborted, self.may_go = [], [], asyncio.Event()
        self.may_go.set()

    async def generate(self, request_id, token_ids, fields, transfer, cache_salt):
        self.calls.append((request_id, token_ids, fields, transfer, cache_salt))
        last = token_ids[-1]
        try:
            await self.may_go.wait()
            for index in range(fields["max_tokens"]):
                await asyncio.sleep(0)
                is_stop = last + 1 + index in fields["stop_token_ids"]
                reason = "stop" if is_stop else "length" if index == fields["max_tokens"] - 1 else None
                yield Token(last + 1 + index, None, reason if last else "error", 0, 0.5)
                if is_stop:
                    return
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(request_id)
            raise


class World:
    def __init__(self, num_workers=1, **timeouts):
        self.engine, self.events, self.commands = Engine(), [], []
        workers = Followers(num_workers)
        for rank in range(1, num_workers + 1):
            workers.streams[rank] = SimpleNamespace(send=self.commands.append)
            workers.kv_addresses[rank] = f"ipc:///{rank}"
        limits = {"descriptor_timeout_s": 30.0, "credit_timeout_s": 30.0, "step_timeout_s": 30.0, "max_num_queued": 4}
        self.node = VllmNode(
            "n",
            "mixed",
            self.engine,
            workers,
            self,
            StepRates(),
            fingerprint={"a": "b"},
            numerics={},
            eos_token_ids=(EOS,),
            kv_events=asyncio.Event().wait,
            **{**limits, **timeouts},
        )
        self.workers = workers

    def send(self, **event):
        if step := event.get("step_tokens"):
            event = {"step_tokens": events.all_tokens(step)}
        self.events.append(fleet_pb2.NodeEvent(**event))

    def command(self, kind, body, epoch=1):
        attempt = fleet_pb2.Attempt(request_id="r", epoch=epoch)
        self.node.handle(fleet_pb2.NodeCommand(attempt=attempt, **{kind: body}))

    def job(self, token_ids=(1, 2, 4), *, epoch=1, num_prompt=None, **sampling):
        params = SamplingParams(**{"max_tokens": 3, "temperature": 0.0, **sampling})
        request = Request("r", epoch, list(token_ids), num_prompt or len(token_ids), params, cache_salt="salt")
        return convert.job_to_wire(request)

    def prefill(self, **job):
        self.command("prefill", fleet_pb2.Prefill(job=self.job(**job)), job.get("epoch", 1))

    def reserve(self, *, is_local=False, num_ahead=0, **job):
        body = fleet_pb2.Reserve(job=self.job(**job), local_prefill=is_local, num_tokens_ahead=num_ahead)
        self.command("reserve", body, job.get("epoch", 1))

    def cancel(self, epoch=1):
        self.command("cancel", fleet_pb2.Cancel(attempt=fleet_pb2.Attempt(request_id="r", epoch=epoch)), epoch)

    def credited(self, epoch=1, rank=1):
        packed = TransferDescriptor.draw(
            epoch=epoch,
            layout=LAYOUT,
            prefill_tp=1,
            decode_tp=1,
            addresses=["ipc:///a"],
            num_blocks=3,
            num_cached_blocks=1,
            ttl_s=9.0,
        ).encode()
        self.workers.on_event(rank, ranks_pb2.RankEvent(credited=ranks_pb2.Credited(epoch=epoch, descriptor=packed)))
        return packed

    def transferred(self, *, tail=b"", ok=True, reason="", epoch=1, rank=1):
        ended = ranks_pb2.TransferEnded(epoch=epoch, ok=ok, num_bytes=96, tail=tail, reason=reason)
        self.workers.on_event(rank, ranks_pb2.RankEvent(transfer_ended=ended))

    async def until(self, kind, number=1):
        """The bodies of the first events of a kind."""
        async with asyncio.timeout(DEADLINE_S):
            while len(found := [each for each in self.events if each.HasField(kind)]) < number:
                await asyncio.sleep(0.001)
        return [getattr(each, kind) for each in found]

    async def tokens(self, number):
        """The ids and the indices of the tokens of steps, and why the last one ended."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                steps = [each.step_tokens for each in self.events if each.HasField("step_tokens")]
                tokens = [token for step in steps for token in step.tokens]
                if len(tokens) >= number:
                    break
                await asyncio.sleep(0.001)
        return [(each.token_id, each.index) for each in tokens], tokens[-1].finish_reason

    def told(self, kind):
        """What the worker was told of one kind."""
        return [getattr(each, kind) for each in self.commands if each.HasField(kind)]


async def test_a_mixed_node_answers_alone():
    world = World()
    world.reserve(is_local=True)
    (first,) = await world.until("first_token")
    assert (first.token.token_id, first.token.index, first.prefill_s) == (5, 0, 0.5)
    assert world.engine.calls[0][4] == "salt"  # KV is shared within it alone
    assert await world.tokens(2) == ([(6, 1), (7, 2)], inference_pb2.FINISH_REASON_LENGTH)
    await asyncio.wait_for(world.node.idle(), DEADLINE_S)


async def test_tokens_of_one_step_are_one_message():
    world = World()
    world.engine.may_go.clear()
    for epoch in (1, 2):
        world.reserve(is_local=True, epoch=epoch)
    await asyncio.sleep(0.01)
    world.engine.may_go.set()
    await world.tokens(4)
    steps = [each.step_tokens for each in world.events if each.HasField("step_tokens")]
    assert [len(step.tokens) for step in steps] == [2, 2]


async def test_an_output_goes_on_behind_what_an_earlier_attempt_has_given():
    world = World()
    world.reserve(is_local=True, token_ids=(1, 4, 5), num_prompt=2)
    (first,) = await world.until("first_token")
    assert (first.token.token_id, first.token.index) == (6, 1)
    assert await world.tokens(1) == ([(7, 2)], inference_pb2.FINISH_REASON_LENGTH)


async def test_a_prefilled_prompt_is_sent_with_its_first_token():
    world = World()
    world.prefill()
    (first,) = await world.until("first_token")
    assert (first.token.token_id, first.token.finish_reason) == (5, inference_pb2.FINISH_REASON_UNSPECIFIED)
    assert world.engine.calls[0][3] == {SEND: 1}
    assert world.engine.calls[0][2]["max_tokens"] == 1
    body = fleet_pb2.Deliver(attempt=fleet_pb2.Attempt(request_id="r", epoch=1), descriptor=b"d")
    world.command("deliver", body)
    assert [each.descriptor for each in world.told("send")] == [b"d"]
    async with asyncio.timeout(DEADLINE_S):
        while not world.told("finish_send"):
            await asyncio.sleep(0.001)
    assert convert.from_tail(world.told("finish_send")[0].tail) == ([5], [])
    world.transferred()
    (sent,) = await world.until("transferred")
    assert sent.num_bytes == 96
    assert [each.epoch for each in world.told("cancel_transfer")] == [1]  # vLLM may free the blocks


@pytest.mark.parametrize("job", [{"max_tokens": 1}, {"token_ids": (1, EOS - 1)}])
async def test_a_prompt_whose_first_token_is_the_last_is_not_sent(job):
    world = World()
    world.prefill(**job)
    (first,) = await world.until("first_token")
    assert first.token.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED
    await asyncio.wait_for(world.node.idle(), DEADLINE_S)
    assert not world.told("finish_send")
    assert world.told("cancel_transfer")


async def test_a_kept_prompt_is_decoded_here():
    world = World()
    world.prefill()
    await world.until("first_token")
    world.command("keep", fleet_pb2.Keep(attempt=fleet_pb2.Attempt(request_id="r", epoch=1)))
    assert await world.tokens(2) == ([(6, 1), (7, 2)], inference_pb2.FINISH_REASON_LENGTH)


async def test_a_prompt_that_nobody_takes_fails_in_time():
    world = World(descriptor_timeout_s=0.01)
    world.prefill()
    (failed,) = await world.until("failed")
    assert failed.reason == reasons.TRANSFER_FAILED


async def test_a_received_prompt_goes_on_behind_its_first_token():
    world = World()
    world.engine.may_go.clear()
    world.reserve()
    await asyncio.sleep(0.01)
    packed = world.credited()
    (reserved,) = await world.until("reserved")
    assert reserved.descriptor == packed
    assert world.engine.calls[0][3] == {RECEIVE: 1, SENDERS: (1, 1), ADDRESSES: ["ipc:///1"]}
    world.transferred(tail=convert.to_tail([5], []))
    (committed,) = await world.until("committed")
    saved = LAYOUT.block_bytes
    assert (committed.num_bytes, committed.num_bytes_saved, committed.next_index) == (96, saved, 1)
    world.engine.may_go.set()
    assert await world.tokens(2) == ([(6, 1), (7, 2)], inference_pb2.FINISH_REASON_LENGTH)


async def test_a_transfer_counts_once_all_workers_have_their_part():
    world = World(num_workers=2)
    assert world.node.hello().tp_size == 2
    world.reserve()
    await asyncio.sleep(0.01)
    assert world.engine.calls[0][3][ADDRESSES] == ["ipc:///1", "ipc:///2"]
    world.credited(rank=2)
    assert not [each for each in world.events if each.HasField("reserved")]
    world.credited(rank=1)
    await world.until("reserved")
    world.transferred(tail=convert.to_tail([5], []), rank=1)
    await asyncio.sleep(0.01)
    assert not [each for each in world.events if each.HasField("committed")]
    world.transferred(tail=convert.to_tail([5], []), rank=2)
    (committed,) = await world.until("committed")
    assert committed.num_bytes == 2 * 96


async def test_a_part_that_fails_ends_the_others():
    world = World(num_workers=2)
    world.reserve()
    for rank in (1, 2):
        world.credited(rank=rank)
    world.transferred(ok=False, reason=reasons.KV_CHECKSUM_MISMATCH, rank=2)
    assert [each.epoch for each in world.told("cancel_transfer")] == [1, 1]  # to both
    world.transferred(ok=False, reason=reasons.TRANSFER_ABORTED, rank=1)
    (failed,) = await world.until("failed")
    assert failed.reason == reasons.KV_CHECKSUM_MISMATCH


async def test_another_first_token_than_vllms_own_is_followed():
    world = World()
    world.reserve()
    world.credited()
    world.transferred(tail=convert.to_tail([9], []))
    assert await world.tokens(2) == ([(10, 1), (11, 2)], inference_pb2.FINISH_REASON_LENGTH)
    assert world.engine.calls[1][1] == [1, 2, 4, 9]


@pytest.mark.parametrize("tail", [b"\xff", convert.to_tail([5, 6], [])])
async def test_a_tail_that_is_none_fails(tail):
    world = World()
    world.reserve()
    world.credited()
    world.transferred(tail=tail)
    (failed,) = await world.until("failed")
    assert failed.reason == reasons.TRANSFER_FAILED


async def test_a_failed_transfer_fails_the_attempt():
    world = World()
    world.engine.may_go.clear()
    world.reserve()
    world.credited()
    world.transferred(ok=False, reason=reasons.KV_CHECKSUM_MISMATCH)
    (failed,) = await world.until("failed")
    assert failed.reason == reasons.KV_CHECKSUM_MISMATCH
    await asyncio.wait_for(world.node.idle(), DEADLINE_S)
    assert world.engine.aborted == ["r-1"]


async def test_a_full_pool_sends_requests_elsewhere():
    world = World(credit_timeout_s=0.01)
    world.engine.may_go.clear()
    world.reserve()
    (failed,) = await world.until("failed")
    assert failed.reason == reasons.QUEUE_FULL


async def test_a_credit_without_an_attempt_is_void():
    world = World()
    world.credited(epoch=9)
    assert [each.epoch for each in world.told("cancel_transfer")] == [9]


async def test_cancel_frees_all_and_is_acknowledged():
    world = World()
    world.engine.may_go.clear()
    world.reserve()
    await asyncio.sleep(0.01)
    world.cancel()
    world.cancel(epoch=5)
    assert len(await world.until("cancelled", 2)) == 2
    await asyncio.wait_for(world.node.idle(), DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while world.engine.aborted != ["r-1"]:
            await asyncio.sleep(0.001)
    assert [each.epoch for each in world.told("cancel_transfer")] == [1]


async def test_a_lost_coordinator_ends_everything():
    world = World()
    world.engine.may_go.clear()
    world.reserve()
    world.prefill(epoch=2)
    world.node.detached()
    await asyncio.wait_for(world.node.idle(), DEADLINE_S)


async def test_what_vllm_cannot_do_is_refused():
    world = World()
    world.reserve(num_ahead=4)
    world.command("migrate", fleet_pb2.Migrate())
    world.command("send_prefix", fleet_pb2.SendPrefix())
    failed = await world.until("failed", 3)
    assert {each.reason for each in failed} == {reasons.PAIRING_MISMATCH}
    assert world.node.hello().keeps_sequences


async def test_an_adapter_is_refused():
    world = World()
    world.command("load_adapter", fleet_pb2.LoadAdapter(name="a", folder="/a"))
    (changed,) = await world.until("adapter_changed")
    assert (changed.name, changed.error) == ("a", "a node with vLLM serves no LoRA adapters")


async def test_a_request_that_vllm_fails_is_reported():
    world = World()
    world.reserve(is_local=True, token_ids=(1, 0))
    (failed,) = await world.until("failed")
    assert failed.reason == reasons.STEP_FAILED


async def test_more_requests_than_the_limit_go_elsewhere():
    world = World(max_num_queued=1)
    world.engine.may_go.clear()
    world.reserve(is_local=True)
    world.reserve(is_local=True, epoch=2)
    (failed,) = await world.until("failed")
    assert (failed.attempt.epoch, failed.reason) == (2, reasons.QUEUE_FULL)


@pytest.mark.parametrize(
    ("shape", "is_taken"),
    [(Shape(0, 8, True), True), (Shape(64, 0, False), True), (Shape(32, 8, True), False), (Shape(64, 4, True), False)],
)
async def test_a_role_is_of_all_or_nothing(shape, is_taken):
    world = World()
    world.command("reshape", fleet_pb2.Reshape(shape=convert.shape_to_wire(shape)))
    (beat,) = await world.until("heartbeat")
    assert (convert.shape_from_wire(beat.load.shape) == shape) is is_taken
    assert any(each.HasField("failed") for each in world.events) is not is_taken


async def test_the_load_is_vllms():
    world = World()
    world.node.take_stats(Stats(3, 2, 0.4, 0, 3))
    load = world.node.heartbeat().load
    assert (load.num_running, load.num_waiting, load.num_blocks_free, load.state) == (3, 2, 6, "ready")
    assert world.node.num_blocks_free == 6
    world.node.drain()
    assert world.node.heartbeat().load.state == "draining"


async def test_a_dead_vllm_ends_the_node():
    world = World()
    world.engine.is_dead = True
    world.workers.streams.clear()
    with pytest.raises(RankLost, match="has ended"):
        await asyncio.wait_for(world.node.run(), DEADLINE_S)


async def test_a_silent_vllm_ends_the_node():
    world = World(step_timeout_s=0.1)
    world.engine.may_go.clear()
    world.workers.streams.clear()
    world.reserve(is_local=True)
    with pytest.raises(RankLost, match="no result"):
        await asyncio.wait_for(world.node.run(), DEADLINE_S)
