"""/v1/responses as openai's own client has it, with nodes that say what the model writes."""

import asyncio
import json
from itertools import groupby
from typing import get_args

import pytest
from pydantic import BaseModel

from tests import fleet_events as events
from tests.scripted_nodes import run
from tests.unit.coordinator.http_kit import (
    BOTH,
    PARIS,
    ROME,
    WEATHER,
    answer,
    fail_after_a_token,
    openai_cluster,
    weather_call,
)
from tests.unit.coordinator.later import openai

pytestmark = pytest.mark.usefixtures("programs_here")

TOOL = {"type": "function", **WEATHER["function"]}
THOUGHTS = len("<think>\nHm.\n</think>")
CALLED = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def strict_cluster(folder, **settings):
    """Serve; whatever the client sends has to be known."""
    return openai_cluster(folder, **{"strict_fields": True, **settings})


async def asked(c, client, text, finish_reason=events.STOP, *, create="create", **fields):
    """A whole response, and the prompt."""
    asking = asyncio.create_task(getattr(client.responses, create)(model="m", **{"input": "hi", **fields}))
    prompt = await answer(c, text, finish_reason)
    return await asking, prompt


def kinds_of(told):
    """The names of events, those that repeat once."""
    return [kind.removeprefix("response.") for kind, _ in groupby(event.type for event in told)]


