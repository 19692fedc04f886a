"""Answers that go on where an earlier call broke off, over real gRPC, with nodes that the test speaks for."""

import math
import re

import pytest

from coordinator.dispatcher import Dispatcher
from protos import inference_pb2
from protos.convert import MAX_TOKENS_HEADER, MODEL_HEADER
from serving_core.errors import RequestError
from serving_core.reasons import WORKER_LOST
from tests import fleet_events as events
from tests.effort import few
from tests.scripted_nodes import (
    DEADLINE_S,
    begin,
    begin_to_write,
    cluster,
    first_message,
    read_to_end,
    refusal_of,
    run,
    step,
    transfer,
    until_serving,
)
from tests.tiny_models import EOS

LENGTH, STOP = events.LENGTH, events.STOP


def so_far(text=b"", **fields):
    return inference_pb2.OutputSoFar(**{"token_ids": text, "num_chars": len(text), **fields})


def go_on(c, *answers, prompt="hello", metadata=None, **params):
    params = {"max_tokens": 8, "seed": 7, **params}
    fields = {name: params.pop(name) for name in ("ttft_ms", "tpot_ms", "call_number") if name in params}
    request = inference_pb2.GenerateRequest(
        request_id="r", text=prompt, sampling_params=inference_pb2.SamplingParams(**params), so_far=answers, **fields
    )
    return c.stub.Generate(request, timeout=DEADLINE_S, metadata=metadata)


def text_of(parts):
    return "".join(part.chunk.text for part in parts)


def test_nodes_get_what_they_get_when_an_answer_begins_again_on_others(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = go_on(c, so_far(b"abc"), presence_penalty=0.5, min_tokens=5)
            attempt, job = await begin(c)
            assert (list(job.token_ids), job.num_prompt_tokens) == ([*b"helloabc"], 5)
            sampling = job.sampling_params
            assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (7, 8, 5)
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 3, ord("d")), num_cached_tokens=2))
            await c.until_heard(c.nodes["p0"])
            await c.nodes["d0"].send(events.committed(attempt))
            await step(c.nodes["d0"], attempt, 4, "ef", LENGTH)
            *parts, last = await read_to_end(call)
            assert text_of(parts) == "def"
            assert parts[0].chunk.first_token_index == 3
            complete = last.complete
            assert (complete.prompt_tokens, complete.completion_tokens, complete.resumed_tokens) == (5, 6, 3)
            assert (complete.cached_tokens, complete.timeline.ttft_s) == (2, 0)
            await c.until_nothing_is_live()

    run(scenario())


def test_the_headers_say_what_was_taken_before_any_token(tmp_path):
    async def scenario():
        async with cluster(tmp_path / "möd") as c:
            call = c.generate("hello", max_tokens=4)
            headers = dict(await call.initial_metadata())
            assert (headers[MODEL_HEADER].decode(), headers[MAX_TOKENS_HEADER]) == ("möd", "4")
            call.cancel()

    run(scenario())


def test_an_adapter_is_asked_for_again_by_its_name_as_soon_as_nodes_have_told_of_it(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=()) as c:
            params = inference_pb2.SamplingParams(max_tokens=4)
            request = inference_pb2.GenerateRequest(request_id="r", text="hello", model="sql", sampling_params=params)
            code, info, details = await refusal_of(c.stub.Generate(request))
            assert (code.name, info.reason) == ("UNAVAILABLE", "NO_PREFILL_WORKER")
            assert details == "no node has come yet that could tell whether there is such a model"
            for name in ("p0", "d0"):
                await c.attach(name, **{"lora:sql": "digest"})
            call = c.stub.Generate(request, timeout=DEADLINE_S)
            _, job = await begin(c)
            assert job.adapter == "sql"
            assert dict(await call.initial_metadata())[MODEL_HEADER] == b"sql"
            assert (await c.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())).adapters == ["sql"]
            call.cancel()

    run(scenario())


def test_a_stop_string_is_found_across_the_seam(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = go_on(c, so_far(b"abEN", num_chars=2), stop=["END"])  # "EN" was held back
            attempt, _ = await begin(c)
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 4, ord("D"))))
            *parts, last = await read_to_end(call)
            assert text_of(parts) == ""
            assert (last.complete.finish_reason, last.complete.matched_stop_str) == (STOP, "END")
            assert last.complete.completion_tokens == 5

    run(scenario())


@pytest.mark.parametrize(
    ("answer", "params", "text", "ending"),
    [
        (so_far(b"12345678"), {}, "", {"finish_reason": LENGTH}),
        (so_far(b"ab\xc3", num_chars=2), {"max_tokens": 3}, "\N{REPLACEMENT CHARACTER}", {"finish_reason": LENGTH}),
        (so_far([97, EOS], num_chars=1), {}, "", {"finish_reason": STOP, "matched_token_id": EOS}),
        (so_far(b"abENDx", num_chars=0), {"stop": ["END"]}, "ab", {"finish_reason": STOP, "matched_stop_str": "END"}),
    ],
    ids=["length", "held back", "token", "stop string"],
)
def test_an_answer_that_was_over_gets_its_end_alone(tmp_path, answer, params, text, ending):
    async def scenario():
        async with cluster(tmp_path, nodes=()) as c:
            *parts, last = await read_to_end(go_on(c, answer, **params))
            assert text_of(parts) == text
            for name, value in ending.items():
                assert getattr(last.complete, name) == value
            assert last.complete.completion_tokens == last.complete.resumed_tokens or "stop" in params
            await c.until_nothing_is_live()

    run(scenario())


