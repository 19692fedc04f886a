"""From OpenAI's JSON to the requests of the gRPC API: hand-written pairs, and anything at all."""

import json
import re

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.http.body import MAX_STRINGS, MAX_VALUES, json_object
from coordinator.api.http.request_models import MAX_PROMPTS, ChatRequest, CompletionRequest, EmbeddingsRequest
from coordinator.api.http.requests import (
    CHAT_NAMES,
    COMPLETION_NAMES,
    ParsedRequest,
    embed_requests,
    parse_chat,
    parse_completion,
)
from coordinator.api.prompts import Terms
from coordinator.api.validation import MAX_LOGIT_BIAS, MAX_MESSAGES, MAX_PARTS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from serving_core.errors import RequestError

SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 1,
    "presence_penalty": -1,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "n": 3,
    "seed": -7,
    "stop": ["a", "b"],
    "stop_token_ids": [4, 5],
    "allowed_token_ids": [4, 6],
    "bad_words": ["no", "never"],
    "logprob_token_ids": [7, 1],
    "skip_special_tokens": False,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
}


JSON_SCHEMA = "response_format.json_schema.schema"
NO_ADDITIONAL = "structured_outputs.disable_additional_properties"


def as_json(message):
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def completion(**fields):
    return parse_completion(CompletionRequest.read({"prompt": "p", **fields}), "id")


def chat(*messages, **fields):
    body = {"messages": list(messages) or [{"role": "user", "content": "c"}], **fields}
    return parse_chat(ChatRequest.read(body), "id")


def refusal(parse, **fields):
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.reason == "BAD_PARAM"
    return caught.value.metadata["field"], str(caught.value)


def test_every_sampling_field_reaches_the_request():
    expected = {**SAMPLING, "seed": "-7", "max_tokens": 9, "logit_bias": {"7": -1.5, "8": 2.0}}
    given_fields = {**SAMPLING, "max_tokens": 9, "logit_bias": {"7": -1.5, "8": 2}}
    [request] = completion(**given_fields, model="m", cache_salt="s", logprobs=2).requests
    assert as_json(request) == {
        "request_id": "id",
        "text": "p",
        "model": "m",
        "cache_salt": "s",
        "sampling_params": {**expected, "logprobs": 2},
    }
    [request] = chat(**given_fields, logprobs=True, top_logprobs=4).requests
    assert as_json(request)["sampling_params"] == {**expected, "logprobs": 4}


def test_what_is_left_out_or_null_stays_unset_but_for_openais_16_tokens():
    nulls = dict.fromkeys([*SAMPLING, "logit_bias", "logprobs", "stream_options", "model", "tools", "suffix"])
    for fields in ({}, nulls):
        assert as_json(completion(**fields).requests[0])["sampling_params"] == {}
        assert as_json(chat(**fields).requests[0]) == {
            "request_id": "id",
            "chat": {"messages": [{"role": "user", "content": "c"}]},
            "sampling_params": {},
        }
    terms = Terms(default_max_tokens=16)
    assert completion() == ParsedRequest(completion().requests, names=COMPLETION_NAMES, terms=terms)
    assert chat().terms.default_max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [{"text": "a"}]),
        (["a"], [{"text": "a"}]),
        (["a", "b"], [{"text": "a"}, {"text": "b"}]),
        ([1, 2], [{"tokenized": {"input_ids": [1, 2]}}]),
        ([[1, 2], [3]], [{"tokenized": {"input_ids": [1, 2]}}, {"tokenized": {"input_ids": [3]}}]),
    ],
)
def test_prompts(prompt, expected):
    requests = completion(prompt=prompt).requests
    ids = ["id"] if len(expected) == 1 else ["id-0", "id-1"]
    assert [request.request_id for request in requests] == ids
    assert [{key: as_json(request)[key] for key in each} for request, each in zip(requests, expected, strict=True)] == (
        expected
    )


@pytest.mark.parametrize("name", ["ebnf", "grammar", "json_schema", "regex"])
def test_a_form_in_the_words_of_other_servers_is_not_left_out(name):
    for parse in completion, chat:
        field, message = refusal(parse, **{name: 'root ::= "a"'})
        assert field == name
        assert "of structured_outputs" in message
        assert parse(**{name: None}) == parse()


@pytest.mark.parametrize("prompt", [None, [], 1, True, {}])
def test_what_is_no_prompt(prompt):
    assert refusal(completion, prompt=prompt)[0] == "prompt"


