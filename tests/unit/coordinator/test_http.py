"""The HTTP API over real sockets, with nodes that the test speaks for: streams to the byte, failures, and the
end of the server."""

import asyncio

import pytest

from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, begin, begin_to_write, run, step, transfer
from tests.tiny_models import ASSISTANT, BOS, EOS, USER
from tests.unit.coordinator.http_kit import (
    KEY,
    LENGTH,
    answer,
    answer_in_steps,
    completion_bytes,
    ended,
    error_of,
    events_of,
    http_cluster,
    in_module_loop,
    post,
    post_broken_off,
)

pytestmark = pytest.mark.usefixtures("programs_here")

# ---- streams and answers, to the letter ----


def test_the_events_of_a_completion(tmp_path):
    def event(text, finish_reason=None, **others):
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, **others}
        return {"id": "cmpl-r", "object": "text_completion", "model": "m", "choices": [choice]}

    nulls = {"stop_reason": None, "token_ids": None}

    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, stream=True)
            attempt = await begin_to_write(c, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            first, *rest = events_of(await call)
            if len(rest) == 3:  # a and b came one by one, and not joined while the client was away
                assert (first, rest.pop(0)) == (event("a", **nulls, prompt_token_ids=None), event("b", **nulls))
            else:
                assert first == event("ab", **nulls, prompt_token_ids=None)
            assert rest == [event("", "length", stop_reason=None), "[DONE]"]

    run(scenario())


ODD = 'a "quoted" \\ line\n\t\x00\x7f\x85\u2028\u2029 é \U0001f600 </script>'


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_events_that_differ_in_their_text_alone_are_as_those_that_are_written_one_by_one(tmp_path, path):
    """With its usage in each event, a stream has every event written by itself."""

    async def streamed(c, client, **options):
        call = post(client, path, stream=True, stream_options=options, max_tokens=99)
        await answer(c, ODD)
        texts, others = "", list[dict]()
        for event in [each for each in events_of(await call)[:-1] if each["choices"]]:
            event.pop("usage", None)
            inner = event["choices"][0].get("delta", event["choices"][0])
            name = "text" if "text" in inner else "content"
            texts += inner.pop(name, "")
            others += [event] if event not in others else []
        return texts, others

    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            told = await streamed(c, client)
            assert told == await streamed(c, client, include_usage=True, continuous_usage_stats=True)
            assert told[0] == ODD

    run(scenario())


PRIORITIES = [
    ({}, {}, 0),
    ({}, {"priority": -3}, -3),
    ({"x-slo-priority": "-3"}, {}, -3),
    ({"x-slo-priority": "-3"}, {"priority": 0}, 0),
    ({"x-slo-class": "batch"}, {}, 10),
    ({"x-slo-class": "batch"}, {"priority": 0}, 0),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_priority_comes_in_the_body_in_a_header_or_with_the_class(tmp_path, path):
    async def scenario():
        async with http_cluster(tmp_path, slo_class=("batch=priority:10",)) as (c, client):
            for headers, fields, priority in PRIORITIES:
                call = post(client, path, headers=headers, **fields)
                attempt, job = await begin(c)
                assert job.priority == priority
                await transfer(c, attempt, "a")
                await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
                reply = await call
                assert (reply.status_code, reply.headers.get("x-splitserve-warning")) == (200, None)

    run(scenario())


def test_limits_come_in_the_body_or_in_headers_and_the_answer_tells_what_became_of_them(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, slo_class=("chat=ttft:60000,tpot:50000",)) as (c, client):
            headers = {"x-slo-class": "chat", "x-slo-tpot-ms": "0.001"}
            call = post(client, headers=headers, ttft_ms=70000)
            attempt, job = await begin(c)
            assert (0 < job.due.ttft_left_s < 70, job.due.tpot_s) == (True, 1e-6)
            await transfer(c, attempt, "a")
            await asyncio.sleep(0.01)  # longer than the limit
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            [choice] = (await call).json()["choices"]
            limits = {"slo_class": "chat", "ttft_ms": 70000.0, "tpot_ms": 0.001}
            assert choice["attainment"] == {**limits, "ttft_met": True, "tpot_met": False}
            text = (await client.get("/metrics")).text
            for limit, number in (("ttft", 1), ("tpot", 0), ("both", 0)):
                assert f'splitserve_slo_attained_total{{limit="{limit}",slo_class="chat"}} {number}.0' in text

    run(scenario())


TIERS = [  # the fields, the priority of the class, and the tier that is told
    ({"service_tier": "flex"}, 10, "flex"),
    ({"service_tier": "auto"}, 0, "default"),
    ({"service_tier": "flex", "slo_class": "fast"}, -5, "fast"),
    ({"service_tier": "flex", "priority": 2}, 2, "flex"),
    ({}, 0, None),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_service_tier_is_the_slo_class_of_its_name_and_the_answer_says_which_it_was(tmp_path, path):
    async def scenario():
        async with http_cluster(tmp_path, slo_class=("flex=priority:10", "fast=priority:-5")) as (c, client):
            for fields, priority, told in TIERS:
                fields = {**fields, "input": "hi"} if path == "/v1/responses" else fields
                call = post(client, path, **fields)
                attempt, job = await begin(c)
                assert job.priority == priority
                await transfer(c, attempt, "a")
                await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
                reply = await call
                assert reply.status_code == 200, reply.text
                assert reply.json().get("service_tier") == (None if path == "/v1/messages" else told)

    run(scenario())


@pytest.mark.parametrize(
    ("headers", "fields", "field", "message"),
    [
        ({"x-slo-ttft-ms": "soon"}, {}, "x-slo-ttft-ms", "x-slo-ttft-ms must be a finite number, not 'soon'"),
        ({"x-slo-tpot-ms": "inf"}, {}, "x-slo-tpot-ms", "x-slo-tpot-ms must be a finite number, not 'inf'"),
        (
            {"x-slo-tpot-ms": "-1"},
            {},
            "x-slo-tpot-ms",
            "x-slo-tpot-ms must be above 0 and at most 3600000, not -1",
        ),
        ({}, {"tpot_ms": -1}, "tpot_ms", "tpot_ms must be above 0 and at most 3600000, not -1"),
        ({}, {"ttft_ms": "fast"}, "ttft_ms", 'ttft_ms must be a finite number, not "fast"'),
        ({}, {"priority": 101}, "priority", "priority must be at most 100, not 101"),
        ({}, {"priority": 1.5}, "priority", "priority must be an integer, not 1.5"),
        ({}, {"priority": "high"}, "priority", 'priority must be an integer, not "high"'),
        (
            {"x-slo-priority": "-101"},
            {},
            "x-slo-priority",
            "x-slo-priority must be an integer within [-100, 100], not '-101'",
        ),
        (
            {"x-slo-priority": "9" * 5000},
            {},
            "x-slo-priority",
            f"x-slo-priority must be an integer within [-100, 100], not '{'9' * 80}'",
        ),
        ({}, {"slo_class": "chat"}, "slo_class", "slo_class 'chat' is none of the server's: there are none"),
    ],
)
@in_module_loop
async def test_limits_that_cannot_be_are_refused_by_name(client, headers, fields, field, message):
    reply = await post(client, headers=headers, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["message"]) == (400, field, message)


def test_the_events_of_a_chat_with_usage(tmp_path):
    same = {"id": "chatcmpl-r", "object": "chat.completion.chunk", "model": "m"}

    def event(delta, finish_reason=None, **others):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **others}
        return {**same, "choices": [choice], "usage": None}

    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, "/v1/chat/completions", stream=True, stream_options={"include_usage": True})
            await answer_in_steps(c)
            opening, *middle, end, usage, done = events_of(await call)
            assert opening == event({"role": "assistant", "content": ""}) | {"prompt_token_ids": None}
            assert "".join(each["choices"][0]["delta"]["content"] for each in middle) == "ab"
            assert middle == [event(each["choices"][0]["delta"], token_ids=None) for each in middle]
            assert end == event({}, "stop", stop_reason=None)
            # <|bos|><|user|>hi<|eos|><|assistant|>
            counts = {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9}
            assert usage == {**same, "choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 4}}}
            assert done == "[DONE]"

    run(scenario())


def test_a_whole_chat_with_logprobs_and_token_ids(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, "/v1/chat/completions", logprobs=True, top_logprobs=1, return_token_ids=True)
            attempt, job = await begin(c)
            assert (job.sampling_params.logprobs, job.sampling_params.max_tokens) == (1, 1000 - 6)
            top = [{"token_id": 0xC3, "logprob": -0.5}]
            token = events.sampled(attempt, 0, 0xC3, logprob=-0.5, top=top)
            await c.nodes["p0"].send(events.first_token(token))
            await c.nodes["d0"].send(events.reserved(attempt, b"t"))
            await c.nodes["p0"].command("deliver")
            await c.nodes["d0"].send(events.committed(attempt))
            top = [{"token_id": ord("x"), "logprob": -0.25}]
            end = events.sampled(attempt, 1, 0xBC, LENGTH, logprob=float("-inf"), top=top)
            await c.nodes["d0"].send(events.step_tokens(end))
            reply = (await call).json()
            assert reply.pop("created") > 1_700_000_000
            first = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}
            second = {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xBC]}
            content = [
                {**first, "top_logprobs": [first]},
                {**second, "top_logprobs": [{"token": "x", "logprob": -0.25, "bytes": [ord("x")]}]},
            ]
            nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
            assert reply == {
                "id": "chatcmpl-r",
                "object": "chat.completion",
                "model": "m",
                "service_tier": None,
                "system_fingerprint": None,
                "kv_transfer_params": None,
                "prompt_logprobs": None,
                "prompt_token_ids": [BOS, USER, ord("h"), ord("i"), EOS, ASSISTANT],
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "ü", **nulls},
                        "logprobs": {"content": content, "refusal": None},
                        "finish_reason": "length",
                        "stop_reason": None,
                        "token_ids": [0xC3, 0xBC],
                    }
                ],
                "usage": {
                    "prompt_tokens": 6,
                    "completion_tokens": 2,
                    "total_tokens": 8,
                    "prompt_tokens_details": {"cached_tokens": 0},
                },
            }

    run(scenario())


