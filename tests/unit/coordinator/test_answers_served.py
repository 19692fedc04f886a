"""Answers through the coordinator's servers, over real gRPC, with nodes that the test speaks for."""

import contextlib

import grpc
import pytest

from coordinator.api import exchange
from protos import inference_pb2, inference_pb2_grpc
from tests import fleet_events as events
from tests.faults.stalled_reader import StalledReader
from tests.scripted_nodes import (
    begin,
    begin_to_write,
    cluster,
    faults_of,
    first_message,
    health_changes,
    read_all,
    read_to_end,
    refusal_of,
    responses,
    run,
    step,
    transfer,
)
from tests.system.answers import request
from tests.tiny_models import ASSISTANT, BOS, EOS, USER

LENGTH, STOP = events.LENGTH, events.STOP


def test_an_answer_comes_through_both_nodes(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate("hi", max_tokens=4, seed=7)
            attempt, job = await begin(c)
            assert attempt.request_id == "r/0"
            assert (list(job.token_ids), job.num_prompt_tokens) == ([*b"hi"], 2)
            assert (job.sampling_params.max_tokens, job.sampling_params.seed) == (4, 7)
            await transfer(c, attempt)
            await step(c.nodes["d0"], attempt, 1, "b")
            await step(c.nodes["d0"], attempt, 2, "cd", LENGTH)
            text, token_ids, [complete] = await read_all(call)
            assert (text, token_ids) == ("abcd", [*b"abcd"])
            assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == (LENGTH, 2, 4)
            assert (complete.timeline.prefill_node, complete.timeline.decode_node) == ("p0", "d0")
            await c.until_nothing_is_live()

    run(scenario())


def test_the_first_token_reaches_the_client_before_any_transfer(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate(max_tokens=2)
            attempt, _ = await begin(c)
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord("a"))))
            response = await first_message(call)
            assert (response.request_id, response.chunk.text) == ("r", "a")

    run(scenario())


def test_tokens_that_overtake_the_first_are_held_back(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate(max_tokens=3)
            attempt, _ = await begin(c)
            await step(c.nodes["d0"], attempt, 1, "bc", LENGTH)
            await c.nodes["d0"].send(events.heartbeat())
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord("a"))))
            assert (await read_all(call))[0] == "abc"

    run(scenario())


def test_chat_and_token_ids_are_inputs_too(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            chat = inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
            calls = [c.stub.Generate(inference_pb2.GenerateRequest(chat=chat))]  # one that is let go of is cancelled
            _, job = await begin(c)
            assert list(job.token_ids) == [BOS, USER, *b"hi", EOS, ASSISTANT]
            assert len(job.attempt.request_id) > 20  # made by the server
            tokenized = inference_pb2.TokenizedInput(input_ids=[5, 6])
            calls.append(c.stub.Generate(inference_pb2.GenerateRequest(tokenized=tokenized)))
            assert list((await begin(c))[1].token_ids) == [5, 6]
            for call in calls:
                call.cancel()

    run(scenario())


def test_several_answers_share_a_stream(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate(n=2, max_tokens=1, seed=5)
            started = [await begin(c), await begin(c)]
            assert [job.sampling_params.seed for _, job in started] == [5, 6]
            for letter, (attempt, _) in zip("ab", started, strict=True):
                await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord(letter), LENGTH)))
                await c.nodes["d0"].answer_cancel(attempt)
            seen = [(r.index, r.WhichOneof("response"), r.chunk.text) async for r in responses(call)]
            assert sorted(seen) == [(0, "chunk", "a"), (0, "complete", ""), (1, "chunk", "b"), (1, "complete", "")]

    run(scenario())


