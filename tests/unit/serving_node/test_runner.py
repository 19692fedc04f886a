"""A node with the fake engine, spoken to as its coordinator does, over a real loopback network."""

import asyncio

import pytest

from engine.offload.layers_on_disk import WeightsLost
from engine.stepper import MOST_FAILED_STEPS, Stepper
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from protos import fleet_pb2, inference_pb2
from serving_core import reasons
from serving_core.errors import SettingsError
from serving_node import step_loop
from serving_node.ranks.follower import Follower
from serving_node.ranks.leading import Followers
from serving_node.ranks.transfers import FollowerTransfers
from tests.tiny_models import EOS
from tests.unit.serving_node.rank_kit import crew
from tests.unit.serving_node.runner_kit import (
    answer_on_paper,
    carry_descriptors,
    fleet,
    job,
    make_request,
    running,
    told,
)

LENGTH = inference_pb2.FINISH_REASON_LENGTH

# ---- prompts of its own ----


async def test_a_local_prompt_is_told_as_first_token_then_step_tokens(tmp_path):
    async with running(tmp_path) as node:
        prompt = list(range(10))
        node.local("a", prompt)
        await node.idle()
        assert node.of("a") == told(answer_on_paper(prompt, 4))
        first = node.event("a", "first_token")
        assert (first.token.index, first.token.finish_reason, first.num_cached_tokens) == (0, 0, 0)
        assert first.prefill_s > 0
        assert (node.last_token("a").index, node.last_token("a").finish_reason) == (3, LENGTH)


async def test_what_the_node_holds_already_is_not_computed(tmp_path):
    async with running(tmp_path) as node:
        prompt = list(range(10))
        node.local("a", prompt)
        await node.idle()
        node.local("b", [*prompt[:8], 99, 98, 97])
        await node.idle()
        assert node.of("b") == told(answer_on_paper([*prompt[:8], 99, 98, 97], 4))
        assert node.event("b", "first_token").num_cached_tokens == 8
        assert (node.load.num_prompt_tokens, node.load.num_cached_tokens) == (21, 8)
        assert ("b", 8, 3) in node.engine.plans[-4]


@pytest.mark.parametrize("read_by", ["itself", "another node"])
async def test_what_a_node_wrote_while_answering_is_there_for_the_next_turn(tmp_path, read_by):
    async with fleet(tmp_path, "reader", "writer") as (reader, writer):
        prompt = list(range(10))
        answer = answer_on_paper(prompt, 12)
        if read_by == "itself":
            writer.local("a", prompt, max_tokens=12)
        else:
            request = make_request("a", prompt, max_tokens=12)
            carry_descriptors(writer, reader)
            reader.prefill(request)
            writer.reserve(request)
            await reader.idle()
        await writer.idle()
        turn = [*prompt, *answer, 5, 6, 7]
        writer.local("b", turn)
        await writer.idle()
        assert writer.of("b") == told(answer_on_paper(turn, 4))
        assert writer.event("b", "first_token").num_cached_tokens == 20  # of 21 with KV, in blocks of 4


async def test_chunks_run_beside_the_batch_within_the_budget(tmp_path):
    async with running(tmp_path, gated=True, max_num_seqs=4, max_num_batched_tokens=8) as node:
        node.local("a", range(5), max_tokens=8)
        await node.until_step(1)
        node.local("b", range(50, 70))
        node.engine.let_one_end()
        await node.until_step(2)
        assert node.engine.plans[1] == [("a", 5, 1), ("b", 0, 7)]
        assert node.load.num_waiting_tokens == 20
        node.engine.let_one_end()
        await node.until_step(3)
        assert node.engine.plans[2] == [("a", 6, 1), ("b", 7, 7)]
        assert node.load.num_waiting_tokens == 13
        node.engine.open()
        await node.idle()
        assert node.of("a") == told(answer_on_paper(range(5), 8))
        assert node.of("b") == told(answer_on_paper(range(50, 70), 4))


async def test_an_answer_of_one_token_ends_with_its_first(tmp_path):
    async with running(tmp_path) as node:
        node.local("length", [1, 2, 3], max_tokens=1)
        stop = answer_on_paper([4, 5], 1)[0]
        node.local("stop", [4, 5], stop_token_ids=(stop,))
        node.prefill(make_request("read for another", [6, 7], max_tokens=1))
        await node.idle()
        assert node.kinds("length") == node.kinds("stop") == node.kinds("read for another") == ["first_token"]
        assert node.event("length", "first_token").token.finish_reason == LENGTH
        assert node.event("stop", "first_token").token.finish_reason == inference_pb2.FINISH_REASON_STOP
        assert stop != EOS


