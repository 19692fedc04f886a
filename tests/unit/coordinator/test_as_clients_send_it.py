"""What clients of other servers send and expect at the HTTP API: how bodies are packed, which names and nulls
there are, and that a line of a stream is a line to every reader."""

import asyncio
import gzip
import json

import httpx2
import pytest

from coordinator.api.http import sse
from coordinator.api.http.body import MAX_BODY_BYTES
from tests import fleet_events as events
from tests.scripted_nodes import begin, run, step, transfer
from tests.unit.coordinator.http_kit import (
    HI,
    JSON,
    LENGTH,
    answer,
    answer_in_steps,
    error_of,
    http_cluster,
    in_module_loop,
    openai_cluster,
    post,
)

pytestmark = pytest.mark.usefixtures("programs_here")

GZIP = {**JSON, "content-encoding": "gzip"}


def lines_of(data):
    """Return the lines of a response as httpx reads them."""
    return [*httpx2.Response(200, content=data).iter_lines()]


def test_an_event_is_one_line_to_every_reader():
    text = "".join(map(chr, range(0x3000)))
    for lines in (lines_of(sse.event({"text": text})), sse.event({"text": text}).decode().splitlines()):
        [data, *rest] = [line for line in lines if line]
        assert (json.loads(data.removeprefix("data: ")), rest) == ({"text": text}, [])


# ---- bodies ----


@in_module_loop
async def test_a_body_may_come_as_gzip(client):
    for content in (
        gzip.compress(b'{"prompt": "a"}'),
        gzip.compress(b'{"prompt": "a"}' + b" " * (MAX_BODY_BYTES - 15)),
    ):
        reply = await client.post("/tokenize", content=content, headers=GZIP)
        assert reply.json()["tokens"] == [97]


@in_module_loop
async def test_no_more_is_unpacked_than_a_body_may_have(client):
    for num_bytes in (MAX_BODY_BYTES + 1, 2**26):
        reply = await client.post("/tokenize", content=gzip.compress(bytes(num_bytes), 9), headers=GZIP)
        assert error_of(reply) == (413, "invalid_request_error", None)
        assert f"the body has {MAX_BODY_BYTES + 1} bytes or more" in reply.json()["error"]["message"]


PACKED = gzip.compress(b"{}", mtime=0)
NO_GZIP = {"plain": b'{"prompt": "a"}', "cut short": PACKED[:-1], "more behind it": PACKED + b"x", "nothing": b""}


@pytest.mark.parametrize("damage", NO_GZIP.values(), ids=NO_GZIP.keys())
@in_module_loop
async def test_what_is_no_gzip_is_refused(client, damage):
    reply = await client.post("/tokenize", content=damage, headers=GZIP)
    assert error_of(reply) == (400, "invalid_request_error", "MALFORMED_REQUEST")
    assert "the body is no gzip" in reply.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip"])
@in_module_loop
async def test_other_encodings_are_refused_with_the_one_that_is_taken(client, encoding):
    reply = await client.post("/tokenize", content=b"x", headers={**JSON, "content-encoding": encoding})
    assert (error_of(reply)[0], reply.headers["accept-encoding"]) == (415, "gzip")