def test_a_stop_string_ends_the_answer_and_the_decode_node_lets_go(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate(max_tokens=50, stop=["</s>"])
            attempt = await begin_to_write(c)
            await step(c.nodes["d0"], attempt, 1, "bc</")
            await step(c.nodes["d0"], attempt, 5, "s>de")
            await c.nodes["d0"].answer_cancel(attempt)
            text, token_ids, [complete] = await read_all(call)
            assert (text, bytes(token_ids)) == ("abc", b"abc</s>")
            assert (complete.finish_reason, complete.matched_stop_str) == (STOP, "</s>")
            assert complete.completion_tokens == 7
            await c.until_nothing_is_live()

    run(scenario())


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_client_that_cancels_frees_its_nodes(tmp_path, handed_over):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate()
            attempt, _ = await begin(c)
            if handed_over:
                await transfer(c, attempt)
                await first_message(call)
            call.cancel()
            await c.nodes["d0"].answer_cancel(attempt)
            if not handed_over:
                await c.nodes["p0"].answer_cancel(attempt)
            await c.until_nothing_is_live()

    run(scenario())


def test_abort_completes_the_answer_as_aborted(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate()
            await begin_to_write(c)
            await first_message(call)
            response = await c.stub.Abort(inference_pb2.AbortRequest(request_ids=["r", "other"]))
            assert (list(response.aborted), list(response.unknown)) == (["r"], ["other"])
            _, _, [complete] = await read_all(call)
            assert complete.finish_reason == inference_pb2.FINISH_REASON_ABORT
            assert complete.completion_tokens == 1

    run(scenario())


def test_a_broken_decode_stream_moves_the_answer_and_its_text_goes_on(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0", "d1")) as c:
            call = c.generate("hi", max_tokens=9)
            attempt, _ = await begin(c)
            await transfer(c, attempt, "\xc3")  # é begins before the move and ends after it
            assert (await first_message(call)).chunk.text == ""
            await c.nodes["d0"].close()
            job = (await c.nodes["d1"].command("reserve")).job
            assert list(job.token_ids) == [*b"hi", 0xC3]
            assert job.num_prompt_tokens == 2
            assert job.attempt.epoch > attempt.epoch
            assert (await c.nodes["p0"].command("prefill")).job == job
            token = events.sampled(job.attempt, 1, 0xA9)
            await c.nodes["p0"].send(events.first_token(token))
            await step(c.nodes["d1"], job.attempt, 2, "!", LENGTH)
            rest = await read_to_end(call)
            assert "".join(response.chunk.text for response in rest) == "é!"
            assert rest[0].chunk.first_token_index == 1
            assert rest[-1].complete.timeline.num_restarts == 1

    run(scenario())


def test_a_broken_prefill_stream_moves_the_request_before_its_first_token(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "p1", "d0")) as c:
            call = c.generate("hi", max_tokens=1)
            attempt, _ = await begin(c)
            await c.nodes["p0"].hang_up()
            await c.nodes["d0"].answer_cancel(attempt)
            job = (await c.nodes["p1"].command("prefill")).job
            await c.nodes["p1"].send(events.first_token(events.sampled(job.attempt, 0, ord("a"), LENGTH)))
            assert (await read_all(call))[0] == "a"

    run(scenario())


def test_the_last_node_of_a_role_ends_the_answer_with_how_far_it_came(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate()
            await begin_to_write(c)
            await first_message(call)
            await c.nodes["d0"].close()
            code, info, _ = await refusal_of(call)
            assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_DECODE_WORKER")
            assert dict(info.metadata)["tokens_emitted"] == "1"
            code, info, details = await refusal_of(c.generate())
            assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_DECODE_WORKER")
            assert details == "no node that decodes sequences is ready"

    run(scenario())


@contextlib.asynccontextmanager
async def stalled_reader(c, num_tokens):
    """An answer whose reader took the first message, with a window so small that the server's writes block early."""
    for name in ("p0", "d0"):
        await c.attach(name, num_blocks=300, max_model_len=4096)
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{c.server.port}", options=narrow) as channel:
        c.stub = inference_pb2_grpc.InferenceStub(channel)
        call = c.generate(max_tokens=3000, logprobs=20)
        attempt = await begin_to_write(c)
        await first_message(call)
        top = [inference_pb2.TopLogprob(token_id=token_id, logprob=-1.0) for token_id in range(20)]
        for start in range(1, num_tokens, 20):
            indices = range(start, start + 20)
            tokens = [events.sampled(attempt, index, 97, logprob=-1.0, top=top) for index in indices]
            await c.nodes["d0"].send(events.step_tokens(*tokens))
        yield call, attempt


def test_a_reader_that_stops_reading_is_dropped(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=()) as c, stalled_reader(c, 2900) as (call, attempt):
            await c.nodes["d0"].answer_cancel(attempt)
            code, info, _ = await refusal_of(call)
            assert (code, info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
            await c.until_nothing_is_live()

    run(scenario())


def test_a_reader_without_any_room_is_let_go_of(tmp_path, caplog, monkeypatch):
    """Its first message never leaves, and so no status can; the nodes and the log are spared all the same."""
    monkeypatch.setattr(exchange, "WRITE_TIMEOUT_S", 0.2)

    async def scenario():
        async with cluster(tmp_path) as c:
            reader = await StalledReader.dial(c.server.port)
            reader.ask(request("hi", request_id="r", max_tokens=4))
            attempt, _ = await begin(c)
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord("a"))))
            await c.nodes["d0"].command("begun")
            for node in c.nodes.values():
                await node.answer_cancel(attempt)
            await c.until_nothing_is_live()
            await reader.close()

    run(scenario())
    assert "a client has read nothing for 0.2 s" in caplog.text
    assert not faults_of(caplog)


def test_a_client_that_leaves_during_a_write_is_no_error(tmp_path, caplog):
    async def scenario():
        async with cluster(tmp_path, nodes=()) as c, stalled_reader(c, 900) as (call, attempt):
            call.cancel()
            await c.nodes["d0"].answer_cancel(attempt)
            await c.until_nothing_is_live()

    run(scenario())
    assert not faults_of(caplog)


# ---- nodes that read and write ----


def test_a_node_that_does_both_is_ready_alone_and_answers(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0",)) as c:
            following = await health_changes(c)
            await following("NOT_SERVING")
            await c.attach("b0")
            await following("SERVING")
            await c.nodes["p0"].hang_up()
            await c.until_loads(lambda loads: [load.name for load in loads.nodes] == ["b0"])
            call, b0 = c.generate(max_tokens=3), c.nodes["b0"]
            reserve = await b0.command("reserve")
            assert (reserve.local_prefill, reserve.prefill_tp_size) == (True, 0)
            attempt = reserve.job.attempt
            await b0.send(events.first_token(events.sampled(attempt, 0, ord("a")), prefill_s=1e-9))
            await step(b0, attempt, 1, "bc", events.LENGTH)
            text, _, [complete] = await read_all(call)
            assert (text, complete.finish_reason) == ("abc", events.LENGTH)
            timeline = complete.timeline
            assert (timeline.prefill_node, timeline.decode_node) == ("b0", "b0")
            assert timeline.kv_alloc_s == timeline.kv_transfer_s == 0.0
            await c.until_nothing_is_live()

    run(scenario())


@pytest.mark.parametrize(("writer", "reason"), [("d0", "PROMPT_TOO_LONG"), ("b0", "")])
def test_what_fits_on_no_prefill_node_is_refused_only_where_it_must_be_read_there(tmp_path, writer, reason):
    """The prefill node holds 32 tokens, the other 1600; either also says so of the longest request."""

    async def scenario():
        async with cluster(tmp_path, nodes=(writer,)) as c:
            await c.attach("p0", num_blocks=2, max_model_len=32)
            longest = (await c.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())).max_model_len
            call = c.generate("x" * 40, max_tokens=1)
            if reason:
                assert (longest, (await refusal_of(call))[1].reason) == (32, reason)
                return
            assert longest == 1000
            reserve = await c.nodes[writer].command("reserve")
            assert reserve.local_prefill
            token = events.sampled(reserve.job.attempt, 0, ord("a"), events.LENGTH)
            await c.nodes[writer].send(events.first_token(token))
            assert (await read_all(call))[0] == "a"

    run(scenario())
