"""OpenAI's own client for Python. tests/scripted_model.py has what the model says."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel, Field

MODEL = "scripted"
ASK = [{"role": "user", "content": "How is the weather?"}]
ENDLESS = {"max_tokens": 60_000, "extra_body": {"ignore_eos": True}, "stream": True}


class Weather(BaseModel):
    """What a place has."""

    city: str = Field(min_length=1, max_length=20)
    degrees: int = Field(ge=-50, le=50)


WEATHER = openai.pydantic_function_tool(Weather, name="weather")
PARIS = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARIS}}


@pytest.fixture
def client():
    with openai.OpenAI(max_retries=0) as client:
        yield client


def test_a_model_is_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_stream_is_the_whole_answer(client):
    with client.chat.completions.stream(model=MODEL, messages=ASK, stream_options={"include_usage": True}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        streamed = stream.get_final_completion()
    whole = client.chat.completions.create(model=MODEL, messages=ASK)
    assert "".join(deltas) == "Hello there."
    assert streamed.choices[0].message.content == whole.choices[0].message.content == "Hello there."
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    assert streamed.usage.total_tokens == whole.usage.total_tokens


def test_the_completion_of_a_text(client):
    whole = client.completions.create(model=MODEL, prompt="ab", max_tokens=8, logprobs=2)
    assert whole.choices[0].text == "cdefghab"
    assert whole.choices[0].logprobs.tokens == list("cdefghab")
    events = client.completions.create(model=MODEL, prompt=["ab", "c"], max_tokens=4, n=2, stream=True)
    texts = {}
    for event in events:
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: "cdef", 1: "cdef", 2: "defg", 3: "defg"}


def test_several_answers_and_their_logprobs(client):
    reply = client.chat.completions.create(model=MODEL, messages=ASK, n=3, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in reply.choices] == ["Hello there."] * 3
    for choice in reply.choices:
        [hello, there, *_] = choice.logprobs.content
        assert [hello.token, there.token] == ["Hello", " there."]
        assert hello.logprob == pytest.approx(0, abs=1e-3)
        assert len(hello.top_logprobs) == 2


def test_a_tool_is_called_and_its_result_told(client):
    with client.chat.completions.stream(model=MODEL, messages=ASK, tools=[TOOL]) as stream:
        parts = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    assert "".join(parts) == call.function.arguments
    told = [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    reply = client.chat.completions.create(model=MODEL, messages=[*ASK, *told], tools=[TOOL])
    assert reply.choices[0].message.content == "The sun shines."


def test_a_tool_that_has_to_be_called_is_parsed(client):
    reply = client.chat.completions.parse(
        model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    [call] = reply.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def test_an_answer_is_parsed(client):
    reply = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather)
    assert isinstance(reply.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(model=MODEL, messages=ASK, response_format=Weather) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


def test_responses(client):
    asked = {"model": MODEL, "input": "How is the weather?"}
    assert client.responses.create(**asked).output_text == "Hello there."
    assert isinstance(client.responses.parse(**asked, text_format=Weather).output_parsed, Weather)
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hello there."
    tools = [{"type": "function", "name": "weather", "strict": True, "parameters": PARIS}]
    [call] = client.responses.create(**asked, tools=tools).output
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    told = [*ASK, call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert client.responses.create(model=MODEL, input=told, tools=tools).output_text == "The sun shines."


def test_what_is_wrong_is_told_by_name(client):
    with pytest.raises(openai.BadRequestError, match="temperature must be within") as error:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="unheard-of", messages=ASK)


async def test_an_answer_that_nobody_waits_for():
    async with openai.AsyncOpenAI(max_retries=0) as client:
        events = await client.chat.completions.create(model=MODEL, messages=ASK, **ENDLESS)
        await anext(aiter(events))
        await events.close()
        async with asyncio.timeout(300):
            with pytest.raises(openai.APITimeoutError):
                await client.completions.create(model=MODEL, prompt="a", timeout=0.3, **ENDLESS | {"stream": False})