async def test_the_end_of_sequence_token_of_the_model_ends_an_answer(tmp_path):
    pairs = ([first, second] for first in range(250) for second in range(250))
    prompt = next(pair for pair in pairs if EOS in answer_on_paper(pair, 6)[1:])
    whole = answer_on_paper(prompt, 9)
    async with running(tmp_path) as node:
        node.local("ends", prompt, max_tokens=9, ignore_eos=False)
        node.local("goes on", prompt, max_tokens=9)
        await node.idle()
        assert node.of("ends") == told(whole[: whole.index(EOS) + 1])
        assert node.last_token("ends").finish_reason == inference_pb2.FINISH_REASON_STOP
        assert node.of("goes on") == told(whole)


async def test_an_answer_begun_elsewhere_goes_on_at_its_next_index(tmp_path):
    async with running(tmp_path) as node:
        node.local("a", range(7), num_prompt_tokens=5, max_tokens=4, epoch=3)
        await node.idle()
        assert node.of("a") == told(answer_on_paper(range(7), 2))
        assert node.event("a", "first_token").token.index == 2
        assert node.event("a", "first_token").attempt.epoch == 3


async def test_a_pool_that_is_too_small_for_all_answers_at_once(tmp_path):
    settings = {"num_blocks": 9, "caching": False, "max_num_seqs": 2, "max_num_batched_tokens": 4}
    async with running(tmp_path, gated=True, **settings) as node:
        node.local("old", [1, 2, 3], max_tokens=33)  # all 9 blocks in the end
        await node.until_step(1)
        node.local("young", range(27), max_tokens=9)
        for number in range(2, 8):
            node.engine.let_one_end()
            await node.until_step(number)
        assert node.engine.plans[5] == [("old", 7, 1), ("young", 12, 3)]
        assert node.engine.plans[6] == [("old", 8, 1)]
        assert (node.load.num_preemptions, node.load.num_waiting_tokens) == (1, 27)
        node.engine.open()
        await node.idle()
        assert node.of("old") == told(answer_on_paper([1, 2, 3], 33))
        assert node.of("young") == told(answer_on_paper(range(27), 9))
        assert node.load.num_prompt_tokens == 3 + 27


# ---- ends ----


@pytest.mark.parametrize("state", ["waiting", "in its prompt's step", "in its prompt, between steps", "writing"])
@pytest.mark.parametrize("end", ["cancel", "detach", "fail"])
async def test_a_local_attempt_ends_once_in_every_state(state, end, tmp_path):
    async with running(tmp_path, gated=True, max_num_seqs=1, max_num_batched_tokens=4) as node:
        request = node.local("a", range(10), max_tokens=50)
        await node.until_step(1)
        if state == "waiting":
            request = node.local("b", range(10))
        for number in range(2, {"in its prompt, between steps": 2, "writing": 5}.get(state, 1) + 1):
            node.engine.let_one_end()
            await node.until_step(number)
        told_before = node.of(request.request_id)
        if end == "cancel":
            node.cancel(request)
        elif end == "detach":
            node.node.detached()
        else:
            node.engine.error = ValueError("odd")
        node.engine.open()
        if end == "cancel" and state == "waiting":
            assert node.kinds("b") == ["cancelled"]
            await node.until(lambda: len(node.of("a")) > 3)
            node.node.detached()
        elif end == "fail" and state == "waiting":
            await node.until(lambda: node.kinds("b"))
        await node.idle()
        ending = {"cancel": [("cancelled", None)], "detach": [], "fail": [("failed", None)]}[end]
        assert node.of(request.request_id) == told_before + ending
        assert len(told_before) == (2 if state == "writing" else 0)


async def test_a_failed_step_fails_all_that_were_in_it_and_the_node_goes_on(tmp_path):
    async with running(tmp_path, gated=True) as node:
        node.local("a", range(10))
        await node.until_step(1)
        node.engine.error = ValueError("odd")
        node.engine.let_one_end()
        await node.idle()
        failed = node.event("a", "failed")
        assert (failed.reason, failed.message) == (reasons.STEP_FAILED, "the step failed (ValueError)")
        node.engine.error = None
        node.engine.open()
        node.local("b", range(10))
        await node.idle()
        assert node.of("b") == told(answer_on_paper(range(10), 4))


