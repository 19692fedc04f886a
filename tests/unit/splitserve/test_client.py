"""Both clients against a real gRPC server whose answers the test writes: what goes there and what comes back."""

import json
from dataclasses import fields

import pytest

from protos import inference_pb2
from splitserve.client import answers
from splitserve.client.errors import (
    Refused,
)
from splitserve.client.questions import Sampling, abort_request, generate_request
from tests.scripted_server import chunk, complete

USER_HI = {"role": "user", "content": "hi"}


def test_an_answer_becomes_typed_chunks(script, target, asked):
    logprobs = [inference_pb2.TokenLogprobs(token_id=7, logprob=-0.5, top=[inference_pb2.TopLogprob(token_id=8)])]
    timeline = inference_pb2.Timeline(
        prefill_s=1.5, e2e_s=2.0, decode_node="d0", num_restarts=1, num_migrations=2, migration_pause_s=0.5,
        prefix_fetch_s=0.25, expected_ttft_s=1.25, is_late=True,
    )  # fmt: skip
    script.replies = [
        chunk("Par", 0, [7], logprobs=logprobs),
        chunk("is", 1, [9, 10]),
        complete(
            matched_stop_str=".",
            prompt_tokens=5,
            completion_tokens=3,
            cached_tokens=2,
            timeline=timeline,
            kv_bytes=2**40,
            kv_bytes_saved=9,
            migrated_kv_bytes=4,
            proposed_tokens=6,
            accepted_tokens=1,
            fetched_kv_bytes=6,
        ),
    ]
    first, second, last = asked(target)
    assert (first.text, first.token_ids, first.first_token_index, first.request_id) == ("Par", (7,), 0, "r1")
    assert first.logprobs == (answers.TokenLogprob(7, -0.5, (answers.TopLogprob(8, 0.0),)),)
    assert first.completion is None
    assert (second.first_token_index, second.token_ids) == (1, (9, 10))
    assert (last.text, last.token_ids) == ("", ())
    end = last.completion
    assert (end.finish_reason, end.matched_stop) == ("stop", ".")
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (5, 3, 2)
    assert (end.proposed_tokens, end.accepted_tokens) == (6, 1)
    assert (end.kv_bytes, end.kv_bytes_saved, end.migrated_kv_bytes, end.fetched_kv_bytes) == (2**40, 9, 4, 6)
    assert (end.timeline.prefix_fetch_s, end.timeline.expected_ttft_s, end.timeline.is_late) == (0.25, 1.25, True)
    assert (end.timeline.prefill_s, end.timeline.decode_node, end.timeline.num_restarts) == (1.5, "d0", 1)
    assert (end.timeline.num_migrations, end.timeline.migration_pause_s) == (2, 0.5)


def test_the_matched_stop_may_be_a_token_or_nothing(script, target, asked):
    script.replies = [complete(matched_token_id=0)]
    assert asked(target)[0].completion.matched_stop == 0
    script.replies = [complete()]
    assert asked(target)[0].completion.matched_stop is None


@pytest.mark.parametrize(
    ("prompt", "kind", "sent"),
    [
        ("héllo", "text", "héllo"),
        ("", "text", ""),
        ([1, 2, 3], "tokenized", inference_pb2.TokenizedInput(input_ids=[1, 2, 3])),
        ([], "tokenized", inference_pb2.TokenizedInput()),
        (
            [{"role": "user", "content": "hi"}],
            "chat",
            inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage(role="user", content="hi")]),
        ),
    ],
)
def test_text_token_ids_and_conversations_are_sent_as_such(script, target, asked, prompt, kind, sent):
    asked(target, prompt)
    (request,) = script.requests
    assert request.WhichOneof("input") == kind
    assert getattr(request, kind) == sent


def test_only_sampling_fields_that_were_given_are_sent(script, target, asked):
    asked(target, temperature=0, top_k=None, stop="x", logit_bias={5: -1.0}, model="m", request_id="mine")
    (request,) = script.requests
    assert (request.model, request.request_id) == ("m", "mine")
    assert request.sampling_params == inference_pb2.SamplingParams(temperature=0, stop=["x"], logit_bias={5: -1.0})
    assert request.sampling_params.HasField("temperature")


