"""From chat bodies with tools, calls and template fields to what a chat template is given."""

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.http import tools
from coordinator.api.http.body import MAX_VALUES
from coordinator.api.http.openai_responses import ResponsesCall
from coordinator.api.http.openai_responses_models import ResponsesRequest
from coordinator.api.http.request_models import (
    MAX_ARGUMENTS_CHARS,
    MAX_CONVERSATIONS,
    MAX_TEMPLATE_KWARGS,
    MAX_TOOLS,
    BatchRequest,
    ChatRequest,
    TokenizeRequest,
    Tool,
)
from coordinator.api.http.requests import parse_batch, parse_chat, parse_tokenize
from coordinator.api.http.tools import MAX_DEPTH, Offer, calls_schema, parsed
from coordinator.api.validation import MAX_CONSTRAINT_CHARS
from coordinator.text.answer_format import READERS, AnswerFormat
from coordinator.text.calls.json_calls import ListReader, NamedReader
from coordinator.text.calls.reader import MAX_CALLS
from serving_core.errors import RequestError
from serving_core.json_fields import json_line

HERMES = AnswerFormat("hermes")
HI = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}, "required": ["z"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS, "strict": True},
}
F = {"type": "function", "function": {"name": "f"}}
LONG = {"function": {"name": "long", "parameters": {"title": "x" * MAX_CONSTRAINT_CHARS}, "strict": True}}


def call(arguments, name="f", **others):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **others}


def asked(*messages, answer_format=HERMES, **fields):
    return parse_chat(ChatRequest.read({"messages": list(messages) or [HI], **fields}), "id", answer_format)


def chat_of(*messages, **fields):
    return asked(*messages, **fields).requests[0].chat


def extra_of(message):
    return json.loads(chat_of(HI, message).messages[1].extra_json)


def refusal(*messages, **fields):
    with pytest.raises(RequestError) as caught:
        asked(*messages, **fields)
    assert caught.value.reason == "BAD_PARAM"
    return caught.value.metadata["field"], str(caught.value)


def test_tools_go_to_the_template_as_they_came_and_are_offered():
    call_of_tools = asked(tools=[WEATHER, F], parallel_tool_calls=False)
    assert json.loads(call_of_tools.requests[0].chat.tools_json) == [WEATHER, F]
    assert list(json.loads(call_of_tools.requests[0].chat.tools_json)[0]["function"]["parameters"]["properties"]) == (
        ["z", "a"]
    )
    held = (("weather", json.dumps(PARAMETERS)), ("f", ""))
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert call_of_tools.offer == Offer({"weather": PARAMETERS, "f": nothing}, is_parallel=False, held=held)
    assert asked(tools=[F], tool_choice="auto").offer == Offer({"f": nothing}, held=(("f", ""),))


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [F], "tool_choice": "none"}, {"tool_choice": "auto"}])
def test_where_nothing_may_be_called_the_template_hears_of_no_tools(fields):
    assert asked(**fields).offer is None
    assert chat_of(**fields).tools_json == ""


def test_without_a_format_of_calls_tools_are_refused_but_where_they_are_not_to_be_called():
    field, message = refusal(tools=[F], answer_format=AnswerFormat())
    assert (field, "--tool-call-parser" in message) == ("tools", True)
    assert asked(tools=[F], tool_choice="none", answer_format=AnswerFormat()).offer is None


def schema_of(**fields):
    call_of_tools = asked(**fields, answer_format=AnswerFormat(thinks=True))
    schema = call_of_tools.requests[0].sampling_params.json_schema
    assert schema == call_of_tools.offer.schema
    return json.loads(schema)


