"""litellm, with this server as any that speaks OpenAI's protocol. tests/scripted_model.py has what the model says."""

import json
import os

import litellm
import pytest
from pydantic import BaseModel, Field

ASK = [{"role": "user", "content": "How is the weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "minLength": 1}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


class Weather(BaseModel):
    """What a place has."""

    city: str = Field(min_length=1, max_length=20)
    degrees: int = Field(ge=-50, le=50)


@pytest.fixture(params=["openai", "hosted_vllm"])
def where(request):
    """Both providers that users take for a server such as this."""
    return {"model": f"{request.param}/scripted", "api_base": os.environ["OPENAI_BASE_URL"], "num_retries": 0}


def test_a_stream_is_the_whole_answer(where):
    whole = litellm.completion(messages=ASK, **where)
    events = [*litellm.completion(messages=ASK, stream=True, stream_options={"include_usage": True}, **where)]
    texts = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(texts) == whole.choices[0].message.content == "Hello there."
    assert whole.choices[0].finish_reason == "stop"
    built = litellm.stream_chunk_builder(events, messages=ASK)
    assert built.usage.completion_tokens == whole.usage.completion_tokens
    assert built.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_tool_is_called_and_its_result_told(where):
    message = litellm.completion(messages=ASK, tools=[TOOL], **where).choices[0].message
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    told = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    reply = litellm.completion(messages=[*ASK, message, told], tools=[TOOL], **where)
    assert reply.choices[0].message.content == "The sun shines."


def test_calls_are_streamed_and_may_be_forced(where):
    for choice in ("auto", {"type": "function", "function": {"name": "weather"}}):
        events = [*litellm.completion(messages=ASK, tools=[TOOL], tool_choice=choice, stream=True, **where)]
        [call] = litellm.stream_chunk_builder(events, messages=ASK).choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"]


def test_an_answer_keeps_to_its_schema(where):
    reply = litellm.completion(messages=ASK, response_format=Weather, **where)
    assert isinstance(Weather.model_validate_json(reply.choices[0].message.content), Weather)


def test_several_answers_and_their_logprobs(where):
    reply = litellm.completion(messages=ASK, n=2, logprobs=True, top_logprobs=2, **where)
    assert [choice.message.content for choice in reply.choices] == ["Hello there."] * 2
    assert [entry["token"] for entry in reply.choices[1].logprobs["content"]][:2] == ["Hello", " there."]


def test_the_completion_of_a_text():
    where = {"model": "text-completion-openai/scripted", "api_base": os.environ["OPENAI_BASE_URL"]}
    assert litellm.text_completion(prompt="ab", max_tokens=8, **where).choices[0].text == "cdefghab"


def test_what_is_wrong_has_its_own_class(where):
    with pytest.raises(litellm.BadRequestError, match="temperature must be within"):
        litellm.completion(messages=ASK, temperature=-1, **where)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=ASK, max_tokens=100_000, **where)


@pytest.mark.asyncio(loop_scope="module")  # as connections are kept for later calls
async def test_an_answer_that_nobody_waits_for(where):
    extra = {"ignore_eos": True}
    with pytest.raises(litellm.Timeout):
        await litellm.acompletion(messages=ASK, max_tokens=60_000, extra_body=extra, timeout=0.5, **where)