def test_a_salt_is_sent_when_it_is_given(script, target, asked):
    asked(target, cache_salt="tenant-é")
    asked(target)
    assert [request.cache_salt for request in script.requests] == ["tenant-é", ""]


def test_limits_are_sent_when_they_are_given_and_what_became_of_them_comes_back(script, target, asked):
    attainment = inference_pb2.Attainment(slo_class="chat", ttft_ms=500.0, ttft_met=False)
    script.replies = [complete(attainment=attainment)]
    (end,) = asked(target, ttft_ms=500, slo_class="chat")
    assert end.completion.attainment == answers.Attainment("chat", 500.0, None, False, None)
    script.replies = [complete()]
    (end,) = asked(target)
    assert end.completion.attainment is None
    first, second = script.requests
    assert (first.ttft_ms, first.HasField("tpot_ms"), first.slo_class) == (500.0, False, "chat")
    assert (second.HasField("ttft_ms"), second.HasField("tpot_ms"), second.slo_class) == (False, False, "")


def test_a_priority_is_sent_when_it_is_given_be_it_0(script, target, asked):
    for priority in (-3, 0, None):
        asked(target, priority=priority)
    found = [(request.priority, request.HasField("priority")) for request in script.requests]
    assert found == [(-3, True), (0, True), (0, False)]


@pytest.mark.parametrize("priority", [2**31, 0.5, "high"])
def test_a_priority_that_the_wire_cannot_carry_is_refused_at_once(priority):
    with pytest.raises(Refused) as caught:
        generate_request("hi", model="", request_id="", cache_salt="", sampling={}, priority=priority)
    assert caught.value.reason == "BAD_PARAM"


@pytest.mark.parametrize("salt", ["\ud800", 5])
def test_a_salt_that_the_wire_cannot_carry_is_refused_at_once(salt):
    with pytest.raises(Refused) as caught:
        generate_request("hi", model="", request_id="", cache_salt=salt, sampling={})
    assert caught.value.reason == "BAD_PARAM"


def test_every_sampling_field_of_the_wire_can_be_given():
    assert set(Sampling.__annotations__) == set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (answers.Timeline, inference_pb2.Timeline),
        (answers.NodeLoad, inference_pb2.NodeLoad),
        (answers.RankLoad, inference_pb2.RankLoad),
        (answers.NodeInfo, inference_pb2.NodeInfo),
        (answers.ModelInfo, inference_pb2.GetModelInfoResponse),
        (answers.ServerInfo, inference_pb2.GetServerInfoResponse),
        (answers.Loads, inference_pb2.GetLoadsResponse),
        (answers.Aborted, inference_pb2.AbortResponse),
    ],
)
def test_answers_leave_no_wire_field_out(record, message):
    assert {field.name for field in fields(record)} == set(message.DESCRIPTOR.fields_by_name)


