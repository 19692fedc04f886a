"""Answers that have to call tools, through a whole cluster, with OpenAI's client."""

import json

import jsonschema
import openai
import pytest

from tests.schemas import closed
from tests.tiny_models import write_fake_model

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> <think> </think> #}"
CLOSERS = {ord(each): 6.0 for each in '"]}>'}  # the fake model would rarely end a text by itself
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


@pytest.mark.nightly
def test_an_answer_is_a_call_or_of_the_form(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("model") / "fake")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    cluster = start_cluster(model, http=True)
    schema = closed(city={"enum": CITIES})
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    fields = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 300}
    fields |= {"response_format": form, "temperature": 20, "n": 16, "logit_bias": CLOSERS}
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        choices = client.chat.completions.create(**fields, seed=1).choices
    ended = [choice for choice in choices if choice.finish_reason != "length"]
    for choice in ended:
        for each in choice.message.tool_calls or []:
            assert each.function.name in ("weather", "time")
            assert isinstance(json.loads(each.function.arguments), dict)
        if choice.finish_reason == "tool_calls":
            assert choice.message.content is None
        else:
            jsonschema.validate(json.loads(choice.message.content), schema)
    assert {choice.finish_reason for choice in ended} == {"stop", "tool_calls"}


def test_a_strict_tool_is_called_as_its_schema_says_or_not_at_all(ask):
    """And another one as it says as far as can be."""
    picked = tool("pick", these={"type": "array", "items": {"enum": CITIES}, "maxItems": 2, "uniqueItems": True})
    choice = {"type": "function", "function": {"name": "pick"}}
    for tool_choice in (choice, "required"):
        [call, *_] = ask(tool_choice=tool_choice, extra_body={"tools": [picked]}).choices[0].message.tool_calls
        these = json.loads(call.function.arguments)["these"]
        assert set(these) <= set(CITIES)
        assert len(these) <= 2
        strict = {**picked, "function": {**picked["function"], "strict": True}}
        with pytest.raises(openai.BadRequestError, match=r"cannot be enforced: .*uniqueItems") as error:
            ask(tool_choice=tool_choice, extra_body={"tools": [strict]})
        assert error.value.param == "tools"