# ---- names ----

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
REGEX = {"structured_outputs": {"regex": "("}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}
NAMES = [
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"response_format": SCHEMA}, "response_format.json_schema.schema"),
    (CHAT, {"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema"),
    (CHAT, {"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
    (CHAT, REGEX, "structured_outputs.regex"),
    (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"input": "a", **REGEX}, "structured_outputs.regex"),
    ("/v1/completions", REGEX, "structured_outputs.regex"),
    ("/v1/completions", {"echo": True, "logprobs": 20, "prompt": "a" * 4000}, "logprobs"),
]


@pytest.mark.parametrize(("path", "fields", "param"), NAMES)
@in_module_loop
async def test_an_error_names_the_field_that_was_sent(client, path, fields, param):
    error = (await post(client, path, **fields)).json()["error"]
    assert error["param"] == param
    assert param in error["message"]


@in_module_loop
async def test_an_error_about_the_id_names_where_it_was_sent(client):
    for sent, param in (({"headers": {"x-request-id": "a/b"}}, "x-request-id"), ({"request_id": "a/b"}, "request_id")):
        headers = sent.pop("headers", {})
        reply = await client.post("/v1/completions", json={"prompt": "a", **sent}, headers=headers)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


# ---- other servers' paths, fields and nulls ----


@in_module_loop
async def test_a_probe_may_be_a_post(client):
    assert (await client.post("/ping")).status_code == (await client.get("/ping")).status_code == 503  # without nodes


def test_one_path_for_chats_and_completions(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            for fields, kind in (({"messages": [HI]}, "chat.completion"), ({"prompt": "hello"}, "text_completion")):
                call = asyncio.create_task(client.post("/invocations", json={"max_tokens": 5, **fields}))
                await answer_in_steps(c)
                assert (await call).json()["object"] == kind
            reply = await client.post("/invocations", json={"messages": [HI], "max_completion_tokens": 0})
            assert reply.json()["error"]["param"] == "max_completion_tokens"

    run(scenario())


@pytest.mark.parametrize(("side", "kept"), [(None, b"lo"), ("left", b"lo"), ("right", b"he")])
def test_a_prompt_is_cut_at_the_side_that_is_named(tmp_path, side, kept):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, prompt="hello", truncate_prompt_tokens=2, truncation_side=side, max_tokens=1)
            attempt, job = await begin(c)
            assert bytes(job.token_ids) == kept
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord("x"), LENGTH)))
            await c.nodes["d0"].answer_cancel(attempt)
            assert (await call).status_code == 200
            error = (await post(client, truncation_side="middle")).json()["error"]
            assert error["message"] == "truncation_side must be 'left' or 'right', not \"middle\""

    run(scenario())


def test_a_chat_may_begin_with_the_message_that_it_goes_on_with(tmp_path):
    begun = {"role": "assistant", "content": "It is "}
    in_parts = {**begun, "content": [{"type": "text", "text": text} for text in ("It", "is ")]}
    fields = {"extra_body": {"echo": True, "add_generation_prompt": False, "continue_final_message": True}}

    async def scenario():
        async with openai_cluster(tmp_path) as (c, client):
            for messages, echoed in (([HI, begun], "It is "), ([HI, in_parts], "It\nis "), ([HI], "")):
                more = fields if echoed else {"extra_body": {"echo": True}}

                async def whole(messages=messages, more=more):
                    return await client.chat.completions.create(model="m", messages=messages, **more)

                asking = asyncio.create_task(whole())
                await answer(c, "warm.")
                assert (await asking).choices[0].message.content == f"{echoed}warm."

                async def streamed(messages=messages, more=more):
                    async with client.chat.completions.stream(model="m", messages=messages, **more) as stream:
                        return await stream.get_final_completion()

                asking = asyncio.create_task(streamed())
                await answer(c, "warm.")
                assert (await asking).choices[0].message.content == f"{echoed}warm."

    run(scenario())


def test_what_vllm_has_as_null_is_there(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, CHAT, max_tokens=2)
            attempt, _ = await begin(c)
            await transfer(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            reply = (await call).json()
            nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
            assert reply["choices"][0]["message"] == {"role": "assistant", "content": "ab", **nulls}
            assert (reply["service_tier"], reply["system_fingerprint"], reply["kv_transfer_params"]) == (None,) * 3
            assert (await client.post("/tokenize", json={"prompt": "a"})).json()["token_strs"] is None

    run(scenario())


def test_what_calls_ask_for_is_counted(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, n=2, max_tokens=7)
            attempts = [(await begin(c))[0] for _ in range(2)]
            for attempt in attempts:
                await transfer(c, attempt, "a")
                await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            await call
            text = (await client.get("/metrics")).text
            for name, value in (("n", 2), ("max_tokens", 7)):
                for prefix in ("splitserve_", "vllm:"):
                    lines = [
                        line for line in text.splitlines() if line.startswith(f"{prefix}request_params_{name}_sum")
                    ]
                    assert [float(line.split()[-1]) for line in lines] == [value]

    run(scenario())
