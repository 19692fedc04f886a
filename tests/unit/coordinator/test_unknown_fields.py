"""Fields that the server does not know: warned of at both API servers, refused where it is strict, and more of them
than are looked at."""

import asyncio
import logging

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.api.unknown_fields import MAX_FIELDS, MAX_LOGGED, UnknownFields, check_num_fields, unknown_in_message
from protos import inference_pb2
from protos.inference_pb2 import ChatInput, ChatMessage, Choice, GenerateRequest, SamplingParams, TokenizedInput
from serving_core.errors import RequestError
from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, begin_to_write, cluster, read_to_end, refusal_of, run
from tests.tiny_models import EOS
from tests.unit.coordinator.http_kit import HI, http_cluster

pytestmark = pytest.mark.usefixtures("programs_here")

HEADER = "x-splitserve-warning"
VARINT_99 = b"\x98\x06\x01"  # field 99 with the number 1, as a later version may have it


def asked_by_a_later_version():
    params = inference_pb2.SamplingParams.FromString(VARINT_99)
    known = inference_pb2.GenerateRequest(request_id="r", text="hello", sampling_params=params)
    return inference_pb2.GenerateRequest.FromString(known.SerializeToString() + VARINT_99 + VARINT_99)


def test_numbers_of_unknown_fields():
    assert unknown_in_message(inference_pb2.GenerateRequest(text="a")) == []
    assert unknown_in_message(asked_by_a_later_version()) == ["99", "sampling_params.99"]


def test_those_of_what_is_in_a_request_are_told_once_each():
    chat = inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage.FromString(VARINT_99) for _ in range(3)])
    so_far = [inference_pb2.OutputSoFar.FromString(VARINT_99)]
    request = inference_pb2.GenerateRequest(chat=chat, so_far=so_far)
    request.sampling_params.logit_bias[5] = 1.0
    assert sorted(unknown_in_message(request)) == ["chat.messages.99", "so_far.99"]
    chat = inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage()] * 100_000)
    assert unknown_in_message(inference_pb2.GenerateRequest(chat=chat)) == []  # and not all are looked at


def test_names_are_told_short_and_few_and_may_stand_in_a_header():
    unknown = UnknownFields(strict=False)
    assert unknown.check([]) == ""
    assert unknown.check(["a", "b.c"]) == "unknown fields: a, b.c"
    assert unknown.check(["é\r\nset-cookie: x"]) == "unknown fields: \\u00e9\\r\\nset-cookie: x"
    assert unknown.check(["a ", "", " ", "\x7f"]) == 'unknown fields: "a ", "", " ", \\u007f'
    told = unknown.check(["x" * 10_000] * 500)
    assert told.endswith("... and 492 more")
    assert len(told) < 400


def test_a_strict_server_refuses_by_name():
    with pytest.raises(RequestError, match="unknown fields: temprature, b") as caught:
        UnknownFields(strict=True).check(["temprature", "b"])
    assert (caught.value.reason, caught.value.metadata["field"]) == ("BAD_PARAM", "temprature")
    assert UnknownFields(strict=True).check([]) == ""


def test_the_log_has_each_warning_once_and_ends(caplog):
    unknown = UnknownFields(strict=False)
    with caplog.at_level(logging.WARNING, logger="coordinator.api.unknown_fields"):
        for number in range(2 * MAX_LOGGED):
            assert unknown.check([f"field{number}"]) == unknown.check([f"field{number}"])
    assert len(caplog.messages) == MAX_LOGGED
    assert caplog.messages[0] == "ignored in requests, told once: unknown fields: field0"


async def answer(c):
    attempt = await begin_to_write(c, "a")
    await c.nodes["d0"].send(events.step_tokens(events.sampled(attempt, 1, EOS, events.STOP)))


@pytest.mark.parametrize("stream", [False, True])
def test_an_http_answer_carries_the_warning(tmp_path, stream):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            for fields, warning in (({"temprature": 0, "foo": 1}, "unknown fields: temprature, foo"), ({}, None)):
                body = {"messages": [HI], "stream": stream, **fields}
                asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
                await answer(c)
                reply = await asked
                assert (reply.status_code, reply.headers.get(HEADER)) == (200, warning)

    run(scenario())


KNOWN_FIELDS = [
    ("/v1/chat/completions", {"messages": [HI]}),
    ("/v1/completions", {"prompt": "a"}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [1]}),
]


