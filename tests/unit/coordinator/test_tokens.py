"""Token ids in and out over HTTP, and calls rendered as such requests."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.http.request_models import ChatRequest, CompletionRequest, TokensRequest
from coordinator.api.http.requests import parse_chat, parse_completion
from coordinator.api.http.tokens import check_renders, parse_tokens, tokens_call
from coordinator.api.validation import Limits, plan_request
from coordinator.text.answer_format import AnswerFormat
from protos.inference_pb2 import SamplingParams
from tests import fleet_events as events
from tests.scripted_nodes import begin, begin_to_write, run, step, transfer
from tests.tiny_models import EOS
from tests.unit.coordinator.http_kit import HI, LENGTH, STOP, WEATHER, error_of, http_cluster

pytestmark = pytest.mark.usefixtures("programs_here")
PATH = "/inference/v1/generate"
PROMPT = [104, 105]  # hi


def post(client, *, sampling=(), **fields):
    """Begin a call with token ids."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5, **dict(sampling)}, **fields}
    return asyncio.create_task(client.post(PATH, json=body, headers={"x-request-id": "r"}))


def test_a_whole_output_is_token_ids(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, sampling={"logprobs": 1, "seed": 7}, return_token_ids=True)
            attempt, job = await begin(c)
            assert (list(job.token_ids), job.sampling_params.max_tokens, job.sampling_params.seed) == (PROMPT, 5, 7)
            await transfer(c, attempt, "a", num_cached_tokens=1, logprob=-0.5)
            last = events.sampled(attempt, 1, EOS, STOP, logprob=-1.5)
            last.top.add(token_id=98, logprob=-0.25)
            await c.nodes["d0"].send(events.step_tokens(last))
            reply = await call
            told = reply.json()
            assert told.pop("created") > 1_700_000_000
            content = [
                {"token_id": 97, "logprob": -0.5, "rank": None},
                {"token_id": EOS, "logprob": -1.5, "rank": None},
            ]
            tops = [[content[0]], [content[1], {"token_id": 98, "logprob": -0.25, "rank": 1}]]
            scored = [{**each, "top_logprobs": top} for each, top in zip(content, tops, strict=True)]
            end = {"finish_reason": "stop", "stop_reason": None}
            usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
            assert told == {
                "request_id": "r",
                "output_mode": "tokens",
                "model": "m",
                "choices": [{"index": 0, "logprobs": {"content": scored}, "token_ids": [97, EOS], **end}],
                "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 1}},
                "prompt_token_ids": PROMPT,
                "prompt_logprobs": None,
            }

    run(scenario())


def test_the_events_of_a_stream_add_up_to_the_whole_output(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, stream=True, return_token_ids=True, stream_options={"include_usage": True})
            attempt = await begin_to_write(c, "a")
            await step(c.nodes["d0"], attempt, 1, "bc", LENGTH)
            reply = await call
            lines = reply.text.split("\n\n")
            assert (reply.headers["content-type"], lines[-2:]) == (
                "text/event-stream; charset=utf-8",
                ["data: [DONE]", ""],
            )
            told = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            assert [each.get("prompt_token_ids") for each in told] == [PROMPT, *[None] * (len(told) - 1)]
            assert {each["request_id"] for each in told} == {"r"}
            choices = [choice for each in told for choice in each["choices"]]
            assert [token for choice in choices for token in choice["token_ids"]] == [97, 98, 99]
            assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), "length"]
            assert (told[-1]["choices"], told[-1]["usage"]["completion_tokens"]) == ([], 3)

    run(scenario())


def test_an_output_with_text_is_that_of_a_completion(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, sampling={"stop": "b"}, output_mode="text")
            attempt = await begin_to_write(c, "a")
            await step(c.nodes["d0"], attempt, 1, "bc")
            [choice] = (await call).json()["choices"]
            assert (choice["text"], choice["token_ids"]) == ("a", [97, 98])
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "b")

    run(scenario())


REFUSALS = [
    ({"token_ids": []}, "token_ids has 0 entries, at least 1 is needed"),
    ({"token_ids": [2**31]}, "token_ids has token id 2147483648; the vocabulary ends at"),
    ({"sampling_params": {"temperature": 101}}, "sampling_params.temperature must be at most 100, not 101"),
    ({"sampling_params": {"min_tokens": -1}}, "sampling_params.min_tokens must be within"),
    ({"sampling_params": {"max_tokens": 10**6}}, "sampling_params.max_tokens"),
    ({"sampling_params": {"structured_outputs": {}}}, "sampling_params.structured_outputs must have one of"),
    (
        {"sampling_params": {"structured_outputs": {"regex": "("}}},
        "sampling_params.structured_outputs.regex cannot be enforced",
    ),
    ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params.prompt_logprobs is not supported"),
    ({"stream_options": {}}, "stream_options needs stream: true"),
    ({"features": {"mm_hashes": {}}}, "features (an object) is not supported"),
    ({"sampling_params": None}, "sampling_params must be an object, not null"),
]


