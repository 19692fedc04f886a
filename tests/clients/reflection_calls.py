"""A gRPC client that knows nothing but the address, as grpcurl: the rest it asks the server by reflection.

tests/scripted_model.py has what the model says.
"""

import os

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "splitserve.v1.Inference"
DEADLINE_S = 300.0


@pytest.fixture
def channel():
    with grpc.insecure_channel(os.environ["GRPC_TARGET"]) as channel:
        yield channel


@pytest.fixture
def call(channel):
    """Calls a method by its name, with JSON and to JSON."""
    database = ProtoReflectionDescriptorDatabase(channel)
    assert SERVICE in database.get_services()
    service = DescriptorPool(database).FindServiceByName(SERVICE)

    def call(name, fields):
        method = service.FindMethodByName(name)
        asked, answered = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        serialization = {"request_serializer": asked.SerializeToString, "response_deserializer": answered.FromString}
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        request = json_format.ParseDict(fields, asked())
        reply = make(f"/{SERVICE}/{name}", **serialization)(request, timeout=DEADLINE_S)
        return map(json_format.MessageToDict, reply if method.server_streaming else [reply])

    return call


def test_an_answer_is_streamed(call):
    *chunks, last = call("Generate", {"text": "ab", "samplingParams": {"maxTokens": 8}})
    assert "".join(each["chunk"].get("text", "") for each in chunks) == "cdefghab"
    assert last["complete"]["finishReason"] == "FINISH_REASON_LENGTH"
    assert last["complete"]["completionTokens"] == 8


def test_a_chat_keeps_to_its_form(call):
    chat = {"messages": [{"role": "user", "content": "yes or no?"}]}
    *chunks, _ = call("Generate", {"chat": chat, "samplingParams": {"choice": {"choices": ["yes", "no"]}}})
    assert "".join(each["chunk"].get("text", "") for each in chunks) in ("yes", "no")


def test_an_answer_is_aborted(call):
    fields = {"requestId": "endless", "text": "a", "samplingParams": {"maxTokens": 60_000}}
    answer = call("Generate", fields)
    next(answer)
    [reply] = call("Abort", {"requestIds": ["endless"]})
    assert reply == {"aborted": ["endless"]}
    *_, last = answer
    assert last["complete"]["finishReason"] == "FINISH_REASON_ABORT"


def test_the_model_is_described(call):
    [info] = call("GetModelInfo", {})
    assert (info["servedModelName"], info["maxModelLen"]) == ("scripted", 65536)


def test_what_is_wrong_is_told(call):
    with pytest.raises(grpc.RpcError) as error:
        [*call("Generate", {"text": "a", "samplingParams": {"temperature": -1}})]
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "temperature must be within" in error.value.details()
