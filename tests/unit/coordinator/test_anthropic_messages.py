"""/v1/messages as Anthropic's own client has it, with nodes that say what the model writes."""

import asyncio
import contextlib
import json
from itertools import groupby

import pytest

from coordinator.api.http.anthropic_messages_models import MessagesRequest
from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, run
from tests.unit.coordinator.http_kit import (
    BOTH,
    HI,
    KEY,
    PARIS,
    WEATHER,
    answer,
    fail_after_a_token,
    plain_client,
    template_cluster,
    url_of,
    weather_call,
)
from tests.unit.coordinator.later import anthropic

pytestmark = pytest.mark.usefixtures("programs_here")

FUNCTION = WEATHER["function"]
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": FUNCTION["parameters"]}
CALLED = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
SAME = {"model": "m", "max_tokens": 500}


@contextlib.asynccontextmanager
async def anthropic_cluster(folder, key="none", **settings):
    """Whatever the client sends has to be known."""
    options = {"api_key": key, "timeout": DEADLINE_S, "max_retries": 0}
    async with template_cluster(folder, **{"strict_fields": True, **settings}) as c, anthropic.AsyncAnthropic(
        base_url=url_of(c), http_client=anthropic.DefaultAsyncHttpxClient(verify=False), **options
    ) as client:  # fmt: skip
        yield c, client


async def asked(c, client, text, finish_reason=events.STOP, **fields):
    """A whole message, and the prompt."""
    asking = asyncio.create_task(client.messages.create(**{**SAME, "messages": [HI], **fields}))
    prompt = await answer(c, text, finish_reason)
    return await asking, prompt


def told(block):
    """What a block says, without what it is called by."""
    return block.model_dump(include={"type", "text", "thinking", "name", "input"}, exclude_none=True)


BLOCKS = [
    {"type": "thinking", "thinking": "Hm."},
    {"type": "text", "text": "Let me see."},
    {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}},
    {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}},
]


def test_a_whole_message_and_the_conversation_that_goes_on(tmp_path):
    async def scenario():
        async with anthropic_cluster(tmp_path) as (c, client):
            system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
            reply, prompt = await asked(c, client, BOTH, system=system, tools=[TOOL])
            function = {"name": "weather", "description": "Tells it.", "parameters": FUNCTION["parameters"]}
            assert json.dumps({"type": "function", "function": function}) in prompt
            assert "<|system|>Be brief." in prompt
            assert [told(block) for block in reply.content] == BLOCKS
            assert (reply.stop_reason, reply.stop_sequence, reply.model) == ("tool_use", None, "m")
            assert reply.usage.output_tokens == len(BOTH) + 1

            call = reply.content[2].id
            result = {"type": "tool_result", "tool_use_id": call, "content": "no such place", "is_error": True}
            said = {"role": "assistant", "content": [block.model_dump() for block in reply.content]}
            question = {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]}
            messages = [HI, said, question]
            reply, prompt = await asked(c, client, "Cool.", messages=messages, tools=[TOOL])
            assert f"Let me see.{CALLED}{CALLED.replace('Paris', 'Rome')}" in prompt
            assert f"Error: no such place{call}" in prompt
            assert prompt.index("no such place") < prompt.index("Well?")
            assert ([told(block) for block in reply.content], reply.stop_reason) == (
                [{"type": "text", "text": "Cool."}],
                "end_turn",
            )
            counted = await client.messages.count_tokens(model="m", messages=messages, tools=[TOOL])
            assert counted.input_tokens == reply.usage.input_tokens > len("no such place")

    run(scenario())


DOCUMENT = {
    "type": "document",
    "title": "Weather",
    "context": "of today",
    "source": {"type": "text", "media_type": "text/plain", "data": "Rain."},
    "cache_control": {"type": "ephemeral"},
    "citations": {"enabled": False},
}