@pytest.mark.parametrize(
    ("prompt", "entry", "problem"),
    [
        ([None], "prompt[0]", "must be an integer, not null"),
        (["a", 1], "prompt[1]", "must be a string of valid Unicode, not 1"),
        (["a", [1]], "prompt[1]", "must be a string of valid Unicode, not a list"),
        ([1, "a"], "prompt[1]", 'must be an integer, not "a"'),
        ([1, True], "prompt[1]", "must be an integer, not true"),
        ([[1], "a"], "prompt[1]", 'must be a list, not "a"'),
        ([[1], 2], "prompt[1]", "must be a list, not 2"),
        ([[1], [2, -1]], "prompt[1][1]", "must be at least 0, not -1"),
        ([-1], "prompt[0]", "must be at least 0, not -1"),
        ([2**32], "prompt[0]", "must be at most 4294967295, not 4294967296"),
        ([1.0], "prompt[0]", "must be an integer, not 1.0"),
    ],
)
def test_an_entry_that_is_no_part_of_a_prompt_is_named(prompt, entry, problem):
    assert refusal(completion, prompt=prompt) == (entry, f"{entry} {problem}")


def test_how_many_answers_there_may_be_is_told_whatever_was_asked():
    assert refusal(completion, n="2") == ("n", 'n must be an integer, not "2"')
    assert refusal(completion, n=129) == ("n", "n must be at most 128, not 129")


def test_the_number_of_prompts_has_a_limit():
    assert refusal(completion, prompt=["a"] * (MAX_PROMPTS + 1)) == (
        "prompt",
        "prompt has 257 entries, the limit is 256",
    )


@pytest.mark.parametrize(("count", "limit"), [(1, 128), (2, 126), (11, 125)])
def test_an_id_leaves_room_for_the_number_of_a_prompt(count, limit):
    prompts = ["a"] * count
    for requests_of in (
        lambda name: parse_completion(CompletionRequest.read({"prompt": prompts}), name).requests,
        lambda name: embed_requests(EmbeddingsRequest.read({"input": prompts}), name),
    ):
        assert len(requests_of("i" * limit)[-1].request_id) == 128
        if limit < 128:
            message = f"request_id has {limit + 1} characters, the limit for {count} requests is {limit}"
            with pytest.raises(RequestError, match=message):
                requests_of("i" * (limit + 1))


HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("stop", ["a"] * (MAX_STOP_STRINGS + 1), MAX_STOP_STRINGS),
        ("stop_token_ids", [7] * (MAX_STOP_TOKEN_IDS + 1), MAX_STOP_TOKEN_IDS),
        ("logit_bias", dict.fromkeys(map(str, range(MAX_LOGIT_BIAS + 1)), 1), MAX_LOGIT_BIAS),
        ("messages", [{}] * (MAX_MESSAGES + 1), MAX_MESSAGES),
    ],
)
def test_lists_have_limits(name, value, limit):
    """And their number of entries is all that is said of one that is too long."""
    with pytest.raises(RequestError) as caught:
        ChatRequest.read({"messages": [HI]} | {name: value})
    assert str(caught.value) == f"{name} has {limit + 1} entries, the limit is {limit}"
    assert (caught.value.reason, caught.value.metadata["field"]) == ("BAD_PARAM", name)


def test_the_number_of_text_parts_has_a_limit():
    parts = [{"type": "text", "text": "a"}] * (MAX_PARTS + 1)
    with pytest.raises(RequestError, match=r"messages\[0\].content has 1025 entries, the limit is 1024"):
        chat({"role": "user", "content": parts})


def test_content_may_come_in_text_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [request] = chat({"role": "system", "content": "s"}, {"role": "user", "content": parts, "name": "x"}).requests
    system, user = request.chat.messages
    assert (system.role, system.content, list(system.content_parts)) == ("system", "s", [])
    assert (user.role, user.content, list(user.content_parts)) == ("user", "", ["a", "b"])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "c"}, "messages[0].role"),
        ({"role": 1, "content": "c"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": ["c"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "tool", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": "c", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ("hi", "messages[0]"),
    ],
)
def test_messages_that_are_none(message, field):
    with pytest.raises(RequestError) as caught:
        chat(message)
    assert caught.value.metadata["field"] == field