def test_a_call_that_has_to_come_is_a_constraint_whatever_the_models_own_form():
    assert (
        schema_of(tools=[F, WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}}) == PARAMETERS
    )
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema_of(tools=[F], tool_choice=F) == nothing
    schema = schema_of(tools=[F, WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert schema == calls_schema({"f": nothing, "weather": PARAMETERS}, is_parallel=False)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert "maxItems" not in schema_of(tools=[F], tool_choice="required")


def test_a_call_that_has_to_come_is_in_json_where_the_models_format_cannot_keep_to_a_strict_schema():
    strict = {**PARAMETERS, "properties": {**PARAMETERS["properties"], "z": {"type": "string", "pattern": "a"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": strict, "strict": True}}
    named = {"type": "function", "function": {"name": "weather"}}
    for offered, own in ([WEATHER], True), ([tool], False), ([F, tool], False):
        for choice, reader in ("required", ListReader), (named, NamedReader):
            parsed = asked(tools=offered, tool_choice=choice, answer_format=AnswerFormat("kimi_k3", thinks=True))
            assert (parsed.offer.forced is READERS["kimi_k3"]) == own == parsed.terms.leeway.must_call
            assert parsed.terms.leeway.calls == ("kimi_k3" if own else "none")
            assert own or parsed.offer.forced is reader


TREE = {"properties": {"left": {"$ref": "#"}, "item": {"$ref": "#/$defs/Item"}}, "$defs": {"Item": {"type": "integer"}}}
NAMED = {
    "$id": "https://example.org/t#",
    "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "https://example.org/t"}},
}
NAMED["$defs"] = {"A": {"type": "integer"}}


@pytest.mark.parametrize(
    ("calls", "is_valid"),
    [
        ([], False),
        ([{"name": "f", "parameters": {}}], True),
        ([{"name": "f", "parameters": {"a": 1}}], False),
        ([{"name": "g", "parameters": {}}], False),
        ([{"name": "f"}], False),
        ([{"name": "f", "parameters": {}}, {"name": "weather", "parameters": {"z": "a"}}], True),
        ([{"name": "weather", "parameters": {"a": 1}}], False),
        ([{"name": "a/tree", "parameters": {"left": {"left": {}, "item": 1}}}], True),
        ([{"name": "a/tree", "parameters": {"left": {"item": "x"}}}], False),
        ([{"name": "a/tree", "parameters": {"left": {"left": 1}}}], False),
        ([{"name": "größe%", "parameters": {"a": 1, "b": {"a": 2}}}], True),
        ([{"name": "größe%", "parameters": {"b": {"a": "x"}}}], False),
    ],
)
def test_the_schema_of_calls_is_that_of_every_tool(calls, is_valid):
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    parameters = {"f": nothing, "weather": PARAMETERS, "a/tree": TREE, "größe%": NAMED}
    schemas = {name: {**each, "type": "object"} for name, each in parameters.items()}
    schema = calls_schema(schemas, is_parallel=True)
    assert jsonschema.Draft202012Validator(schema).is_valid(calls) == is_valid


def test_data_in_the_schema_of_a_tool_stays_as_it_is():
    data = {"const": {"$ref": "#/a"}, "default": [{"$ref": "#"}]}
    tool = {"properties": {"const": {"$ref": "#"}, "x": data}}
    [migrated] = calls_schema({"t": tool}, is_parallel=True)["$defs"].values()
    assert migrated["properties"] == {"const": {"$ref": "#/$defs/0"}, "x": data}


def test_calls_and_results_in_the_conversation():
    calls = [call('{"b": [1], "a": "ü"}', id="c1"), call("", "g"), call({"x": 1}, "h", index=2)]
    assert extra_of({"role": "assistant", "content": None, "tool_calls": calls}) == {
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": [1], "a": "ü"}}},
            {"type": "function", "function": {"name": "g", "arguments": {}}},
            {"type": "function", "function": {"name": "h", "arguments": {"x": 1}}},
        ]
    }
    assert extra_of({"role": "tool", "content": "12", "tool_call_id": "c1", "name": "f"}) == {
        "tool_call_id": "c1",
        "name": "f",
    }
    for thoughts in {"reasoning_content": "r"}, {"reasoning": "r"}, {"reasoning_content": "r", "reasoning": "r"}:
        assert extra_of({"role": "assistant", "content": "a", **thoughts}) == {"reasoning_content": "r"}
    assert [message.content for message in chat_of(HI, {"role": "assistant"}).messages] == ["hi", ""]


@pytest.mark.parametrize(
    "arguments", ['{"a": 1,}', "hello", "[1]", '{"city": "Par', "[" * 100_000, '{"a": "\\ud800"}', " "]
)
def test_what_a_model_wrote_and_is_no_object_is_told_as_it_is(arguments):
    """The same at all API servers."""
    [told] = extra_of({"role": "assistant", "tool_calls": [call(arguments)]})["tool_calls"]
    assert told["function"]["arguments"] == {"arguments": arguments}
    said = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
    message = ResponsesCall().parse(ResponsesRequest.read({"input": [said]}), "id").requests[0].chat.messages[0]
    assert json.loads(message.extra_json)["tool_calls"][0]["function"]["arguments"] == {"arguments": arguments}


def test_what_openais_client_dumps_can_be_sent_again():
    from openai.types.chat import ChatCompletionMessage

    sent = {"role": "assistant", "content": None, "tool_calls": [call("{}", id="c1")]}
    message = ChatCompletionMessage.model_validate(sent).model_dump()
    assert ChatRequest.read({"messages": [HI, message]}).unknown_fields() == []


def parts(*given):
    [_, message] = chat_of(HI, {"role": "assistant", "content": list(given)}).messages
    return list(message.content_parts), json.loads(message.extra_json or "{}")


def test_parts_of_other_apis_are_text_where_their_meaning_is_plain():
    thoughts = [{"type": "thinking", "thinking": each, "signature": "s"} for each in ("Hm.", "Well.")]
    hidden = {"type": "redacted_thinking", "data": "x"}
    for kind in ("text", "input_text", "output_text"):
        said = {"type": kind, "text": "So", "annotations": [], "logprobs": [], "cache_control": {}}
        assert parts(*thoughts, hidden, said, said) == (["So", "So"], {"reasoning_content": "Hm.\nWell."})
        assert chat_of({"role": "user", "content": [{"type": kind, "text": "a"}]}).messages[0].content_parts == ["a"]
    assert parts({"type": "refusal", "refusal": "No."}) == (["No."], {})
    assert chat_of(HI, {"role": "assistant", "content": None, "refusal": "No."}).messages[1].content == "No."


PARTS = "'text', 'input_text', 'output_text', 'refusal'"
THOUGHTS = "'thinking', 'redacted_thinking'"


@pytest.mark.parametrize(
    ("role", "part", "problem"),
    [
        (
            "user",
            {"type": "thinking", "thinking": "a"},
            f'type "thinking" is not supported: it must be {PARTS}',
        ),
        ("assistant", {"type": "thinking"}, "thinking is missing"),
        ("assistant", {"type": "refusal", "text": "a"}, "refusal is missing"),
        ("assistant", {"type": "audio"}, f'type "audio" is not supported: it must be {PARTS}, {THOUGHTS}'),
        ("user", {"type": "image_url"}, f'type "image_url" is not supported: it must be {PARTS}'),
    ],
)
def test_a_part_that_cannot_be_read_is_named(role, part, problem):
    field, message = refusal(HI, {"role": role, "content": [{"type": "text", "text": "a"}, part]})
    assert message == f"messages[1].content[1].{problem}"
    assert message.startswith(f"{field} ")


REFUSED_FIELDS = [
        ({"tools": [F] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": {"f": F}}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [F, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f" * 129}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "strict": True, "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters"),
        ({"tools": [{**F, "x": "\ud800"}]}, "tools"),
        ({"tools": [F], "tool_choice": "f"}, "tool_choice"),
        ({"tools": [F], "tool_choice": ["required"]}, "tool_choice"),
        ({"tools": [F], "tool_choice": WEATHER}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": F, "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": [LONG], "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": [F], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": dict.fromkeys(map(str, range(MAX_TEMPLATE_KWARGS + 1)))}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"continue_final_message": 1}, "continue_final_message"),
    ]  # fmt: skip


def test_what_is_refused_by_name():
    for fields, field in REFUSED_FIELDS:
        assert refusal(**fields)[0] == field


@pytest.mark.parametrize("types", [{}, {"type": "object"}, {"type": ["object", "null"]}, {"type": "array"}])
def test_arguments_are_objects_whatever_parameters_say(types):
    """Readers of calls know no others, nor do clients."""
    is_strict = types.get("type") != "array"
    function = {"name": "f", "strict": is_strict, "parameters": {**types, "properties": {"a": {"type": "null"}}}}
    schema = tools.schema_of(Tool.model_validate({"type": "function", "function": function}).function)
    validator = jsonschema.Draft202012Validator(schema)
    assert [validator.is_valid(value) for value in ({"a": None}, {"a": 1}, None, [])] == [True, False, False, False]


@pytest.mark.parametrize(
    ("calls", "field"),
    [
        ([{}], "[0].function"),
        ([{"type": "custom", "custom": {}}], "[0].type"),
        ([call(" " * (MAX_ARGUMENTS_CHARS + 1))], "[0].function.arguments"),
        ([call(3)], "[0].function.arguments"),
        ([call("{}")] * (MAX_CALLS + 1), ""),
        ([call("{}", name="")], "[0].function.name"),
    ],
)
def test_calls_that_are_none(calls, field):
    name, message = refusal({"role": "assistant", "tool_calls": calls})
    assert name == f"messages[0].tool_calls{field}"
    assert message.startswith(name)


def test_arguments_may_have_no_more_values_than_a_body():
    arguments = "{" + ",".join(f'"{number}":1' for number in range(10)) + ',"a":[' + "1," * MAX_VALUES + "1]}"
    with pytest.raises(RequestError, match="values, the limit is"):
        asked({"role": "assistant", "tool_calls": [call(arguments)]})


def test_limits_are_named_with_the_value():
    assert refusal(tools=[F] * 513)[1] == "tools has 513 entries, the limit is 512"
    long = {"role": "assistant", "tool_calls": [call(" " * (MAX_ARGUMENTS_CHARS + 1))]}
    assert refusal(long)[1].endswith("has 1048577 characters, the limit is 1048576")


def test_fields_of_the_template():
    chat = chat_of(chat_template_kwargs={"enable_thinking": False}, continue_final_message=True)
    assert json.loads(chat.template_kwargs_json) == {"enable_thinking": False}
    assert (chat.HasField("add_generation_prompt"), chat.continue_final_message) == (False, True)
    chat = chat_of(add_generation_prompt=False)
    assert (chat.HasField("add_generation_prompt"), chat.add_generation_prompt) == (True, False)


def test_tokenize_takes_the_same_and_reads_all_of_it():
    values = {"messages": [HI], "tools": [WEATHER], "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    request = TokenizeRequest.read({**values, "continue_final_message": False, "add_special_tokens": False})
    chat = parse_tokenize(request)
    assert request.unknown_fields() == []
    assert (json.loads(chat.tools_json), json.loads(chat.template_kwargs_json)) == ([WEATHER], {"a": 1})
    for name, value in (("chat_template", "x"), ("add_special_tokens", True), ("documents", [{}])):
        with pytest.raises(RequestError, match=f"^{name} .* is not supported"):
            parse_tokenize(TokenizeRequest.read({"messages": [HI], name: value}))


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "reasoning_effort"])
def test_what_is_for_a_chat_template_is_refused_beside_a_prompt_and_so_are_messages(name):
    value = "low" if name == "reasoning_effort" else True
    with pytest.raises(RequestError, match=f"^{name} needs messages: a prompt has no chat template$"):
        parse_tokenize(TokenizeRequest.read({"prompt": "p", name: value}))
    with pytest.raises(RequestError, match="prompt cannot be had beside messages"):
        parse_tokenize(TokenizeRequest.read({"prompt": "p", "messages": [HI]}))


def test_the_effort_is_told_to_the_template_in_the_variables_that_templates_know():
    for effort, thinks in (("high", True), ("none", False)):
        chat = chat_of(reasoning_effort=effort)
        assert json.loads(chat.template_kwargs_json) == {"reasoning_effort": effort, "enable_thinking": thinks}
    chat = chat_of(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "a": 1})
    assert json.loads(chat.template_kwargs_json) == {"reasoning_effort": "none", "enable_thinking": True, "a": 1}
    field, message = refusal(reasoning_effort="much")
    assert (field, message.endswith("'xhigh' or 'max', not \"much\"")) == ("reasoning_effort", True)