def test_documents_of_text_and_thoughts_that_nobody_can_read(tmp_path):
    async def scenario():
        async with anthropic_cluster(tmp_path) as (c, client):
            blocks = {
                **DOCUMENT,
                "title": None,
                "source": {"type": "content", "content": [{"type": "text", "text": "x"}]},
            }
            asking = {"role": "user", "content": [DOCUMENT, {"type": "text", "text": "Well?"}, blocks]}
            _, prompt = await asked(c, client, "Rain.", messages=[asking])
            assert prompt == "Weather\nof today\nRain.\nWell?\nof today\nx"
            hidden = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
            call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "a", "content": [DOCUMENT]}
            said = [{**hidden, "content": [*hidden["content"], call]}, {"role": "user", "content": [result]}]
            keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
            _, prompt = await asked(
                c, client, "So.", messages=[HI, *said], tools=[TOOL], extra_body={"context_management": keep}
            )
            assert prompt.endswith("<|tool|>Weather\nof today\nRain.a")

    run(scenario())


def test_the_events_of_a_stream_and_the_helper_for_them(tmp_path):
    block = ["content_block_start", "content_block_delta", "content_block_stop"]

    async def scenario():
        async with anthropic_cluster(tmp_path) as (c, client):
            same = {**SAME, "messages": [HI], "tools": [TOOL]}

            async def listed():
                stream = await client.messages.create(**same, stream=True)
                return [event async for event in stream]

            asking = asyncio.create_task(listed())
            await answer(c, BOTH)
            heard = await asking
            kinds = [kind for kind, _ in groupby(event.type for event in heard)]
            assert kinds == ["message_start", *block * 4, "message_delta", "message_stop"]
            start, end = heard[0].message, heard[-2]
            assert (start.content, start.usage.input_tokens) == ([], end.usage.input_tokens)
            assert end.usage.output_tokens == len(BOTH) + 1

            async def helped():
                async with client.messages.stream(**same) as stream:
                    return await stream.get_final_message()

            asking = asyncio.create_task(helped())
            await answer(c, BOTH)
            final = await asking
            assert [told(block) for block in final.content] == BLOCKS
            assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", len(BOTH) + 1)

    run(scenario())


def test_how_an_answer_ends_and_how_it_may_begin(tmp_path):
    async def scenario():
        async with anthropic_cluster(tmp_path) as (c, client):
            reply, _ = await asked(c, client, "It is", events.LENGTH)
            assert (reply.stop_reason, reply.content[0].text) == ("max_tokens", "It is!")
            begun = {"role": "assistant", "content": "It is "}
            reply, prompt = await asked(c, client, "warm.", messages=[HI, begun])
            assert prompt.endswith("It is ")
            assert reply.content[0].text == "warm."
            choice = {"type": "tool", "name": "weather"}
            reply, _ = await asked(c, client, weather_call(PARIS), tools=[TOOL], tool_choice=choice)
            assert (reply.stop_reason, [told(block) for block in reply.content]) == ("tool_use", BLOCKS[2:3])
            cut = weather_call(PARIS).partition(PARIS)[0] + PARIS[:-2]
            reply, _ = await asked(c, client, cut, events.LENGTH, tools=[TOOL], tool_choice=choice)
            assert (reply.stop_reason, reply.content[0].input) == ("max_tokens", {"arguments": f"{PARIS[:-2]}!"})
            reply, _ = await asked(c, client, "It is xy", stop_sequences=["x"])
            assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", "x", "It is ")

    run(scenario())


def test_thinking_is_a_variable_of_the_template(tmp_path):
    async def scenario():
        template = "{{ enable_thinking }}{{ reasoning_effort }}{{ messages[0].content }}{# </think> #}"
        async with anthropic_cluster(tmp_path, template=template) as (c, client):
            for kind, shown in (("disabled", "False"), ("adaptive", "True")):
                fields = {"thinking": {"type": kind}, "output_config": {"effort": "low"}}
                _, prompt = await asked(c, client, "Yes.", extra_body=fields)
                assert prompt == f"{shown}lowhi"

    run(scenario())