def test_a_fault_is_named_as_the_client_has_sent_it(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (_, client):
            for fields, message in REFUSALS:
                reply = await client.post(PATH, json={"token_ids": PROMPT, "sampling_params": {}, **fields})
                error = reply.json()["error"]
                assert (reply.status_code, message in error["message"]) == (400, True), (fields, error)
                assert error["param"].startswith(next(iter(fields)).partition(".")[0]) or "prompt_logprobs" in message
            reply = await client.post(PATH, json={"token_ids": PROMPT, "sampling_params": {}, "model": "other"})
            assert error_of(reply)[::2] == (404, "model_not_found")

    run(scenario())


# ---- Rendering ----


def test_a_rendered_chat_is_generated_as_the_chat_itself(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            body = {"messages": [HI], "max_tokens": 3, "temperature": 0.5, "seed": 9, "stop": ["x"], "cache_salt": "s"}
            chat = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            attempt, of_chat = await begin(c)
            await transfer(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            await chat
            told = (await client.post("/v1/chat/completions/render", json=body)).json()
            call = asyncio.create_task(client.post(PATH, json=told))
            attempt, job = await begin(c)
            await transfer(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            reply = await call
            assert (reply.status_code, reply.headers.get("x-splitserve-warning")) == (200, None)
            assert (job.token_ids, job.sampling_params, job.cache_salt) == (
                of_chat.token_ids,
                of_chat.sampling_params,
                of_chat.cache_salt,
            )
            assert (
                told["prompt_text"]
                == (await client.post("/detokenize", json={"tokens": told["token_ids"]})).json()["prompt"]
            )

    run(scenario())


def test_each_api_can_be_rendered_and_no_node_hears_of_it(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (_, client):
            bodies = {
                "/v1/chat/completions": {"messages": [HI]},
                "/v1/messages": {"messages": [HI], "max_tokens": 5},
                "/v1/responses": {"input": "hi"},
            }
            calls = [
                (await client.post(f"{path}/render", json={**body, "temperature": 0.5})).json()
                for path, body in bodies.items()
            ]
            assert len({tuple(call["token_ids"]) for call in calls}) == 1
            assert {call["sampling_params"]["temperature"] for call in calls} == {0.5}
            reply = await client.post("/v1/completions/render", json={"prompt": ["a", "bc"]})
            assert [len(call["token_ids"]) for call in reply.json()] == [1, 2]
            assert [call["request_id"][-2:] for call in reply.json()] == ["-0", "-1"]
            assert "splitserve_requests_total{" not in (await client.get("/metrics")).text

    run(scenario())


def test_a_call_whose_form_would_be_lost_is_not_rendered(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, tool_call_parser="hermes") as (_, client):
            body = {"messages": [HI], "tools": [WEATHER]}
            assert (await client.post("/v1/chat/completions/render", json=body)).status_code == 200
            reply = await client.post("/v1/chat/completions/render", json={**body, "tool_choice": "required"})
            assert error_of(reply)[0] == 400
            assert reply.json()["error"]["message"].startswith("tools cannot be rendered")

    run(scenario())


LIMITS = Limits(("m",), 256, 1000, 20, 1000, 1000, eos_token_ids=(1,))
DEFAULTS = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.0, repetition_penalty=1.1)
SAMPLING = st.fixed_dictionaries(
    {"seed": st.integers(-(2**63), 2**63 - 1)},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.1, 1),
        "top_k": st.integers(-1, 300),
        "min_p": st.floats(0, 1),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2),
        "max_tokens": st.integers(5, 50),
        "min_tokens": st.integers(1, 5),
        "n": st.integers(1, 3),
        "stop": st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
        "stop_token_ids": st.lists(st.integers(10, 255), max_size=3),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(0, 255).map(str), st.sampled_from([-1.0, 0.5, 3.0]), max_size=3),
        "allowed_token_ids": st.lists(st.integers(2, 9), min_size=1, max_size=3),
        "cache_salt": st.text("ab", min_size=1),
        "priority": st.integers(-100, 100),
        "stream": st.booleans(),
    },
)


@given(fields=SAMPLING, scores=st.none() | st.integers(0, 3))
def test_a_rendered_completion_asks_for_the_same(fields, scores):
    body = {"prompt": PROMPT, **fields} | ({} if scores is None else {"logprobs": scores})
    parsed = parse_completion(CompletionRequest.read(body), "r")
    [asked] = parsed.requests
    if "priority" in fields:
        asked.priority = fields["priority"]
    defaults = SamplingParams()
    defaults.CopyFrom(DEFAULTS)
    defaults.max_tokens = 16
    plan = plan_request(asked, PROMPT, LIMITS, defaults)
    told = TokensRequest.read(tokens_call(asked, plan, parsed, "hi"))
    assert told.unknown_fields() == []
    again = parse_tokens(told, told.request_id)
    [asked_again] = again.requests
    assert plan_request(asked_again, list(asked_again.tokenized.input_ids), LIMITS, SamplingParams()) == plan
    assert (again.stream, asked_again.cache_salt) == (parsed.stream, asked.cache_salt)
    assert told.priority == fields.get("priority")


FORMATS = [AnswerFormat(), AnswerFormat(thinks=True), AnswerFormat("hermes"), AnswerFormat("harmony", thinks=True)]
FORMS = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}},
    {"structured_outputs": {"regex": "[ab]+"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"json": {"type": "integer"}, "disable_any_whitespace": True}},
    {"structured_outputs": {"grammar": 'start: "a"', "whitespace_pattern": " ?"}},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("answer_format", FORMATS)
def test_a_form_stays_the_same_with_thoughts_before_it_where_the_model_thinks(form, answer_format):
    parsed = parse_chat(ChatRequest.read({"messages": [HI], **form}), "r", answer_format)
    check_renders(parsed)
    [asked] = parsed.requests
    plan = plan_request(asked, PROMPT, LIMITS, DEFAULTS)
    again = parse_tokens(TokensRequest.read(tokens_call(asked, plan, parsed, "hi")), "r", answer_format)
    kind = asked.sampling_params.WhichOneof("constraint")
    asked_again = again.requests[0].sampling_params
    assert asked_again.WhichOneof("constraint") == kind
    for name in (kind, "disable_any_whitespace", "whitespace_pattern"):
        assert getattr(asked_again, name) == getattr(asked.sampling_params, name)
    assert again.terms.leeway == parsed.terms.leeway