COMPLETIONS = [
    ([97] * 3, {}, 3, 16),
    ([97] * 995, {}, 995, 5),
    ([97] * 3, {"min_tokens": 20}, 3, 20),
    ([97] * 1200, {"truncate_prompt_tokens": -1}, 984, 16),
    ([97] * 1200, {"truncate_prompt_tokens": 990}, 990, 10),
]


def test_a_completion_has_16_tokens_or_what_its_prompt_leaves_of_1000(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            for prompt, fields, num_tokens, max_tokens in COMPLETIONS:
                call = post(client, prompt=prompt, **{"max_tokens": None, **fields})
                attempt, job = await begin(c)
                assert (len(job.token_ids), job.sampling_params.max_tokens) == (num_tokens, max_tokens)
                await transfer(c, attempt, "a")
                await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
                assert (await call).status_code == 200

    run(scenario())


# ---- failures ----


def test_without_nodes_there_is_a_status_even_for_a_stream(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (_, client):
            reply = await post(client, stream=True)
            assert error_of(reply) == (503, "server_error", "NO_PREFILL_WORKER")
            assert reply.headers["retry-after"] == "1"
            assert (await client.get("/health")).status_code == 503

    run(scenario())


def test_a_full_queue_is_told_with_when_to_come_again(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, max_num_queued_reqs=3) as (c, client):
            call = post(client)
            attempt, _ = await begin(c)
            reply = await post(client, prompt=["a", "b", "c"], headers={"x-request-id": "more"})
            assert error_of(reply) == (429, "requests", "rate_limit_exceeded")
            assert reply.headers["retry-after"] == "1"
            message = "3 do not fit: 1 sequences are in flight, the limit is 3: try again in 1.0 s"
            assert reply.json()["error"]["message"] == message
            await transfer(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)  # neither node has heard of anything in between
            assert (await call).status_code == 200

    run(scenario())


def test_a_call_of_more_answers_than_may_ever_be_in_flight_is_not_told_to_come_again(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=(), max_num_queued_reqs=5) as (_, client):
            reply = await post(client, prompt=["a", "b", "c"], n=2)
            assert error_of(reply) == (400, "invalid_request_error", "BAD_PARAM")
            assert reply.json()["error"]["message"] == (
                "n (2) for each of 3 prompts makes 6 sequences, the limit is 5 in flight"
            )
            assert "retry-after" not in reply.headers

    run(scenario())


def test_a_call_too_many_is_counted_as_refused(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, max_connections=17) as (c, client):  # of which 16 are kept for health checks
            call = post(client)
            attempt, _ = await begin(c)
            assert error_of(await client.get("/v1/models")) == (429, "requests", "rate_limit_exceeded")
            assert (await client.get("/ping")).status_code == 200
            await transfer(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            assert (await call).status_code == 200
            text = (await client.get("/metrics")).text
            assert 'splitserve_requests_refused_total{reason="QUEUE_FULL"} 1.0' in text

    run(scenario())


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_failure_after_the_first_token_is_an_event_and_nothing_is_done(tmp_path, num_prompts):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post_broken_off(client, prompt=["a", "b"][:num_prompts])
            attempt, _ = await begin(c)
            if num_prompts == 2:
                other, _ = await begin(c)
            await transfer(c, attempt, "a")
            await c.nodes["d0"].send(events.failed(attempt, "ENGINE_ERROR"))
            if num_prompts == 2:
                for node in c.nodes.values():
                    await node.answer_cancel(other)
            *before, last = events_of(await call)
            assert "".join(event["choices"][0]["text"] for event in before) == "a"
            assert last == {
                "error": {
                    "message": "the engine of the decode node failed: what happened",
                    "type": "server_error",
                    "param": None,
                    "code": "ENGINE_ERROR",
                    "reason": "ENGINE_ERROR",
                }
            }
            await c.until_nothing_is_live()

    run(scenario())


def test_only_health_is_open_to_strangers(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, api_key=KEY, nodes=()) as (_, client):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": "Bearer"}):
                for path in ("/v1/models", "/version", "/nothing"):
                    reply = await client.get(path, headers=headers)
                    assert error_of(reply) == (401, "invalid_request_error", "invalid_api_key")
                    assert "--api-key" in reply.json()["error"]["message"]
                    assert reply.headers["www-authenticate"] == "Bearer"
                assert (await client.post("/v1/completions", json={}, headers=headers)).status_code == 401
                assert (await client.get("/ping", headers=headers)).status_code == 503
            for scheme in ("Bearer", "bearer", "BEARER "):
                headers = {"Authorization": f"{scheme} {KEY}"}
                [model] = (await client.get("/v1/models", headers=headers)).json()["data"]
                assert model["id"] == "m"

    run(scenario())


# ---- figures ----


def test_the_figures_are_served_to_who_may_ask(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, api_key=KEY) as (c, client):
            assert error_of(await client.get("/metrics"))[0] == 401
            client.headers["Authorization"] = f"Bearer {KEY}"
            call = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5}))
            await answer_in_steps(c)
            await call
            reply = await client.get("/metrics")
            assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            lines = reply.text.splitlines()
            assert "splitserve_generation_tokens_total 3.0" in lines
            assert 'vllm:request_success_total{engine="coordinator",finished_reason="stop",model_name="m"} 1.0' in lines

    run(scenario())


