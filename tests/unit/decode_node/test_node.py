"""A decode node with the fake engine, spoken to as its coordinator does: local prompts, beside one from elsewhere."""

import asyncio

import pytest

from decode_node.ranks import DecodeFollower
from engine.engine import Engine
from engine.stepper import Stepper
from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.ends.sender import KVSender
from protos import convert, inference_pb2
from protos.follower import Follower
from serving_core import reasons
from serving_core.requests import Work
from serving_core.settings import EngineSettings
from tests.tiny_models import EOS
from tests.unit.decode_node.decode_node_kit import BLOCK_SIZE, DEADLINE_S, answer_on_paper, decode_node, told
from tests.unit.node.rank_kit import crew

LENGTH = inference_pb2.FINISH_REASON_LENGTH


async def test_a_local_prompt_is_told_as_first_token_then_step_tokens(tmp_path):
    async with decode_node(tmp_path) as harness:
        prompt = list(range(10))
        harness.reserve("a", prompt)
        await harness.idle()
        assert harness.of("a") == told(answer_on_paper(prompt, 4))
        event = harness.first_token("a")
        assert (event.token.index, event.token.finish_reason, event.num_cached_tokens) == (0, 0, 0)
        assert event.prefill_s > 0
        assert (harness.last_token("a").index, harness.last_token("a").finish_reason) == (3, LENGTH)
        assert harness.receiver.num_open == 0


async def test_what_the_node_holds_already_is_not_computed(tmp_path):
    async with decode_node(tmp_path) as harness:
        prompt = list(range(10))
        harness.reserve("a", prompt)
        await harness.idle()
        harness.reserve("b", [*prompt[:8], 99, 98, 97])
        await harness.idle()
        assert harness.of("b") == told(answer_on_paper([*prompt[:8], 99, 98, 97], 4))
        assert harness.first_token("b").num_cached_tokens == 8
        assert (harness.load.num_prompt_tokens, harness.load.num_cached_tokens) == (21, 8)
        assert ("b", 8, 3) in harness.engine.plans[-4]


async def test_chunks_run_beside_the_batch_within_the_budget(tmp_path):
    async with decode_node(tmp_path, gated=True, max_num_seqs=4, max_num_batched_tokens=8) as harness:
        harness.reserve("a", range(5), max_tokens=8)
        await harness.until_step(1)
        harness.reserve("b", range(50, 70))
        harness.engine.let_one_end()
        await harness.until_step(2)
        assert harness.engine.plans[1] == [("a", 5, 1), ("b", 0, 7)]
        assert harness.load.num_waiting_tokens == 20
        harness.engine.let_one_end()
        await harness.until_step(3)
        assert harness.engine.plans[2] == [("a", 6, 1), ("b", 7, 7)]
        assert harness.load.num_waiting_tokens == 13
        harness.engine.open()
        await harness.idle()
        assert harness.of("a") == told(answer_on_paper(range(5), 8))
        assert harness.of("b") == told(answer_on_paper(range(50, 70), 4))


async def test_an_answer_of_one_token_ends_with_its_first(tmp_path):
    async with decode_node(tmp_path) as harness:
        harness.reserve("length", [1, 2, 3], max_tokens=1)
        stop = answer_on_paper([4, 5], 1)[0]
        harness.reserve("stop", [4, 5], stop_token_ids=(stop,))
        await harness.idle()
        assert harness.kinds("length") == harness.kinds("stop") == ["first_token"]
        assert harness.first_token("length").token.finish_reason == LENGTH
        assert harness.first_token("stop").token.finish_reason == inference_pb2.FINISH_REASON_STOP
        assert stop != EOS


async def test_an_answer_begun_elsewhere_goes_on_at_its_next_index(tmp_path):
    async with decode_node(tmp_path) as harness:
        harness.reserve("a", range(7), num_prompt_tokens=5, max_tokens=4, epoch=3)
        await harness.idle()
        assert harness.of("a") == told(answer_on_paper(range(7), 2))
        assert harness.first_token("a").token.index == 2
        assert harness.first_token("a").attempt.epoch == 3