async def fail_a_step(node, error):
    node.local("a", range(10))
    await node.until_step(1)
    node.engine.error = error
    node.engine.open()
    await node.idle()


async def test_a_node_that_can_compute_nothing_any_more_ends(tmp_path, monkeypatch):
    last_words = []
    monkeypatch.setattr(step_loop, "end_at_once", last_words.append)
    async with running(tmp_path, gated=True) as node:
        await fail_a_step(node, WeightsLost("weights cannot be read from /d: EIO"))
    assert last_words == ["this node can compute nothing any more and ends: weights cannot be read from /d: EIO"]


async def test_a_node_whose_steps_all_fail_ends(tmp_path, monkeypatch):
    """But not one of which a good step came between."""
    last_words = []
    monkeypatch.setattr(step_loop, "end_at_once", last_words.append)
    async with running(tmp_path) as node:
        errors = [*[ValueError("odd")] * (MOST_FAILED_STEPS - 1), None, *[ValueError("bad")] * MOST_FAILED_STEPS]
        for number, error in enumerate(errors):
            assert last_words == []
            node.engine.error = error
            node.local(str(number), range(10))
            await node.idle()
    assert last_words == ["4 steps in a row have failed, and this node ends: bad"]


async def test_a_failed_step_ends_a_node_whose_followers_wait_in_it(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Followers, "fail_step", lambda self, error: told.append(str(error)))
    async with running(tmp_path, gated=True) as node:
        await fail_a_step(node, ValueError("odd"))
    assert told == ["odd"]


async def test_a_draining_node_finishes_what_it_has(tmp_path):
    async with running(tmp_path, gated=True, max_num_seqs=1, max_num_batched_tokens=4) as node:
        node.local("a", range(10))
        node.local("b", range(20, 30))
        await node.until_step(1)
        node.node.drain()
        assert node.load.state == "draining"
        assert node.load.num_waiting_tokens == 20
        node.engine.open()
        await node.idle()
        assert node.of("a") == told(answer_on_paper(range(10), 4))
        assert node.of("b") == told(answer_on_paper(range(20, 30), 4))


async def test_refusals_are_told_at_once(tmp_path):
    async with running(tmp_path, gated=True, num_blocks=4, max_num_seqs=1, max_num_queued=1) as node:
        node.local("too long", range(14))
        node.local("runs", range(4))
        await node.until_step(1)
        node.local("waits", range(4))
        node.local("one too many", range(4))
        assert node.kinds("too long") == node.kinds("one too many") == ["failed"]
        assert node.kinds("waits") == []
        node.engine.open()
        await node.idle()


async def test_a_prompt_whose_prefix_fetch_fails_at_once_is_read_at_once(tmp_path):
    """No descriptor can be drawn for so many ranks, which shows while the step is planned that finds nothing else to
    do."""
    async with running(tmp_path) as node:
        asked = job(make_request("a", range(10)))
        asked.fetch_prefix.CopyFrom(
            fleet_pb2.FetchPrefix(epoch=7, num_tokens=8, tp_size=100, pp_size=1, patience_s=1e6)
        )
        node.handle(reserve=fleet_pb2.Reserve(job=asked, local_prefill=True))
        await node.idle()
        assert node.kinds("a")[:2] == ["prefix_fetch_ended", "first_token"]