def request_of(prompt="hi", *, chat=False, **sampling):
    return generate_request(prompt, model="", request_id="", cache_salt="", sampling=sampling, chat=chat)


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        ("\ud800", "prompt", "prompt must be a string of valid Unicode, not '\\ud800'"),
        ([-1], "prompt", "prompt must be a list of integers from 0 to 2**32 - 1, not [-1]"),
        ([2**32], "prompt", "prompt must be a list of integers from 0 to 2**32 - 1, not [4294967296]"),
        (["a"], "prompt", "prompt must be a list of integers from 0 to 2**32 - 1, not ['a']"),
        ([1.5], "prompt", "prompt must be a list of integers from 0 to 2**32 - 1, not [1.5]"),
        (5, "prompt", "prompt must be text, token ids or a conversation, not 5"),
        (b"hi", "prompt", "prompt must be text, token ids or a conversation, not b'hi'"),
        (bytearray(b"hi"), "prompt", "prompt must be text, token ids or a conversation, not bytearray(b'hi')"),
        ([{"role": "user", "text": "hi"}], "prompt[0]", "prompt[0] has no content"),
        ([USER_HI, "hi"], "prompt[1]", "prompt[1] must be a message, not 'hi'"),
        ([USER_HI | {"content": 5}], "prompt[0].content", "prompt[0].content must be a string of valid Unicode, not 5"),
        ([USER_HI | {"name": {1}}], "prompt[0]", None),
        (
            [USER_HI | {"content": [{"type": "image_url"}]}],
            "prompt[0].content[0]",
            "prompt[0].content[0] must be a text part: models read text alone, not {'type': 'image_url'}",
        ),
    ],
)
def test_a_prompt_that_is_none_is_refused_at_once(prompt, field, message):
    with pytest.raises(Refused) as caught:
        request_of(prompt)
    assert (caught.value.reason, caught.value.field) == ("BAD_PARAM", field)
    assert message is None or caught.value.message == message


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", "8", "an integer of 32 bits, not '8'"),
        ("max_tokens", 2**31, "an integer of 32 bits, not 2147483648"),
        ("seed", 1.5, "an integer of 64 bits, not 1.5"),
        ("temperature", "a", "a number, not 'a'"),
        ("ignore_eos", "no", "true or false, not 'no'"),
        ("stop", [1], "a list of strings of valid Unicode, not [1]"),
        ("choice", [1], "a list of strings of valid Unicode, not [1]"),
        ("stop_token_ids", b"ab", "a list of integers from 0 to 2**32 - 1, not b'ab'"),
        ("regex", b"ab", "a string of valid Unicode, not b'ab'"),
        ("logit_bias", {"5": 1}, "a mapping of integers from 0 to 2**32 - 1 to numbers, not {'5': 1}"),
        ("bad_tokens", 5, "a list of lists of token ids, not 5"),
        ("bad_tokens", [[4], 5], "a list of lists of token ids, not 5"),
        ("bad_tokens", [[4], [-5]], "a list of integers from 0 to 2**32 - 1, not [-5]"),
        ("json_schema", 5, "a string of valid Unicode, not 5"),
    ],
)
def test_a_sampling_field_that_the_wire_cannot_carry_is_named(name, value, expected):
    with pytest.raises(Refused) as caught:
        request_of(**{name: value})
    assert (caught.value.reason, caught.value.field) == ("BAD_PARAM", name)
    assert caught.value.message == f"{name} must be {expected}"


def test_a_schema_may_be_a_mapping():
    schema = {"type": "integer", "minimum": 3}
    assert json.loads(request_of(json_schema=schema).sampling_params.json_schema) == schema
    assert request_of(json_schema="{}").sampling_params.json_schema == "{}"


def test_messages_may_be_as_openai_writes_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": None},
    ]
    user, assistant, tool = request_of(messages).chat.messages
    assert (user.content, list(user.content_parts), user.extra_json) == ("", ["a", "b"], "")
    assert assistant.content == ""
    made = call | {"function": {"name": "f", "arguments": {"x": 1}}}
    assert json.loads(assistant.extra_json) == {"tool_calls": [made]}
    assert json.loads(tool.extra_json) == {"tool_call_id": "c1"}


def test_text_may_be_what_a_user_says():
    assert list(request_of("hi", chat=True).chat.messages) == [inference_pb2.ChatMessage(role="user", content="hi")]
    assert request_of("hi", chat=False).text == "hi"
    assert list(request_of([1, 2], chat=True).tokenized.input_ids) == [1, 2]


def test_one_id_to_abort_is_one_id():
    assert list(abort_request("ab1").request_ids) == ["ab1"]
    assert list(abort_request(("ab1", "ab2")).request_ids) == ["ab1", "ab2"]
    with pytest.raises(Refused, match=r"request_ids must be a list of strings of valid Unicode, not b'ab1'"):
        abort_request(b"ab1")


def test_an_unknown_sampling_field_is_a_type_error():
    with pytest.raises(TypeError, match="max_new_tokens"):
        generate_request("hi", model="", request_id="", cache_salt="", sampling={"max_new_tokens": 1})
