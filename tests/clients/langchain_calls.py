"""langchain-openai. tests/scripted_model.py has what the model says."""

from typing import Annotated

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

ASK = [HumanMessage("How is the weather?")]


class Weather(BaseModel):
    """What a place has."""

    city: str = Field(min_length=1, max_length=20)
    degrees: int = Field(ge=-50, le=50)


@tool
def weather(city: Annotated[str, "Where."]) -> str:
    """Tells the weather of a city."""
    return "sunny" if city == "Paris" else "unknown"


def model(**options):
    return ChatOpenAI(model="scripted", max_retries=0, **options)


def test_a_stream_is_the_whole_answer():
    whole = model().invoke(ASK)
    chunks = [*model(stream_usage=True).stream(ASK)]
    assert "".join(chunk.content for chunk in chunks) == whole.content == "Hello there."
    for count in ("input_tokens", "output_tokens"):
        assert sum(chunks[1:], chunks[0]).usage_metadata[count] == whole.usage_metadata[count]
    assert whole.response_metadata["finish_reason"] == "stop"


def test_a_bound_tool_is_called_and_its_result_told():
    bound = model().bind_tools([weather])
    message = bound.invoke(ASK)
    [call] = message.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert bound.invoke([*ASK, message, result]).content == "The sun shines."


def test_calls_are_streamed_and_may_be_forced():
    for options in ({}, {"tool_choice": "weather"}, {"tool_choice": "any"}):
        chunks = [*model().bind_tools([weather], **options).stream(ASK)]
        [call] = sum(chunks[1:], chunks[0]).tool_calls
        assert call["name"] == "weather"
        assert isinstance(call["args"]["city"], str)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(method):
    assert isinstance(model().with_structured_output(Weather, method=method).invoke(ASK), Weather)


def test_structured_output_of_json_alone():
    assert isinstance(model().with_structured_output(None, method="json_mode").invoke(ASK), dict)


def test_several_answers_and_their_logprobs():
    [answers] = model(n=2).generate([ASK]).generations
    assert [answer.text for answer in answers] == ["Hello there."] * 2
    message = model(logprobs=True, top_logprobs=2).invoke(ASK)
    assert [entry["token"] for entry in message.response_metadata["logprobs"]["content"]][:2] == ["Hello", " there."]


def test_the_completion_of_a_text():
    assert OpenAI(model="scripted", max_tokens=8, max_retries=0).invoke("ab") == "cdefghab"


async def test_many_at_once():
    replies = await model().abatch([ASK] * 8)
    assert [reply.content for reply in replies] == ["Hello there."] * 8


def test_an_answer_that_nobody_waits_for():
    chunks = model(max_tokens=60_000, extra_body={"ignore_eos": True}).stream(ASK)
    next(chunks)
    chunks.close()