@pytest.mark.parametrize("state", ["waiting", "in its prompt's step", "in its prompt, between steps", "decoding"])
@pytest.mark.parametrize("end", ["cancel", "detach", "fail"])
async def test_a_local_attempt_ends_once_in_every_state(state, end, tmp_path):
    async with decode_node(tmp_path, gated=True, max_num_seqs=1, max_num_batched_tokens=4) as harness:
        request = harness.reserve("a", range(10), max_tokens=50)
        await harness.until_step(1)
        if state == "waiting":
            request = harness.reserve("b", range(10))
        for number in range(2, {"in its prompt, between steps": 2, "decoding": 5}.get(state, 1) + 1):
            harness.engine.let_one_end()
            await harness.until_step(number)
        told_before = harness.of(request.request_id)
        if end == "cancel":
            harness.cancel(request)
        elif end == "detach":
            harness.node.detached()
        else:
            harness.engine.error = ValueError("odd")
        harness.engine.open()
        if end == "cancel" and state == "waiting":
            assert harness.kinds("b") == ["cancelled"]
            await harness.until(lambda: len(harness.of("a")) > 3)
            harness.node.detached()
        elif end == "fail" and state == "waiting":
            await harness.until(lambda: harness.kinds("b"))
        await harness.idle()
        ending = {"cancel": [("cancelled", None)], "detach": [], "fail": [("failed", None)]}[end]
        assert harness.of(request.request_id) == told_before + ending
        assert len(told_before) == (2 if state == "decoding" else 0)


async def test_a_failed_step_fails_all_that_were_in_it_and_the_node_goes_on(tmp_path):
    async with decode_node(tmp_path, gated=True) as harness:
        harness.reserve("a", range(10))
        await harness.until_step(1)
        harness.engine.error = ValueError("odd")
        harness.engine.let_one_end()
        await harness.idle()
        (failed,) = [each.failed for each in harness.events if each.HasField("failed")]
        assert (failed.reason, failed.message) == (reasons.ENGINE_ERROR, "the decode step failed (ValueError)")
        harness.engine.error = None
        harness.engine.open()
        harness.reserve("b", range(10))
        await harness.idle()
        assert harness.of("b") == told(answer_on_paper(range(10), 4))


async def test_a_draining_node_finishes_its_local_prompts(tmp_path):
    async with decode_node(tmp_path, gated=True, max_num_seqs=1, max_num_batched_tokens=4) as harness:
        harness.reserve("a", range(10))
        harness.reserve("b", range(20, 30))
        await harness.until_step(1)
        harness.node.drain()
        assert harness.load.state == "draining"
        assert harness.load.num_waiting_tokens == 20
        harness.engine.open()
        await harness.idle()
        assert harness.of("a") == told(answer_on_paper(range(10), 4))
        assert harness.of("b") == told(answer_on_paper(range(20, 30), 4))


async def test_a_prompt_preempted_in_the_middle_is_told_once_and_timed_from_its_first_start(tmp_path):
    settings = {"num_blocks": 9, "caching": False, "max_num_seqs": 2, "max_num_batched_tokens": 4}
    async with decode_node(tmp_path, gated=True, **settings) as harness:
        harness.reserve("old", [1, 2, 3], max_tokens=33)  # all 9 blocks in the end
        await harness.until_step(1)
        young = harness.reserve("young", range(27), max_tokens=9)
        for number in range(2, 8):
            harness.engine.let_one_end()
            await harness.until_step(number)
        assert harness.engine.plans[5] == [("old", 7, 1), ("young", 12, 3)]
        assert harness.engine.plans[6] == [("old", 8, 1)]
        assert (harness.load.num_preemptions, harness.load.num_waiting_tokens) == (1, 27)
        attempt = harness.node._attempts.live(convert.attempt_of(young))
        started_at = attempt.prefill_started_at
        assert started_at is not None
        harness.engine.open()
        await harness.idle()
        assert attempt.prefill_started_at == started_at
        assert harness.of("old") == told(answer_on_paper([1, 2, 3], 33))
        assert harness.of("young") == told(answer_on_paper(range(27), 9))
        assert harness.load.num_prompt_tokens == 3 + 27