def test_a_whole_response_and_the_conversation_that_goes_on(tmp_path):
    async def scenario():
        async with strict_cluster(tmp_path) as (c, client):
            reply, prompt = await asked(c, client, BOTH, instructions="Be brief.", tools=[TOOL], metadata={"a": "b"})
            assert json.dumps(WEATHER) in prompt
            assert "<|system|>Be brief." in prompt
            assert (reply.status, reply.output_text, reply.metadata) == ("completed", "Let me see.", {"a": "b"})
            thoughts, message, first, second = reply.output
            assert [part.text for part in thoughts.content] == ["Hm."]
            assert (message.role, message.status) == ("assistant", "completed")
            assert [(call.name, call.arguments) for call in (first, second)] == [("weather", PARIS), ("weather", ROME)]
            assert first.call_id != second.call_id
            usage = reply.usage
            assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (len(BOTH) + 1, THOUGHTS)
            assert usage.total_tokens == usage.input_tokens + usage.output_tokens

            results = [
                {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
                for call in (first, second)
            ]
            said = [{"role": "developer", "content": "Hm?"}, {"role": "user", "content": "hi"}]
            told = [*said, *(item.model_dump(by_alias=True) for item in reply.output), *results]
            reply, prompt = await asked(c, client, "Cool.", input=told, instructions="Be brief.", tools=[TOOL])
            assert "<|system|>Be brief.\n\nHm?" in prompt
            assert f"Let me see.{CALLED}{CALLED.replace('Paris', 'Rome')}" in prompt
            assert f"12 degrees{first.call_id}" in prompt
            [message] = reply.output
            assert (message.content[0].text, reply.usage.output_tokens_details.reasoning_tokens) == ("Cool.", 0)

    run(scenario())


def test_the_events_of_a_stream_and_openais_helper_for_them(tmp_path):
    text_events = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done", "content_part.done"]
    call_events = ["output_item.added", "{0}.delta", "{0}.done", "output_item.done"]

    def expected(name, kinds):
        return [kind.format(name) for kind in kinds]

    async def scenario():
        async with strict_cluster(tmp_path) as (c, client):

            async def listed():
                stream = await client.responses.create(model="m", input="hi", tools=[TOOL], stream=True)
                return [event async for event in stream]

            asking = asyncio.create_task(listed())
            await answer(c, BOTH)
            told = await asking
            assert [event.sequence_number for event in told] == list(range(len(told)))
            assert kinds_of(told) == [
                "created",
                "in_progress",
                *expected("reasoning_text", [*text_events, "output_item.done"]),
                *expected("output_text", [*text_events, "output_item.done"]),
                *expected("function_call_arguments", call_events * 2),
                "completed",
            ]
            reply = told[-1].response
            assert reply.output == [event.item for event in told if event.type == "response.output_item.done"]
            assert reply.usage.output_tokens_details.reasoning_tokens == THOUGHTS

            async def helped():
                async with client.responses.stream(model="m", input="hi", tools=[TOOL]) as stream:
                    return await stream.get_final_response()

            asking = asyncio.create_task(helped())
            await answer(c, BOTH)
            final = await asking
            assert final.output_text == "Let me see."
            assert [item.parsed_arguments for item in final.output[2:]] == [{"city": "Paris"}, {"city": "Rome"}]

    run(scenario())


def test_an_answer_may_be_made_to_be_json_and_may_be_cut_short(tmp_path):
    class Place(BaseModel):
        city: str

    async def scenario():
        async with strict_cluster(tmp_path) as (c, client):
            reply, _ = await asked(c, client, PARIS, create="parse", text_format=Place)
            assert reply.output_parsed == Place(city="Paris")
            reply, _ = await asked(c, client, "Let me", events.LENGTH, max_output_tokens=100)
            assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert (reply.output[0].status, reply.output_text, reply.max_output_tokens) == (
                "incomplete",
                "Let me!",
                100,
            )
            named = {"type": "function", "name": "weather"}
            reply, _ = await asked(c, client, weather_call(ROME), tools=[TOOL], tool_choice=named)
            assert [(item.type, item.arguments) for item in reply.output] == [("function_call", ROME)]

    run(scenario())


def test_fields_of_vllm_have_their_effect(tmp_path):
    async def scenario():
        async with strict_cluster(tmp_path) as (c, client):
            reply, _ = await asked(c, client, BOTH, tools=[TOOL], extra_body={"include_reasoning": False})
            assert [item.type for item in reply.output] == ["message", "function_call", "function_call"]
            nothing = {
                "previous_input_messages": [],
                "enable_response_messages": False,
                "vllm_xargs": {},
                "session_id": "s",
            }
            reply, _ = await asked(c, client, "Yes.", extra_body=nothing)
            assert reply.output_text == "Yes."
            stopping = {"stop": ["x"], "include_stop_str_in_output": True}
            reply, _ = await asked(c, client, "It is xy", extra_body=stopping)
            assert reply.output_text == "It is x"

    run(scenario())


def test_logprobs_are_those_of_the_text(tmp_path):
    fields = {"include": LOGPROBS, "top_logprobs": 1, "tools": [TOOL]}

    async def scenario():
        async with strict_cluster(tmp_path) as (c, client):
            asking = asyncio.create_task(client.responses.create(model="m", input="hi", **fields))
            await answer(c, BOTH, logprob=-0.5)
            reply = await asking
            [message] = [item for item in reply.output if item.type == "message"]
            told = message.content[0].logprobs
            assert "".join(each.token for each in told) == "Let me see."
            assert (reply.top_logprobs, {each.logprob for each in told}) == (1, {-0.5})

            async def helped():
                async with client.responses.stream(model="m", input="hi", **fields) as stream:
                    events = [event async for event in stream]
                    return events, await stream.get_final_response()

            asking = asyncio.create_task(helped())
            await answer(c, BOTH, logprob=-0.5)
            told_of, final = await asking
            [message] = [item for item in final.output if item.type == "message"]
            assert message.content[0].logprobs == told
            deltas = [event for event in told_of if event.type == "response.output_text.delta"]
            assert [each.token for event in deltas for each in event.logprobs] == [each.token for each in told]

    run(scenario())


def test_a_stream_that_fails_says_so(tmp_path):
    async def scenario():
        async with strict_cluster(tmp_path) as (c, client):

            async def listed():
                stream = await client.responses.create(model="m", input="hi", stream=True)
                return [event async for event in stream]

            asking = asyncio.create_task(listed())
            await fail_after_a_token(c)
            *_, last = await asking
            assert (last.type, last.response.status) == ("response.failed", "failed")
            told = last.response.error
            assert (told.code, told.message) == ("server_error", "the engine of the decode node failed: what happened")

    run(scenario())


LOGPROBS = ["message.output_text.logprobs"]
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": 3}
BY_JSON = {"tools": [], "text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}
REFUSED = [
    ({"store": True}, "store", "(true) is not supported"),
    ({"background": True}, "background", "(true) is not supported"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", '("resp_1") is not supported'),
    ({"top_logprobs": 2}, "top_logprobs", "needs message.output_text.logprobs in include"),
    ({"include": ["message.output_text.logprob"]}, "include", '("message.output_text.logprob") is not supported'),
    ({"include": [""]}, "include", '("") is not supported'),
    ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs", "must be within [0, 20], not 21"),
    ({"extra_body": {"vllm_xargs": {"a": 1}}}, "vllm_xargs", "(an object) is not supported"),
    ({"extra_body": {"previous_input_messages": [{}]}}, "previous_input_messages", "(a list) is not supported"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be 'function', not \"web_search\""),
    ({"input": [IMAGE]}, "input[0].content[0].type", "\"input_image\" is not supported: it must be 'text'"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", '"item_reference" is not supported'),
    (
        {"input": [{"role": "me", "content": ""}]},
        "input[0].role",
        "must be 'user', 'assistant', 'system' or 'developer', not \"me\"",
    ),
    ({"extra_body": {"input": [IMAGE] * 1025}}, "input", "has 1025 entries, the limit is 1024"),
    (
        {"input": [{"role": "user", "content": "a"}, CALL]},
        "input[1].arguments",
        "must be a string of valid Unicode, or an object, not 3",
    ),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "must match ^"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", 'is "f", which is none of the tools'),
    ({"text": {"verbosity": "low"}}, "text.verbosity", '("low") is not supported'),
    (BY_JSON, "text.format.schema", ""),
    ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1, not 0"),
    ({"temperature": 101}, "temperature", "must be at most 100, not 101"),
]


def test_all_that_openai_can_include_may_be_asked_for(tmp_path):
    includable = list(get_args(openai.types.responses.ResponseIncludable))
    assert "reasoning.encrypted_content" in includable

    async def scenario():
        async with strict_cluster(tmp_path) as (c, client):
            response, _ = await asked(c, client, "Hm.", include=includable)
            assert response.output_text == "Hm."

    run(scenario())


def test_what_cannot_be_is_refused_in_the_words_of_the_api(tmp_path):
    async def scenario():
        async with strict_cluster(tmp_path) as (_, client):
            for fields, param, problem in REFUSED:
                body = {"input": "hi", "tools": [TOOL], **fields}
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.responses.create(model="m", **body)
                assert caught.value.param == param
                assert caught.value.body["message"].startswith(f"{param} {problem}")

    run(scenario())