# ---- the end of the server ----


def test_health_of_one_node(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=("d0",)) as (_, client):
            statuses = [(await client.get(f"/health{query}")).status_code for query in ("", "?node=d0", "?node=p0")]
            assert statuses == [503, 200, 503]

    run(scenario())


async def until_health(client, status):
    async with asyncio.timeout(DEADLINE_S):
        while (await client.get("/health")).status_code != status:
            await asyncio.sleep(0.01)


def test_draining_refuses_new_calls_and_lets_live_ones_finish(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            await until_health(client, 200)
            live = post(client)
            attempt, _ = await begin(c)
            draining = asyncio.create_task(c.server.drain())
            await until_health(client, 503)
            reply = await client.post("/v1/completions", json={"prompt": "a"})
            assert error_of(reply) == (503, "server_error", "DRAINING")
            await transfer(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            assert (await live).json()["choices"][0]["text"] == "ab"
            await draining

    run(scenario())


def test_stopping_ends_live_streams_with_an_error_and_cuts_off_who_dawdles(tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.api.public.STOP_GRACE_S", 2.0)

    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            port = c.server.http_port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(completion_bytes()[:-1])
            call = post_broken_off(client)
            await begin_to_write(c, "a")
            await c.server.stop()
            *_, last = events_of(await call)
            assert last["error"]["code"] == "DRAINING"
            assert await ended(reader) == b""
            writer.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)

    run(scenario())