async def test_a_node_that_could_not_step_all_its_answers_does_not_start(tmp_path):
    with pytest.raises(SettingsError, match=r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"):
        async with running(tmp_path, max_num_batched_tokens=7, max_num_seqs=8):
            raise AssertionError("it started")


# ---- what it tells of itself ----


async def test_heartbeats_tell_the_rates(tmp_path):
    async with running(tmp_path, token_s=0.0005, max_num_seqs=4, max_num_batched_tokens=32) as node:
        assert node.load.prefill_tokens_per_s == 0.0
        node.local("a", range(200), max_tokens=4)
        await node.idle()
        assert node.rates.steps == [(32, 0)] * 6 + [(8, 0)] + [(0, 1)] * 3
        load = node.load
        assert load.prefill_tokens_per_s == node.rates.prefill_tokens_per_s > 0
        assert load.step_s == node.rates.decode_step_s > 0  # and not the median of all steps, most of 32
        assert load.num_steps == 10
        assert [rank.rank for rank in load.ranks] == [0]


async def test_the_rate_measured_at_start_counts_until_there_are_better_ones(tmp_path):
    async with running(tmp_path, start_tokens_per_s=1000.0, max_num_batched_tokens=64) as node:
        assert node.load.prefill_tokens_per_s == 1000.0
        for name, prompt in (("a", range(129)), ("b", [1])):
            node.prefill(make_request(name, prompt, max_tokens=1))
            await node.idle()
        assert node.rates.steps == [(64, 0), (64, 0), (1, 0), (1, 0)]
        assert node.load.prefill_tokens_per_s == node.rates.prefill_tokens_per_s > 0


async def test_hello_says_who_it_is_and_heartbeats_then_tell_the_whole_cache(tmp_path):
    async with running(tmp_path, num_blocks=40, max_num_seqs=5, max_num_queued=6) as node:
        node.local("a", range(9))
        await node.idle()
        node.node.heartbeat()
        hello = node.node.hello()
        assert (hello.num_blocks, hello.block_size, hello.tp_size) == (40, 4, 1)
        assert (hello.max_num_seqs, hello.max_num_queued) == (5, 6)
        assert hello.node.name == "node"
        assert (hello.node.role, hello.max_num_batched_tokens) == ("decode", 512)
        assert hello.shape == inference_pb2.Shape(prompt_tokens=0, slots=5, accepts_transfers=True)
        assert hello.node.fingerprint["kv_transport"] == "zmq"
        node.events.clear()
        node.node.heartbeat()
        (cache_changed,) = [event.cache_changed for event in node.events]
        assert len(cache_changed.stored) == 3


async def test_a_new_shape_is_confirmed_at_once_and_kept_for_the_next_hello(tmp_path):
    async with running(tmp_path, max_num_seqs=5, max_num_batched_tokens=32) as node:
        shape = inference_pb2.Shape(prompt_tokens=32, slots=5, accepts_transfers=True)
        node.handle(reshape=fleet_pb2.Reshape(shape=shape))
        (beat,) = [event.heartbeat for event in node.events if event.HasField("heartbeat")]
        assert (beat.load.shape, beat.load.role) == (shape, "mixed")
        hello = node.node.hello()
        assert (hello.shape, hello.home, hello.node.role) == (shape, shape, "decode")  # what it has begun with
        temporary = inference_pb2.Shape(prompt_tokens=16, slots=5)
        node.handle(reshape=fleet_pb2.Reshape(shape=temporary, is_temporary=True))
        hello = node.node.hello()
        assert (hello.shape, hello.home) == (temporary, shape)


async def test_a_shape_that_the_node_cannot_take_is_refused_and_the_node_goes_on(tmp_path):
    async with running(tmp_path, max_num_seqs=5, max_num_batched_tokens=32) as node:
        for shape in (inference_pb2.Shape(prompt_tokens=33), inference_pb2.Shape(slots=6), inference_pb2.Shape()):
            node.events.clear()
            node.handle(reshape=fleet_pb2.Reshape(shape=shape))
            failed, beat = (event for event in node.events if not event.HasField("cache_changed"))
            assert failed.failed.reason == "BAD_PARAM"
            assert beat.heartbeat.load.shape == inference_pb2.Shape(slots=5, accepts_transfers=True)
        node.events.clear()
        node.local("a", range(9), max_tokens=2)
        await node.idle()
        assert node.kinds("a") == ["first_token", "step_tokens"]


# ---- more than one rank ----


async def test_followers_are_told_every_chunk(tmp_path, monkeypatch):
    shares = []
    async with (
        crew(monkeypatch, 1, {1: "rank-1"}) as (followers, (leader,)),
        running(tmp_path, followers=followers, max_num_seqs=4, max_num_batched_tokens=8) as node,
    ):
        pool = node.engine.pool
        receiver = KVReceiver(node.network.listener("rank-1"), pool, rank=1, tp_size=2)
        sender = KVSender(node.network.dialer(), pool, rank=1, tp_size=2, deadline_s=5.0)
        stepper = Stepper(lambda parts, _: shares.append([(len(part.token_ids), part.samples) for part in parts]))
        transfers = FollowerTransfers(sender, receiver, leader, 16, may_lag=False)
        following = asyncio.create_task(Follower(leader, stepper, transfers).run())
        node.local("a", range(20), max_tokens=3)
        await node.idle()
        assert node.of("a") == told(answer_on_paper(range(20), 3))
        await node.until(lambda: len(shares) == 5)
        assert shares == [[(8, False)], [(8, False)], [(4, True)], [(1, True)], [(1, True)]]
        assert node.node.hello().tp_size == 2
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await sender.close()
        await receiver.close()