def test_a_strict_server_refuses_over_http(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, strict_fields=True) as (_, client):
            for path, fields in KNOWN_FIELDS:
                reply = await client.post(path, json={**fields, "temprature": 0})
                assert reply.status_code == 400
                assert reply.json()["error"]["message"] == "unknown fields: temprature"
                assert reply.json()["error"]["param"] == "temprature"
                if path.endswith("tokenize"):
                    assert (await client.post(path, json=fields)).status_code == 200

    run(scenario())


def test_a_grpc_answer_ends_with_the_warning(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.stub.Generate(asked_by_a_later_version(), timeout=DEADLINE_S)
            await answer(c)
            assert (await read_to_end(call))[-1].HasField("complete")
            warning = dict(await call.trailing_metadata()).get(HEADER)
            assert warning == "unknown fields: 99, sampling_params.99"
            call = c.generate(request_id="known")
            await answer(c)
            await read_to_end(call)
            assert HEADER not in dict(await call.trailing_metadata())

    run(scenario())


def test_a_strict_server_refuses_over_grpc(tmp_path):
    async def scenario():
        async with cluster(tmp_path, strict_fields=True) as c:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_end(c.stub.Generate(asked_by_a_later_version(), timeout=DEADLINE_S))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "unknown fields: 99, sampling_params.99"

    run(scenario())


# ---- requests of more fields than are looked at ----

GENERATE = "/splitserve.v1.Inference/Generate"
UNKNOWN = b"\x98\x06\x01"  # field 99 with the number 1
GROUP = b"\x9b\x06\x9c\x06"  # field 99 begins as a group, and ends


def with_stops(num):
    return GenerateRequest(sampling_params=SamplingParams(stop=["x" * 300] * num))


def with_biases(num):
    return GenerateRequest(sampling_params=SamplingParams(logit_bias=dict.fromkeys(range(num), 1.0)))


def with_messages(num):
    return GenerateRequest(chat=ChatInput(messages=[ChatMessage(role="user", content="a")] * num))


LISTS = {"stops": with_stops, "biases": with_biases, "messages": with_messages}


@pytest.mark.parametrize("kind", LISTS)
def test_the_entries_of_lists_count(kind):
    check_num_fields(LISTS[kind](MAX_FIELDS - 1).SerializeToString())  # what holds the list is a field too
    part = "chat" if kind == "messages" else "sampling_params"
    with pytest.raises(RequestError, match=f"{part} has more fields and list entries than the limit, 4096") as caught:
        check_num_fields(LISTS[kind](MAX_FIELDS).SerializeToString())
    assert (caught.value.reason, caught.value.metadata["field"]) == ("BAD_PARAM", part)


def test_choices_count_too():
    choices = [Choice(choices=["x"] * num) for num in (MAX_FIELDS - 2, MAX_FIELDS - 1)]
    few, many = (GenerateRequest(sampling_params=SamplingParams(choice=each)) for each in choices)
    check_num_fields(few.SerializeToString())
    with pytest.raises(RequestError, match="choice has more fields"):
        check_num_fields(many.SerializeToString())


@pytest.mark.parametrize(
    ("message", "num_fields"),
    [
        (UNKNOWN, 1),
        (GROUP, 2),
        (with_messages(3).SerializeToString(), 4),  # which protobuf merges
        (GenerateRequest(text="a" * 1000, request_id="r", ttft_ms=1.5, priority=-1).SerializeToString(), 4),
        (GenerateRequest(tokenized=TokenizedInput(input_ids=range(10_000))).SerializeToString(), 1),
    ],
)
def test_fields_count_wherever_they_stand(message, num_fields):
    check_num_fields(message * (MAX_FIELDS // num_fields))
    with pytest.raises(RequestError):
        check_num_fields(message * (MAX_FIELDS // num_fields + 1))


@given(st.binary(max_size=200))
@example(b"\xff" * 100)
@example(b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x0a")
def test_any_bytes_may_come(message):
    check_num_fields(message)


@pytest.mark.parametrize("message", [UNKNOWN * 1_300_000, b"\x22\xfe\xff\x7f" + b"\x0a\x00" * 1_048_575])
def test_millions_of_fields_are_refused_at_the_api_server(tmp_path, message):
    async def scenario():
        async with cluster(tmp_path, nodes=()) as c:
            code, info, details = await refusal_of(c.channel.unary_stream(GENERATE)(message))
            assert (code.name, info.reason) == ("INVALID_ARGUMENT", "BAD_PARAM")
            assert details.endswith("has more fields and list entries than the limit, 4096")

    run(scenario())