def test_a_batch_is_a_request_for_each_conversation():
    other = {"role": "user", "content": "other"}
    asked_for = parse_batch(BatchRequest.read({"messages": [[HI], [HI, other]], "max_tokens": 3}), "id", HERMES)
    assert [request.request_id for request in asked_for.requests] == ["id-0", "id-1"]
    assert [[message.content for message in request.chat.messages] for request in asked_for.requests] == [
        ["hi"],
        ["hi", "other"],
    ]
    [alone] = parse_chat(ChatRequest.read({"messages": [HI], "max_tokens": 3}), "id-0", HERMES).requests
    assert asked_for.requests[0] == alone


def test_what_is_the_same_for_all_conversations_may_not_be_long():
    messages = [[HI]] * MAX_CONVERSATIONS
    for fields, message in (
        ({"chat_template_kwargs": {"a": "b" * 2**16}}, "chat_template_kwargs has 65545 characters, the limit is 65536"),
        ({"stop": ["a" * 2**19]}, "the 256 prompts' sampling fields have 134218752 bytes, the limit is 134217728"),
    ):
        with pytest.raises(RequestError) as caught:
            parse_batch(BatchRequest.read({"messages": messages, **fields}), "id")
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages must be a list, not null"),
        ([HI], "messages[0] must be a list, not an object"),
        ([[HI], []], "messages[1] has 0 entries, at least 1 is needed"),
        ([[HI], [HI, {"role": 3, "content": ""}]], "messages[1][1].role must be a string of valid Unicode, not 3"),
        ([[HI]] * (MAX_CONVERSATIONS + 1), "messages has 257 entries, the limit is 256"),
    ],
)
def test_what_is_no_batch(messages, message):
    with pytest.raises(RequestError) as caught:
        BatchRequest.read({"messages": messages})
    assert str(caught.value) == message


# ---- JSON of a model: what is read can be written, and says the same ----

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(value=VALUES)
def test_what_is_json_is_read_and_written_as_it_is(value):
    assert parsed(json.dumps(value)) == value
    assert json.loads(json_line(parsed(json.dumps(value)))) == value


NOT_WRITTEN = ["NaN", "[Infinity]", '{"a": -Infinity}', "1e400", "[-1e999]", '"\\udc00"', "", "{", "9" * 5000]


@pytest.mark.parametrize("text", NOT_WRITTEN)
def test_what_cannot_be_written_is_not_read(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the message is Python's own
        parsed(text)


def test_how_deep_it_may_be():
    assert json_line(parsed("[" * MAX_DEPTH + "]" * MAX_DEPTH)) == "[" * MAX_DEPTH + "]" * MAX_DEPTH
    for depth in (MAX_DEPTH + 1, 10_000):
        with pytest.raises(ValueError, match=r"levels|deeply"):
            parsed("[" * depth + "]" * depth)
