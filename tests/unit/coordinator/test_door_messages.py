"""What a door and control tell each other, there and back."""

import asyncio

import pytest

from coordinator.control.calls import CallRecord
from coordinator.control.capacity import Capacity
from coordinator.control.so_far import NOTHING, SoFar
from coordinator.doors import frames
from coordinator.doors.frames import framed, read_frame
from coordinator.doors.messages import (
    Situation,
    call_to_wire,
    error_from_wire,
    error_to_wire,
    info_from_wire,
    info_to_wire,
    plan_from_wire,
    situation_from_wire,
    situation_to_wire,
)
from coordinator.doors.validation import AnswerPlan
from coordinator.text.answers import TextOptions
from protos import doors_pb2, inference_pb2
from serving_core.errors import RequestError
from serving_core.requests import Pooling, SamplingParams

SAMPLING = SamplingParams(
    max_tokens=9, temperature=0.5, stop_token_ids=(1, 2), logit_bias=((3, -1.0),), seed=-(2**63), grammar="g"
)


def sent(message):
    """As it comes out at the other side."""
    return type(message).FromString(message.SerializeToString())


def plan(**changes):
    samplings = (SAMPLING, SamplingParams(**{**SAMPLING_FIELDS, "seed": 2**63 - 1}))
    fields = {"request_id": "r", "prompt": [5, 6], "cache_salt": "s", "samplings": samplings, "text": TextOptions()}
    return AnswerPlan(**{**fields, **changes})


SAMPLING_FIELDS = {name: getattr(SAMPLING, name) for name in SamplingParams.__dataclass_fields__}


@pytest.mark.parametrize(
    ("given", "so_fars"),
    [
        (plan(), [NOTHING, NOTHING]),
        (plan(adapter="a"), [SoFar((7, 8), 0, inference_pb2.FINISH_REASON_STOP, 1.5, False), SoFar(has_ended=True)]),
        (plan(samplings=(SAMPLING,), pooling=Pooling("mean", False, 4)), [NOTHING]),
        (plan(num_behind=5), [NOTHING, NOTHING]),
    ],
)
def test_a_call(given, so_fars):
    asked = inference_pb2.GenerateRequest(text="never told", ttft_ms=0.0, slo_class="c", priority=-1)
    wire = sent(
        call_to_wire(info_to_wire(CallRecord("r"), {}), given, so_fars, asked, number=4, begun_s=1.25, deadline_s=2.5)
    )
    assert plan_from_wire(wire) == (given, so_fars)
    assert (wire.number, wire.begun_s, wire.deadline_s) == (4, 1.25, 2.5)
    assert wire.limits == inference_pb2.GenerateRequest(ttft_ms=0.0, slo_class="c", priority=-1)


def test_what_is_known_of_a_call():
    record = CallRecord("r", "asker", operation="chat", model="m", arrived_s=1.5)
    carrier = {"traceparent": ["00-1"], "tracestate": ["a=1", "b=2"]}
    assert info_from_wire(sent(info_to_wire(record, carrier))) == (record, carrier)
    assert info_from_wire(sent(info_to_wire(record, {}))) == (record, {})


def test_an_error():
    error = error_from_wire(sent(error_to_wire(RequestError("BAD_PARAM", "no", field="x"))))
    assert (error.reason, str(error), error.metadata) == ("BAD_PARAM", "no", {"field": "x"})


@pytest.mark.parametrize(
    "situation",
    [
        Situation(),
        Situation(Capacity(0, 5, None, ()), True, "", frozenset({"a", "b"}), 3),
        Situation(Capacity(9, None, 6, ("x", "y")), False, "why", frozenset(), 0),
    ],
)
def test_the_situation(situation):
    assert situation_from_wire(sent(situation_to_wire(situation))) == situation


def read_all(*pieces):
    async def scenario():
        reader = asyncio.StreamReader()
        for piece in pieces:
            reader.feed_data(piece)
        reader.feed_eof()
        found = []
        while (message := await read_frame(reader)) is not None:
            found.append(message)
        return found

    return asyncio.run(scenario())


def test_frames_are_read_as_they_were_written():
    messages = [b"", b"one", doors_pb2.DoorEvent(hello=doors_pb2.DoorHello(number=3)).SerializeToString()]
    stream = b"".join(map(framed, messages))
    assert read_all(stream) == messages
    assert read_all(*(stream[i : i + 1] for i in range(len(stream)))) == messages


def test_a_frame_that_breaks_off_or_is_too_large_is_an_error(monkeypatch):
    for cut in (1, 4, 6):
        with pytest.raises(ConnectionError, match="broke off"):
            read_all(framed(b"hello")[:cut])
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 4)
    with pytest.raises(ConnectionError, match="a message of 5 bytes, the limit is 4"):
        read_all(framed(b"hello"))