REFUSED_FIELDS = [
        ({"max_tokens": "9"}, 'max_tokens must be an integer, not "9"'),
        ({"max_tokens": True}, "max_tokens must be an integer, not true"),
        ({"seed": 0.5}, "seed must be an integer, not 0.5"),
        ({"top_k": 2**31}, "top_k must be at most 2147483647, not 2147483648"),
        ({"seed": 10**99}, "seed must be at most 9223372036854775807, not an integer beyond 64 bits"),
        ({"temperature": "hot"}, 'temperature must be a finite number, not "hot"'),
        ({"temperature": float("nan")}, "temperature must be a finite number, not NaN"),
        ({"temperature": 10**400}, "temperature must be a finite number, not an integer beyond 64 bits"),
        ({"top_p": False}, "top_p must be a finite number, not false"),
        ({"stream": 1}, "stream must be true or false, not 1"),
        ({"stop": 1}, "stop must be a string or a list of strings, not 1"),
        ({"stop": ["a", 1]}, "stop[1] must be a string of valid Unicode, not 1"),
        ({"stop": "\ud800"}, 'stop must be a string of valid Unicode, not "\\ud800"'),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0] must be at least 0, not -1"),
        ({"logit_bias": [1]}, "logit_bias must be an object, not a list"),
        ({"logit_bias": {"x": 1}}, 'logit_bias has the key "x", which is no token id'),
        ({"logit_bias": {"1": "x"}}, 'logit_bias.1 must be a finite number, not "x"'),
        ({"stream_options": True}, "stream_options must be an object, not true"),
        ({"model": 3}, "model must be a string of valid Unicode, not 3"),
        ({"best_of": True}, "best_of (true) is not supported: n outputs are generated and returned"),
        ({"use_beam_search": True}, "use_beam_search (true) is not supported: there is no beam search; outputs are "
                                    "sampled or greedy"),
        ({"num_beams": 4}, "num_beams (4) is not supported: there is no beam search; outputs are sampled or greedy"),
        ({"beam_width": 2}, "beam_width (2) is not supported: there is no beam search; outputs are sampled or greedy"),
        ({"suffix": "end"}, 'suffix ("end") is not supported: the output follows the prompt'),
        ({"allowed_token_ids": []}, "allowed_token_ids has 0 entries, at least 1 is needed"),
        ({"allowed_token_ids": "a"}, 'allowed_token_ids must be a list, not "a"'),
        ({"stream_options": {}}, "stream_options needs stream: true"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type must be 'text', "
                                                       "'json_object' or 'json_schema', not \"structural_tag\""),
    ]  # fmt: skip


def test_what_a_field_may_not_be():
    for fields, message in REFUSED_FIELDS:
        [name] = fields
        assert refusal(completion, **fields) == (message.split()[0].rstrip(","), message)
        assert message.startswith(name)


UNSUPPORTED_CHATS = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"response_format": "text"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}}, JSON_SCHEMA),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": []}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": 1}}, NO_ADDITIONAL),
    ({"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"guided_json": {}}, "guided_json"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"max_completion_tokens": "many"}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
]


def test_what_chat_does_not_support():
    for fields, field in UNSUPPORTED_CHATS:
        assert refusal(chat, **fields)[0] == field


SCHEMA = {"type": "object", "properties": {"ä": {"const": 1}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "description": "d", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, {"json_schema": '{"a": 1}'}),
        ({"response_format": FORM}, {"json_schema": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"json": '{"x":1}'}}, {"json_schema": '{"x":1}'}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            {"json_schema": json.dumps(SCHEMA), "disable_additional_properties": True},
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
            {"json_schema": json.dumps(SCHEMA), "disable_additional_properties": False},
        ),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "a+", "json": None, "json_object": False}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "ü"]}}, {"choice": {"choices": ["a", "ü"]}}),
        ({"structured_outputs": {"grammar": "start: A"}}, {"grammar": "start: A"}),
        (
            {"structured_outputs": {"json": "{}", "disable_any_whitespace": True, "whitespace_pattern": " ?"}},
            {"json_schema": "{}", "disable_any_whitespace": True, "whitespace_pattern": " ?"},
        ),
    ],
)
def test_what_an_answer_is_made_to_be(fields, expected):
    assert as_json(chat(**fields).requests[0])["sampling_params"] == expected
    assert as_json(completion(**fields).requests[0])["sampling_params"] == expected
    assert unknown(ChatRequest, {"messages": MESSAGES, **fields}) == []


def test_what_asks_for_nothing_and_what_nobody_knows_is_ignored():
    harmless = {"echo": False, "best_of": 1, "suffix": "", "user": "u", "store": 7, "metadata": {"a": 1}}
    assert completion(**harmless) == completion()
    harmless = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "service_tier": "auto"}
    harmless |= {"add_special_tokens": False, "chat_template_kwargs": {}, "bad_words": []}
    assert chat(**harmless, top_logprobs=0, logprobs=False) == chat()


HARMLESS = {
    "user": "u",
    "store": True,
    "metadata": {"a": 1},
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "tools": [],
    "top_logprobs": 0,
    "logprobs": False,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "response_format": {"type": "text"},
    "max_tokens": 5,
    "max_completion_tokens": 4,
    "logit_bias": {"7": 1},
    "return_token_ids": True,
    "include_timeline": True,
    "model": "m",
    "cache_salt": "s",
    "unset": None,
}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}]


def unknown(model, values):
    return model.read(values).unknown_fields()