def test_a_stream_that_fails_says_so(tmp_path):
    async def scenario():
        async with anthropic_cluster(tmp_path) as (c, client):

            async def listed():
                stream = await client.messages.create(**SAME, messages=[HI], stream=True)
                return [event async for event in stream]

            asking = asyncio.create_task(listed())
            await fail_after_a_token(c)
            with pytest.raises(anthropic.APIStatusError) as caught:
                await asking
            told = {"type": "api_error", "message": "the engine of the decode node failed: what happened"}
            assert caught.value.body == {"type": "error", "error": told}

    run(scenario())


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
PDF = {**DOCUMENT, "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
CITED = {**DOCUMENT, "citations": {"enabled": True}}
CLEARS = {"edits": [{"type": "clear_tool_uses_20250919"}]}
NO_SCHEMA = {"type": "json_schema", "schema": 5}
REFUSED = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 'messages[0].content[0].type "image" is not supported'),
    (
        {"messages": [{"role": "user", "content": [PDF]}]},
        'messages[0].content[0].source.type "base64" is not supported',
    ),
    (
        {"messages": [{"role": "user", "content": [CITED]}]},
        "messages[0].content[0].citations.enabled (true) is not supported",
    ),
    ({"extra_body": {"context_management": CLEARS}}, "context_management (an object) is not supported"),
    (
        {"messages": [{"role": "me", "content": "a"}]},
        "messages[0].role \"me\" is not supported: it must be 'user'",
    ),
    ({"messages": []}, "messages has 0 entries, at least 1 is needed"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content has 0 entries, at least 1 is needed"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
    ({"max_tokens": 5000}, "prompt is too long: max_tokens (5000) and the prompt"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences has 17 entries, the limit is 16"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type must be 'custom', not \"bash_20250124\""),
    ({"tools": [{**TOOL, "input_schema": []}]}, "tools[0].input_schema must be an object, not a list"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, 'tool_choice is "f", which is none of the tools'),
    (
        {"tools": [], "output_config": {"format": {"type": "json_schema", "schema": 5}}},
        "output_config.format.schema must",
    ),
    ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers (a list) is not supported"),
    ({"extra_body": {"odd": 1}}, "unknown fields: odd"),
]


def test_what_cannot_be_is_refused_in_the_form_of_the_api(tmp_path):
    async def scenario():
        async with anthropic_cluster(tmp_path, KEY, api_key=KEY) as (_, client):
            for fields, message in REFUSED:
                with pytest.raises(anthropic.BadRequestError) as caught:
                    await client.messages.create(**{**SAME, "messages": [HI], "tools": [TOOL], **fields})
                assert caught.value.body["type"] == "error"
                error = caught.value.body["error"]
                assert error["type"] == "invalid_request_error"
                assert error["message"].startswith(message)
            with pytest.raises(anthropic.NotFoundError) as caught:
                await client.messages.count_tokens(model="other", messages=[HI])
            assert caught.value.body["error"]["type"] == "not_found_error"
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.with_options(api_key="wrong").messages.create(**SAME, messages=[HI])
            assert caught.value.body["error"]["type"] == "authentication_error"
            async with plain_client(base_url=str(client.base_url)) as plain:
                headers = {"x-api-key": KEY}
                for reply, kind in (
                    (await plain.get("/v1/messages", headers=headers), "invalid_request_error"),
                    (await plain.get("/v1/messages/nothing", headers=headers), "not_found_error"),
                    (await plain.post("/v1/messages", headers=headers), "invalid_request_error"),
                ):
                    assert reply.json()["error"]["type"] == kind

    run(scenario())


def test_every_field_of_anthropic_is_listed():
    """Those of the beta client too, which has `betas` for a header."""
    params = anthropic.types.message_create_params.MessageCreateParamsBase.__annotations__
    beta = anthropic.types.beta.message_create_params.MessageCreateParamsBase.__annotations__
    assert {*params, *beta} - {"betas"} <= MessagesRequest.model_fields.keys()


@pytest.mark.parametrize(
    "value",
    ["1e400", "-1e999", "NaN", "Infinity", "-Infinity", '"\\ud800"', "9" * 5000, "[" * 900 + "]" * 900, '{"a": [NaN]}'],
)
def test_arguments_that_no_json_has_are_told_as_they_are_written(tmp_path, value):
    arguments = f'{{"city": {value}}}'

    async def scenario():
        async with anthropic_cluster(tmp_path) as (c, client):
            reply, _ = await asked(c, client, weather_call(arguments), tools=[TOOL])
            assert (reply.stop_reason, told(reply.content[0])["input"]) == ("tool_use", {"arguments": arguments})
            said = {"role": "assistant", "content": [block.model_dump() for block in reply.content]}
            if len(arguments) < 100:  # which the context has room for
                reply, prompt = await asked(c, client, "Yes.", messages=[HI, said, HI], tools=[TOOL])
                assert (reply.content[0].text, json.dumps({"arguments": arguments}) in prompt) == ("Yes.", True)

    run(scenario())
