"""A door's end of the stream to a control that answers nothing: no call waits for ever, and no id stays live."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from coordinator.control.calls import CallRecord
from coordinator.doors import remote
from coordinator.doors.remote import RemoteControl
from coordinator.doors.validation import Limits, plan_answers
from protos import inference_pb2
from serving_core.errors import RequestError

DEADLINE_S = 60.0
LIMITS = Limits(("m",), 260, 1000, 20, 900, 900)


@asynccontextmanager
async def door(tmp_path):
    """Attached to a control that takes everything and says nothing."""
    taken = asyncio.Event()

    async def control(reader, writer):
        while await reader.read(2**16):
            taken.set()
        writer.close()

    server = await asyncio.start_unix_server(control, tmp_path / "control.sock")
    made = RemoteControl(str(tmp_path / "control.sock"), number=1, stream_interval=1)
    running = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await taken.wait()
            yield made, running
    finally:
        running.cancel()
        await asyncio.wait([running])
        server.close()


def asked(control):
    """A call that begins."""
    request = inference_pb2.GenerateRequest(request_id="r", sampling_params=inference_pb2.SamplingParams(max_tokens=2))
    plan = plan_answers(request, [1, 2], LIMITS, inference_pb2.SamplingParams())
    return control.begin(plan, [], request, deadline_s=1e9, record=CallRecord("r"))


async def test_a_call_that_is_not_admitted_ends_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "ADMIT_DEADLINE_S", 0.05)
    async with door(tmp_path) as (control, _):
        for _ in range(2):  # the id is free again
            with pytest.raises(RequestError, match=r"control has not answered within 0.05 s"):
                await asked(control)


async def test_nothing_is_kept_of_a_client_that_leaves_before(tmp_path):
    async with door(tmp_path) as (control, _):
        calls = [asyncio.create_task(asked(control)) for _ in range(2)]  # of one id: which may live control says
        await asyncio.sleep(0)
        assert len(control._calls) == 2
        for call in calls:
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert not control._calls
        assert not control._by_generation


async def test_a_door_ends_whose_control_reads_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "MAX_UNSENT_EVENTS", 3)
    async with door(tmp_path) as (control, running):
        for _ in range(4):
            control.count_call("h", "GET", 200, 0.1)  # all at once: none has left yet
        await running