def test_every_known_field_is_read():
    assert unknown(ChatRequest, {"messages": MESSAGES, **SAMPLING, **HARMLESS}) == []
    known = {name: value for name, value in HARMLESS.items() if not re.match("tool|top_|log|parallel|max_c", name)}
    assert unknown(CompletionRequest, {"prompt": ["a", "b"], **SAMPLING, **known, "logprobs": 1, "echo": False}) == []
    assert unknown(CompletionRequest, {"prompt": [[1], [2]]}) == []


def test_what_nobody_knows_is_named_wherever_it_stands_and_once():
    messages = [{**message, "mood": "r"} for message in MESSAGES]
    messages[0]["content"][0]["cache"] = 1
    values = {"messages": messages, "temprature": 0, "stream": True, "stream_options": {"usage": True}, "top_k": 3}
    expected = ["temprature", "stream_options.usage", "messages[].mood", "messages[].content[].cache"]
    assert sorted(unknown(ChatRequest, values)) == sorted(expected)


def test_options_of_the_response():
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"stream_options": options, "return_token_ids": True, "include_timeline": True}
    asked = chat(stream=True, n=4, **fields)
    assert asked == ParsedRequest(
        asked.requests,
        names=CHAT_NAMES,
        num_sequences=4,
        stream=True,
        include_usage=True,
        continuous_usage=True,
        return_token_ids=True,
        include_timeline=True,
    )


@pytest.mark.parametrize("options", [{"include_usage": False}, {"continuous_usage_stats": True}, {}])
def test_a_stream_has_no_usage_that_was_not_asked_for(options):
    asked = chat(stream=True, stream_options=options)
    assert (asked.include_usage, asked.continuous_usage) == (False, False)


def test_the_newer_name_of_max_tokens_wins():
    assert chat(max_tokens=3, max_completion_tokens=5).requests[0].sampling_params.max_tokens == 5


NAMES = sorted(
    {*SAMPLING, "prompt", "messages", "max_tokens", "max_completion_tokens", "logit_bias", "logprobs", "top_logprobs"}
    | {"stream", "stream_options", "model", "cache_salt", "response_format", "tools", "echo", "best_of", "role"}
    | {"content", "type", "text", "include_usage"}
)
TEXT = st.text(st.characters())  # with halves of surrogate pairs, as JSON can write them
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | TEXT, inner, max_size=3),
    max_leaves=8,
)


def parsed_or_refused(parse, *arguments):
    try:
        return parse(*arguments)
    except RequestError as error:
        return error


def parsed_body(model, parse, body):
    return parse(model.read(json_object(body)), "id")


@given(fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_any_json_is_a_request_or_a_refusal(fields):
    for model, parse in ((CompletionRequest, parse_completion), (ChatRequest, parse_chat)):
        body = json.dumps({"prompt": "p", "messages": [HI], **fields}).encode()
        outcome = parsed_or_refused(parsed_body, model, parse, body)
        if isinstance(outcome, RequestError):
            assert outcome.reason == "BAD_PARAM"
            assert outcome.metadata["field"].encode()
            assert str(outcome).encode()
        else:
            assert all(request.SerializeToString() for request in outcome.requests)


@given(body=st.binary() | st.text().map(str.encode))
def test_any_body_is_an_object_or_malformed(body):
    outcome = parsed_or_refused(json_object, body)
    assert isinstance(outcome, dict) or outcome.reason == "MALFORMED_REQUEST"


@pytest.mark.parametrize("body", [b"[" * 10**5, b"9" * 10_000, b'{"a":1}x', b"\xff\xfe", b'"text"', b""])
def test_bodies_that_are_no_object(body):
    with pytest.raises(RequestError, match="the body"):
        json_object(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt":[' + b"1," * MAX_VALUES + b"1]}", f"the body has {MAX_VALUES + 1} values, the limit is 262144"),
        (b'{"a\\\\":[' + b"1," * MAX_VALUES + b'1],"b":"\\""}', f"the body has {MAX_VALUES + 2} values"),
        (b'{"stop":["' + b'","' * MAX_STRINGS + b'"]}', f"strings, the limit is {MAX_STRINGS}"),
    ],
)
def test_bodies_of_more_values_than_can_be_parsed_at_one_go(body, message):
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        json_object(body)
    assert caught.value.reason == "BAD_PARAM"


def test_what_stands_in_strings_is_no_value():
    values = {"prompt": ',"\\,' * MAX_VALUES, "stop": ["\\", '"', ',\\"']}
    assert json_object(json.dumps(values).encode())["prompt"] == values["prompt"]
    assert json_object(b"\xef\xbb\xbf" + json.dumps({"a": [1] * (MAX_VALUES - 1)}).encode())["a"][-1] == 1
