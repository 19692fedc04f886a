"""Answers that have to call tools, through a whole cluster, with OpenAI's client."""

import json

import openai
import pytest

from tests.tiny_models import write_fake_model

CITIES = ["Paris", "Rome"]


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city={"$ref": "#/$defs/City"}), tool("time")]
TOOLS[0]["function"]["parameters"]["$defs"] = {"City": {"enum": CITIES}}


@pytest.fixture(scope="module")
def fake(start_cluster, tmp_path_factory):
    return start_cluster(write_fake_model(tmp_path_factory.mktemp("model") / "fake"), http=True)


@pytest.fixture
def ask(fake):
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        fields = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
        fields |= {"max_tokens": 300, "seed": 1}  # as what is free in a call may take any number of tokens
        yield lambda **others: client.chat.completions.create(**fields | others)


def check(name, arguments):
    called = json.loads(arguments)
    assert called == {} if name == "time" else called.keys() == {"city"} and called["city"] in CITIES


def test_any_tool_that_has_to_be_called_is(ask):
    [choice] = ask(tool_choice="required", parallel_tool_calls=False).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    check(call.function.name, call.function.arguments)


@pytest.mark.parametrize("name", ["weather", "time"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_certain_tool_is_called(ask, name, seed):
    choice = {"type": "function", "function": {"name": name}}
    [call] = ask(tool_choice=choice, seed=seed, temperature=1).choices[0].message.tool_calls
    assert call.function.name == name
    check(name, call.function.arguments)
    parts = [part.choices[0].delta.tool_calls or [] for part in ask(tool_choice=choice, seed=seed, stream=True)]
    told = [each for part in parts for each in part]
    assert told[0].function.name == name
    check(name, "".join(each.function.arguments for each in told))


def test_what_no_answer_can_be_held_to_names_the_tools(ask):
    unheard_of = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match="cannot be enforced") as error:
        ask(tool_choice="required", extra_body={"tools": [unheard_of]})
    assert error.value.param == "tools"
