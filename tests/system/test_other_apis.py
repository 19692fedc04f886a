"""One answer in the words of three APIs, through a whole cluster, each with its own client."""

import json

import anthropic
import httpx2
import openai
import pytest

from tests.system.cluster import CALL_DEADLINE_S, wait_until
from tests.tiny_models import write_fake_model

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is ½ + ½?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,  # the fake model would never end
}
KEY, OPERATORS = "key-of-ann", "key-of-the-test"


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "keys").write_text(f"ann {KEY}\n")
    flags = {"served_model_name": "m,other", "api_keys_file": folder / "keys"}
    env = {"SPLITSERVE_API_KEY": OPERATORS}
    return start_cluster(write_fake_model(folder / "fake"), http=True, env=env, coordinator=flags)


@pytest.fixture
def openais(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def anthropics(cluster):
    with anthropic.Anthropic(base_url=cluster.url, api_key=KEY, max_retries=0) as client:
        yield client


def test_three_apis_give_one_answer(cluster, openais, anthropics):
    chat = openais.chat.completions.create(model="m", messages=TURNS, max_tokens=20, temperature=0)
    text = chat.choices[0].message.content
    asked = {"model": "other", "instructions": "Be brief.", "input": TURNS[1:], "max_output_tokens": 20}
    response = openais.responses.create(**asked, temperature=0)
    last = [*openais.responses.create(**asked, temperature=0, stream=True)][-1].response
    assert response.output_text == last.output_text == text
    assert response.usage.total_tokens == last.usage.total_tokens == chat.usage.total_tokens

    asked = {"model": "other", "system": "Be brief.", "messages": TURNS[1:]}
    more = {"max_tokens": 20, "extra_body": {"temperature": 0}}
    message = anthropics.messages.create(**asked, **more)
    with anthropics.messages.stream(**asked, **more) as stream:
        streamed = stream.get_final_message()
    assert message.content[0].text == streamed.content[0].text == text
    for usage in (message.usage, streamed.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
        assert usage.output_tokens == chat.usage.completion_tokens
    assert anthropics.messages.count_tokens(**asked).input_tokens == chat.usage.prompt_tokens
    assert {chat.model, response.model, message.model} == {"m"}


def test_calls_that_have_to_come(openais, anthropics):
    function = {"type": "function", "name": "weather", "strict": True, "parameters": CITY}
    asked = {"model": "m", "tools": [function], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = openais.responses.create(**asked, input="hi", max_output_tokens=600, temperature=0).output
    assert (call.type, call.name, json.loads(call.arguments)["city"] in ("Paris", "Rome")) == (
        "function_call",
        "weather",
        True,
    )
    choice = {"type": "any", "disable_parallel_tool_use": True}
    tools, turns = [{"name": "weather", "input_schema": CITY}], [{"role": "user", "content": "hi"}]
    asked = {"model": "m", "messages": turns, "tools": tools, "tool_choice": choice}
    message = anthropics.messages.create(**asked, max_tokens=600, extra_body={"temperature": 0})
    [block] = message.content
    assert (message.stop_reason, block.name, block.input["city"] in ("Paris", "Rome")) == ("tool_use", "weather", True)


def askers(cluster):
    lines = cluster.children["coordinator"].lines()
    return {line["asker"] for line in lines if line["event"] == "request finished"}


def test_whose_key_it_was_is_in_the_log_and_the_key_is_not(cluster, openais):
    openais.responses.create(model="m", input="hi", max_output_tokens=2)
    wait_until(lambda: askers(cluster), "the end of a request is in the log", CALL_DEADLINE_S)
    assert askers(cluster) == {"ann"}
    written = "".join(child.output() for child in cluster.children.values())
    assert not [key for key in (KEY, OPERATORS) if key in written]


RENDERED = [
    {"temperature": 0.8, "seed": 5, "max_tokens": 20, "stop": ["e"]},
    {"temperature": 0, "max_tokens": 20, "logit_bias": {"97": 3}, "ignore_eos": True},
    {"max_tokens": 200, "seed": 3, "response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}},
]


@pytest.mark.parametrize("fields", RENDERED)
def test_a_rendered_chat_generates_the_same_tokens_streamed_and_whole(cluster, fields):
    with httpx2.Client(base_url=cluster.url, headers={"x-api-key": KEY}, timeout=CALL_DEADLINE_S) as client:
        body = {"model": "m", "messages": TURNS, **fields}
        chat = client.post("/v1/chat/completions", json={**body, "return_token_ids": True}).json()
        call = client.post("/v1/chat/completions/render", json=body).json()
        assert call["token_ids"] == chat["prompt_token_ids"]
        [choice] = client.post("/inference/v1/generate", json={**call, "output_mode": "text"}).json()["choices"]
        assert choice["token_ids"] == chat["choices"][0]["token_ids"]
        assert choice["text"] == chat["choices"][0]["message"]["content"]
        assert choice["finish_reason"] == chat["choices"][0]["finish_reason"]
        reply = client.post("/inference/v1/generate", json={**call, "request_id": "again", "stream": True})
        events = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n")[:-2]]
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == choice["token_ids"]
