"""A coordinator with two door processes, its nodes spoken for by the test."""

import asyncio
import shutil
import sys
import tempfile

import grpc
import pytest

from coordinator import door_processes
from protos import fleet_pb2, inference_pb2, inference_pb2_grpc
from serving_core.errors import SettingsError
from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, begin, cluster, hand_over, read_all, refusal_of, run, step, until_serving

OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


async def answer(c, call, text, **options):
    """Has the call answered with the text, a token at a time."""
    attempt, job = await begin(c)
    await hand_over(c, attempt, text[0], num_cached_tokens=0)
    for index, char in enumerate(text[1:], start=1):
        finish = inference_pb2.FINISH_REASON_LENGTH if index == len(text) - 1 else 0
        await step(c.nodes["d0"], attempt, index, char, finish)
    return attempt, job


def test_answers_refusals_and_stops_pass_through_the_doors(tmp_path):
    async def scenario():
        async with cluster(tmp_path, doors=2, stream_interval=4) as c:
            await until_serving(c)
            call = c.generate("hello", max_tokens=10, seed=3)
            _, job = await answer(c, call, "abcdefghij")
            assert (job.sampling_params.seed, job.num_prompt_tokens) == (3, 5)
            text, token_ids, completes = await read_all(call)
            assert (text, token_ids) == ("abcdefghij", list(map(ord, "abcdefghij")))
            assert completes[0].finish_reason == inference_pb2.FINISH_REASON_LENGTH

            call = c.generate("hello", request_id="s", max_tokens=10, stop=["de"])
            attempt, _ = await begin(c)
            await hand_over(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "bcde")
            await c.nodes["d0"].answer_cancel(attempt)
            text, _, (complete,) = await read_all(call)
            assert (text, complete.matched_stop_str, complete.completion_tokens) == ("abc", "de", 5)

            code, info, _ = await refusal_of(c.generate("hello", request_id="t", max_tokens=0))
            assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_PARAM")
            asked = inference_pb2.GenerateRequest(request_id="u", text="hello", slo_class="x")
            code, info, _ = await refusal_of(c.stub.Generate(asked))  # which control refuses
            assert (code, info.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "slo_class")
            await c.until_nothing_is_live()

    run(scenario())


def test_a_call_ends_with_its_client_at_whatever_door(tmp_path):
    async def scenario():
        async with cluster(tmp_path, doors=2) as c:
            await until_serving(c)
            target = f"127.0.0.1:{c.server.port}"
            async with grpc.aio.insecure_channel(target, options=OWN_CONNECTION) as channel:
                request = inference_pb2.GenerateRequest(request_id="r", text="hello")
                call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
                attempt, _ = await begin(c)
                await hand_over(c, attempt, "a")
                assert (await call.read()).chunk.text == "a"
                call.cancel()
            await c.nodes["d0"].answer_cancel(attempt)
            await c.until_nothing_is_live()

    run(scenario())


def test_the_answers_of_a_door_that_is_lost_have_failed_and_nodes_let_go_of_them(tmp_path):
    async def scenario():
        async with cluster(tmp_path, doors=2) as c:
            await until_serving(c)
            call = c.generate("hello", n=2)
            attempts = [(await begin(c))[0] for _ in range(2)]
            await hand_over(c, attempts[0], "a")
            c.server._public._kill(door_with_calls(c))
            with pytest.raises(grpc.aio.AioRpcError):
                await read_all(call)
            assert await c.nodes["p0"].command("cancel") == fleet_pb2.Cancel(attempt=attempts[1])
            for attempt in attempts:
                await c.nodes["d0"].answer_cancel(attempt)
            await c.nodes["p0"].send(events.cancelled(attempts[1]))
            call = c.stub.Generate(inference_pb2.GenerateRequest(request_id="r", text="hello"), wait_for_ready=True)
            await answer(c, call, "ab")
            assert (await read_all(call))[0] == "ab"
            await c.until_nothing_is_live()
            assert c.server._metrics.failed == {"WORKER_LOST": 2}
            assert c.server._metrics.finished == {"length": 1}

    run(scenario())


def door_with_calls(c):
    [number] = [number for number, link in c.server._public._service._links.items() if link.calls]
    return number


def test_the_end_of_a_door_that_is_yet_to_open_is_taken_note_of(tmp_path):
    async def scenario():
        async with cluster(tmp_path, doors=2) as c:
            doors = c.server._public
            first = doors._processes[1]
            doors._kill(1)
            await until(lambda: doors._processes.get(1, first) is not first)
            again = doors._processes[1]
        assert again.returncode is not None

    run(scenario())


def test_a_door_that_does_not_come_back_in_time_is_started_again(tmp_path, monkeypatch, caplog):
    """As where it hangs while it loads: the first time it stands for one that does."""
    python = sys.executable

    async def scenario():
        async with cluster(tmp_path / "model", doors=2) as c:
            doors = c.server._public
            hanging = tmp_path / "hanging"
            hanging.write_text("#!/bin/sh\nexec sleep 1000\n")
            hanging.chmod(0o700)
            monkeypatch.setattr(sys, "executable", str(hanging))
            monkeypatch.setattr(door_processes, "START_DEADLINE_S", 0.1)
            doors._kill(1)
            await until(lambda: "door 1 does not listen after 0.1 s" in caplog.text)
            monkeypatch.setattr(door_processes, "START_DEADLINE_S", DEADLINE_S)
            monkeypatch.setattr(sys, "executable", python)
            await until(lambda: doors._service.opened[1].is_set())

    run(scenario())


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_door_that_cannot_open_is_the_end_of_the_start(tmp_path, monkeypatch):
    async def scenario():
        with pytest.raises(SettingsError, match=r"door \d has ended at its start, with code 1"):
            async with cluster(tmp_path, doors=2):
                pass

    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    run(scenario())


def test_a_temporary_folder_whose_path_is_too_long_for_sockets_is_named(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()

    async def scenario():
        with pytest.raises(SettingsError, match=rf"^{folder}/.* is longer than a socket's path may be \(107\)"):
            async with cluster(tmp_path, doors=2):
                pass

    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run(scenario())
    assert list(folder.iterdir()) == []
