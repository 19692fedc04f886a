"""Anthropic's own client. tests/scripted_model.py has what the model says."""

import anthropic
import pytest

ASK = [{"role": "user", "content": "How is the weather?"}]
PARIS = {"type": "object", "properties": {"city": {"type": "string", "minLength": 1}}, "required": ["city"]}
FIELDS = {"model": "scripted", "max_tokens": 300}
TOOLS = [{"name": "weather", "description": "Tells the weather of a city.", "input_schema": PARIS}]


@pytest.fixture
def client():
    with anthropic.Anthropic(max_retries=0) as client:
        yield client


def test_a_stream_is_the_whole_answer(client):
    with client.messages.stream(messages=ASK, **FIELDS) as stream:
        assert "".join(stream.text_stream) == "Hello there."
        streamed = stream.get_final_message()
    whole = client.messages.create(messages=ASK, **FIELDS)
    assert [block.text for block in whole.content] == ["Hello there."]
    assert streamed.stop_reason == whole.stop_reason == "end_turn"
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_a_tool_is_called_and_its_result_told(client):
    message = client.messages.create(messages=ASK, tools=TOOLS, **FIELDS)
    assert message.stop_reason == "tool_use"
    [call] = message.content
    assert (call.name, call.input) == ("weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    told = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    reply = client.messages.create(messages=[*ASK, *told], tools=TOOLS, **FIELDS)
    assert reply.content[0].text == "The sun shines."


def test_an_answer_that_nobody_waits_for(client):
    with client.messages.stream(
        messages=ASK, **FIELDS | {"max_tokens": 60_000}, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream.text_stream))
