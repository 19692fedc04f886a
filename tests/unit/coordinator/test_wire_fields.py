"""Requests of more fields than are looked at."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.doors.wire_fields import MAX_FIELDS, check_num_fields
from protos.inference_pb2 import ChatInput, ChatMessage, Choice, GenerateRequest, SamplingParams, TokenizedInput
from serving_core.errors import RequestError
from tests.scripted_nodes import cluster, refusal_of, run

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
def test_millions_of_fields_are_refused_at_the_door(tmp_path, message):
    async def scenario():
        async with cluster(tmp_path, nodes=()) as c:
            code, info, details = await refusal_of(c.channel.unary_stream(GENERATE)(message))
            assert (code.name, info.reason) == ("INVALID_ARGUMENT", "BAD_PARAM")
            assert details.endswith("has more fields and list entries than the limit, 4096")

    run(scenario())