def test_of_several_answers_those_that_have_ended_stay_so(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = go_on(c, so_far(has_ended=True), so_far(b"ab"), so_far(has_ended=True), n=3)
            attempt, job = await begin(c)
            assert (attempt.request_id, job.sampling_params.seed, list(job.token_ids[5:])) == ("r/1", 8, [*b"ab"])
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 2, ord("c"), LENGTH)))
            parts = await read_to_end(call)
            assert {part.index for part in parts} == {1}
            assert await read_to_end(go_on(c, so_far(has_ended=True))) == []

    run(scenario())


@pytest.mark.parametrize("api_servers", few([1, 2]))
def test_a_later_call_takes_the_place_of_one_that_the_server_takes_for_live(tmp_path, monkeypatch, api_servers):
    begin_call, begun = Dispatcher.begin, []

    def noting(self, plan, so_fars, call, *args, **options):
        begun.append((self, call))
        begin_call(self, plan, so_fars, call, *args, **options)

    monkeypatch.setattr(Dispatcher, "begin", noting)

    async def scenario():
        async with cluster(tmp_path, api_server_count=api_servers) as c:
            await until_serving(c.stub)
            nodes = [c.nodes["p0"], c.nodes["d0"]]
            first = go_on(c)
            attempt = await begin_to_write(c, "a")
            assert (await first_message(first)).chunk.text == "a"

            [(dispatcher, before)] = begun
            later = go_on(c, so_far(b"a"), call_number=2)
            await nodes[1].answer_cancel(attempt)
            second, job = await begin(c)
            assert list(job.token_ids) == [*b"helloa"]
            code, info, details = await refusal_of(first)
            assert (code.name, info.reason, details) == ("ABORTED", "ABORTED", "request r goes on in a later call")
            for number in (0, 1, 2):  # a call of before may come late
                code, info, _ = await refusal_of(go_on(c, so_far(b"a"), call_number=number))
                assert (code.name, info.reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID")

            await transfer(c, second, "b", 1)
            await step(nodes[1], attempt, 1, "x", LENGTH)  # what comes late is of the call that is over
            dispatcher.stopped(before, 0)
            dispatcher.give_up(before, RequestError(WORKER_LOST, "late"))
            dispatcher.close(before)
            await step(nodes[1], second, 2, "c", LENGTH)
            *parts, last = await read_to_end(later)
            assert (text_of(parts), last.complete.completion_tokens) == ("bc", 3)
            await c.until_nothing_is_live()

    run(scenario())


def test_a_later_call_of_another_key_takes_nobodys_place(tmp_path):
    ann, bob = "ann-0123456789abcdef", "bob-0123456789abcdef"
    (tmp_path / "keys").write_text(f"ann {ann}\nbob {bob}\n")

    async def scenario():
        async with cluster(tmp_path / "model", api_keys_file=str(tmp_path / "keys")) as c:
            first = go_on(c, metadata=(("authorization", f"Bearer {ann}"),))
            attempt, _ = await begin(c)
            stranger = go_on(c, so_far(b"a"), call_number=1, metadata=(("authorization", f"Bearer {bob}"),))
            assert (await refusal_of(stranger))[0].name == "ALREADY_EXISTS"
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord("a"), LENGTH)))
            assert text_of(await read_to_end(first)) == "a"

    run(scenario())


def test_limits_count_from_the_first_token_that_the_client_had(tmp_path):
    async def scenario():
        async with cluster(tmp_path, admission="timely") as c:
            call = go_on(c, so_far(b"abc", since_first_s=20.0), tpot_ms=1000.0, ttft_ms=1.0)
            attempt, job = await begin(c)
            assert 20.0 <= job.due.since_first_s < 20.0 + DEADLINE_S
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 3, ord("d"), LENGTH)))
            attainment = (await read_to_end(call))[-1].complete.attainment
            assert (attainment.tpot_met, attainment.ttft_met) == (False, True)

    run(scenario())


IMPOSSIBLE_BEGINNINGS = [
    ([so_far(), so_far()], {}, "so_far", r"must have one entry for each of n \(1\), not 2"),
    ([so_far(b"a")], {"n": 2}, "so_far", r"must have one entry for each of n \(2\), not 1"),
    ([so_far(b"123456789")], {}, "so_far", r"has 9 output tokens, over max_tokens \(8\)"),
    ([so_far([260])], {}, "so_far", "has token id 260; the vocabulary ends at 259"),
    ([so_far(b"a", since_first_s=math.nan)], {}, "so_far", "since_first_s of nan"),
    ([so_far(b"a", since_first_s=1e9)], {}, "so_far", r"since_first_s of 1e\+09, .* within \[0, 86400\]"),
    ([so_far(b"a" * 2000)], {}, "so_far.token_ids", "has 2000 entries, the limit is 1000"),
]


def test_what_cannot_be_gone_on_with_is_refused(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            for answers, params, field, message in IMPOSSIBLE_BEGINNINGS:
                code, info, details = await refusal_of(go_on(c, *answers, **params))
                assert (code.name, info.reason, info.metadata["field"]) == ("INVALID_ARGUMENT", "BAD_PARAM", field)
                assert re.search(message, details)

    run(scenario())


def test_a_sampled_answer_cannot_go_on_without_its_seed(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            request = inference_pb2.GenerateRequest(request_id="r", text="hello", so_far=[so_far(b"a")])
            _, info, details = await refusal_of(c.stub.Generate(request, timeout=DEADLINE_S))
            assert (info.metadata["field"], "seed is missing" in details) == ("seed", True)

    run(scenario())