async def test_local_prompts_run_beside_one_whose_kv_comes_from_elsewhere(tmp_path):
    async with decode_node(tmp_path) as harness:
        prompt = list(range(30, 43))
        remote = harness.reserve("remote", prompt, local=False, epoch=9)
        await harness.until(lambda: harness.kinds("remote") == ["reserved"])
        (ticket,) = [each.reserved.ticket for each in harness.events if each.HasField("reserved")]
        harness.reserve("local", range(20), epoch=10)
        await send_from_elsewhere(harness, tmp_path, remote, ticket)
        await harness.idle()
        _, *rest = answer_on_paper(prompt, 4)
        story = [("reserved", None), ("committed", None), *(("step_tokens", token) for token in rest)]
        assert harness.of("remote") == story
        assert harness.of("local") == told(answer_on_paper(range(20), 4))
        assert harness.load.num_kv_bytes == 4 * harness.engine.layout.block_bytes


async def send_from_elsewhere(harness, tmp_path, request, ticket):
    """Computes the prompt with an engine of its own and sends its blocks."""
    settings = EngineSettings(model=str(tmp_path / "fake"), block_size=BLOCK_SIZE, num_kv_blocks=8)
    engine = Engine(settings)
    blocks = [5, 3, 1, 7]
    (token,) = engine.step([Work(request, 0, len(request.token_ids), blocks)])
    sender = KVSender(harness.network.dialer(), engine.pool, rank=0, tp_size=1, deadline_s=DEADLINE_S)
    sent = []
    transfer = sender.start(ticket, sent.append)
    transfer.finish(blocks, convert.token_to_tail(token.token_id))
    await harness.until(lambda: sent)
    await sender.close()


async def test_refusals_are_told_at_once(tmp_path):
    async with decode_node(tmp_path, gated=True, num_blocks=4, max_num_seqs=1, max_num_queued=1) as harness:
        harness.reserve("too long", range(14))
        harness.reserve("runs", range(4))
        harness.reserve("waits", range(4))
        harness.reserve("one too many", range(4))
        assert harness.kinds("too long") == harness.kinds("one too many") == ["failed"]
        harness.engine.open()
        await harness.idle()


async def test_heartbeats_tell_the_rates(tmp_path):
    async with decode_node(tmp_path, token_s=0.0005, max_num_seqs=4, max_num_batched_tokens=32) as harness:
        assert harness.load.prefill_tokens_per_s == 0.0
        harness.reserve("a", range(200), max_tokens=4)
        await harness.idle()
        assert harness.rates.steps == [(32, 0)] * 6 + [(8, 0)] + [(0, 1)] * 3
        assert harness.load.prefill_tokens_per_s == harness.rates.prefill_tokens_per_s > 0
        assert harness.load.step_s == harness.rates.decode_step_s > 0  # and not the median of all steps, most of 32


async def test_followers_are_told_every_chunk(tmp_path, monkeypatch):
    shares = []
    addresses = {1: "rank-1"}
    async with (
        crew(monkeypatch, 1, addresses) as (followers, (leader,)),
        decode_node(tmp_path, followers, max_num_seqs=4, max_num_batched_tokens=8) as harness,
    ):
        receiver = KVReceiver(harness.network.listener("rank-1"), harness.engine.pool, rank=1, tp_size=2)
        stepper = Stepper(lambda parts, _: shares.append([(len(part.token_ids), part.samples) for part in parts]))
        following = asyncio.create_task(Follower(leader, stepper, DecodeFollower(receiver, leader)).run())
        harness.reserve("a", range(20), max_tokens=3)
        await harness.idle()
        assert harness.of("a") == told(answer_on_paper(range(20), 3))
        await harness.until(lambda: len(shares) == 5)
        assert shares == [[(8, False)], [(8, False)], [(4, True)], [(1, True)], [(1, True)]]
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await receiver.close()
