"""Coordinator processes: `python -m coordinator`, which drains on a signal, and one with API servers."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import grpc
import psutil
import pytest
import pytest_asyncio

from coordinator import api_server_processes
from protos import fleet_pb2, inference_pb2, inference_pb2_grpc
from serving_core.errors import SettingsError
from tests import fleet_events as events
from tests import forked
from tests.scripted_nodes import (
    DEADLINE_S,
    ScriptedNode,
    begin,
    begin_to_write,
    cluster,
    read_all,
    refusal_of,
    run,
    step,
    transfer,
    until_serving,
)
from tests.tiny_models import write_fake_model
from tests.unit.coordinator.http_kit import in_module_loop, plain_client, until, url_of

OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
PORTS = ("--grpc-port", "0", "--fleet-port", "0", "--http-port", "-1")


@contextlib.asynccontextmanager
async def coordinator(folder, *arguments):
    """Start one; yield the process and its two ports."""
    write_fake_model(folder)
    with forked.popen("coordinator", *map(str, (folder, *PORTS, *arguments)), stderr=subprocess.PIPE) as process:
        try:
            line = await until_logged(process, b"dial port")
            yield process, *map(int, re.search(rb"dial port (\d+), nodes port (\d+)", line).groups())
        finally:
            process.kill()


async def until_logged(process, text):
    """Return the next log line that holds the text."""
    async with asyncio.timeout(DEADLINE_S):
        while line := await asyncio.to_thread(process.stderr.readline):
            if text in line:
                return line
    raise AssertionError(f"the coordinator ended before it logged {text}")


async def log_of(process):
    """Return the events in the rest of the log, once the process has ended."""
    async with asyncio.timeout(DEADLINE_S):
        log = await asyncio.to_thread(process.stderr.read)
        await asyncio.to_thread(process.wait)
    return [json.loads(line)["event"] for line in log.splitlines()]


@contextlib.contextmanager
def with_starting_api_servers(folder, **options):
    """Start a coordinator with two API servers; yield its process and theirs, which do not listen yet."""
    words = (str(write_fake_model(folder)), *PORTS, "--api-server-count", "2")
    with forked.popen("coordinator", *words, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            while len(starting := api_servers_of(process.pid)) < 2:
                assert process.poll() is None
                time.sleep(0.01)
            yield process, starting
        finally:
            process.kill()


def api_servers_of(pid):
    """Return the processes of API servers that this one has started."""
    return [child for child in psutil.Process(pid).children() if is_api_server(child)]


def is_api_server(process):
    return "coordinator.api" in words_of([process])


def words_of(processes):
    """Return the words of these processes' command lines."""
    words = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            words.update(process.cmdline())
    return words


def test_ctrl_c_in_a_terminal_while_api_servers_start_is_a_good_end(tmp_path):
    """Which tells every process of the terminal's group."""
    with with_starting_api_servers(tmp_path, process_group=0) as (process, _):
        os.killpg(process.pid, signal.SIGINT)
        _, log = process.communicate(timeout=DEADLINE_S)
    assert [json.loads(line)["level"] for line in log.splitlines()] == ["info"] * len(log.splitlines())
    assert process.returncode == 0


def test_nobody_waits_for_api_servers_that_are_not_open(tmp_path):
    """These stand still, as ones that load for long do."""
    with with_starting_api_servers(tmp_path) as (process, api_servers):
        for api_server in api_servers:
            api_server.suspend()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, json.loads(log.splitlines()[-1])["event"]) == (0, "stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_an_answer_finish(tmp_path, number):
    async def scenario():
        async with coordinator(tmp_path) as (process, port, fleet_port):
            p0, d0 = await attach(fleet_port)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                call = stub.Generate(inference_pb2.GenerateRequest(text="hi"))
                attempt = (await p0.command("prefill")).job.attempt
                process.send_signal(number)
                await until_logged(process, b"draining: new calls are refused, and live ones have 30 s to end")
                with pytest.raises(grpc.aio.AioRpcError, match="the server is draining"):
                    await read_all(stub.Generate(inference_pb2.GenerateRequest(text="hi")))
                await p0.send(events.first_token(events.sampled(attempt, 0, 97, events.LENGTH)))
                assert (await read_all(call))[0] == "a"
            log = await log_of(process)
            assert {"decode node d0 has left: the server has stopped", "stopped"} <= set(log)
            assert process.returncode == 0
            await p0.close()
            await d0.close()

    run(scenario())


def test_sighup_has_the_file_of_api_keys_read_again(tmp_path):
    async def scenario():
        file = tmp_path / "keys"
        file.write_text("ann key-of-ann\n")
        async with coordinator(tmp_path / "model", "--api-keys-file", file) as (process, port, _):
            await ask(port, "key-of-ann")
            file.write_text("bob key-of-bob\n")
            process.send_signal(signal.SIGHUP)
            await until_logged(process, b"1 API keys are in force")
            await ask(port, "key-of-bob")
            with pytest.raises(grpc.aio.AioRpcError, match="the API key is missing or wrong"):
                await ask(port, "key-of-ann")

    run(scenario())


async def ask(port, key):
    """Any call, with an API key."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub, metadata = inference_pb2_grpc.InferenceStub(channel), (("authorization", f"Bearer {key}"),)
        await stub.GetLoads(inference_pb2.GetLoadsRequest(), timeout=DEADLINE_S, metadata=metadata)


def test_a_second_signal_does_not_wait(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as (process, port, fleet_port):
            p0, d0 = await attach(fleet_port)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                call = stub.Generate(inference_pb2.GenerateRequest(text="hi"))
                await p0.command("prefill")
                process.send_signal(signal.SIGINT)
                await until_logged(process, b"draining")
                process.send_signal(signal.SIGINT)
                with pytest.raises(grpc.aio.AioRpcError, match="the server has stopped"):
                    await read_all(call)
            await log_of(process)
            assert process.returncode == 0
            await p0.close()
            await d0.close()

    run(scenario())


async def attach(fleet_port):
    nodes = []
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        nodes.append(await ScriptedNode.dial(fleet_port, events.hello(name, role)))
        await nodes[-1].command("welcome")
    return nodes


def refusal(*arguments, **environment):
    """The one line on stderr of a coordinator that must not start."""
    environment = {**os.environ, **environment}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with forked.popen("coordinator", *map(str, arguments), **options) as process:
        told, error = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, told) == (2, "")
    [line] = error.splitlines()
    return line


def test_why_it_does_not_start(tmp_path):
    write_fake_model(tmp_path)
    assert "no model folder was given" in refusal()
    assert "there is no model folder" in refusal(tmp_path / "nowhere")
    assert "SPLITSERVE_API_KEY" in refusal(tmp_path, "--host", "0.0.0.0")
    assert "SPLITSERVE_FLEET_SECRET" in refusal(tmp_path, "--host", "0.0.0.0", "--fleet-host", "0.0.0.0",
                                                SPLITSERVE_API_KEY="k")  # fmt: skip


def test_a_port_in_use_is_named(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as (_, port, _fleet_port):
            line = await asyncio.to_thread(refusal, tmp_path, "--grpc-port", port)
            assert line == f"coordinator: --grpc-port {port} is in use on 127.0.0.1"

    run(scenario())


# ---- two API servers ----


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_api_servers(tmp_path_factory):
    """Serve with two API servers."""
    folder = tmp_path_factory.mktemp("model")
    async with cluster(folder, api_server_count=2, stream_interval=4, http_port=0) as c:
        yield c


@pytest_asyncio.fixture(loop_scope="module")
async def api_servers(two_api_servers):
    """Return the cluster, of which both API servers serve, before a test and after it."""
    await until_serving(two_api_servers.stub)
    yield two_api_servers
    await until(lambda: len(listening(two_api_servers)) == 2)
    await two_api_servers.until_nothing_is_live()


def listening(c):
    """Return the processes of API servers that listen on the cluster's port."""
    return [
        api_server for api_server in api_servers_of(os.getpid()) if ("LISTEN", c.server.port) in connections(api_server)
    ]


def connected(c):
    """Return the processes of API servers that gRPC clients are connected to."""
    return [api_server for api_server in listening(c) if ("ESTABLISHED", c.server.port) in connections(api_server)]


def connections(process):
    with contextlib.suppress(psutil.Error):
        return [(each.status, each.laddr.port) for each in process.net_connections("tcp")]
    return []


async def answer(c, text):
    """Have the next call answered with the text, a token at a time."""
    attempt, job = await begin(c)
    await transfer(c, attempt, text[0], num_cached_tokens=0)
    for index, char in enumerate(text[1:], start=1):
        finish = inference_pb2.FINISH_REASON_LENGTH if index == len(text) - 1 else 0
        await step(c.nodes["d0"], attempt, index, char, finish)
    return attempt, job


@in_module_loop
async def test_answers_refusals_and_stops_pass_through_the_api_servers(api_servers):
    c = api_servers
    call = c.generate("hello", max_tokens=10, seed=3)
    _, job = await answer(c, "abcdefghij")
    assert (job.sampling_params.seed, job.num_prompt_tokens) == (3, 5)
    text, token_ids, completes = await read_all(call)
    assert (text, token_ids) == ("abcdefghij", list(map(ord, "abcdefghij")))
    assert completes[0].finish_reason == inference_pb2.FINISH_REASON_LENGTH

    call = c.generate("hello", request_id="s", max_tokens=10, stop=["de"])
    attempt = await begin_to_write(c, "a")
    await step(c.nodes["d0"], attempt, 1, "bcde")
    await c.nodes["d0"].answer_cancel(attempt)
    text, _, (complete,) = await read_all(call)
    assert (text, complete.matched_stop_str, complete.completion_tokens) == ("abc", "de", 5)

    code, info, _ = await refusal_of(c.generate("hello", request_id="t", max_tokens=0))
    assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_PARAM")
    asked = inference_pb2.GenerateRequest(request_id="u", text="hello", slo_class="x")
    code, info, _ = await refusal_of(c.stub.Generate(asked))  # which control refuses
    assert (code, info.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "slo_class")


@in_module_loop
async def test_a_call_ends_with_its_client_at_whatever_api_server(api_servers):
    c = api_servers
    target = f"127.0.0.1:{c.server.port}"
    async with grpc.aio.insecure_channel(target, options=OWN_CONNECTION) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await until_serving(stub)
        call = stub.Generate(inference_pb2.GenerateRequest(request_id="r", text="hello"))
        attempt = await begin_to_write(c, "a")
        assert (await call.read()).chunk.text == "a"
        call.cancel()
    await c.nodes["d0"].answer_cancel(attempt)


@in_module_loop
async def test_a_later_call_takes_the_place_of_one_at_whatever_api_server(api_servers):
    c = api_servers

    def go_on(call_number, *so_far):
        fields = {"call_number": call_number, "so_far": so_far}
        params = inference_pb2.SamplingParams(seed=7, max_tokens=8)
        request = inference_pb2.GenerateRequest(request_id="r", text="hello", sampling_params=params, **fields)
        return c.stub.Generate(request, timeout=DEADLINE_S)

    before = go_on(0)
    attempt = await begin_to_write(c, "a")
    assert (await before.read()).chunk.text == "a"
    so_far = inference_pb2.OutputSoFar(token_ids=b"a", num_chars=1)
    later = go_on(2, so_far)
    await c.nodes["d0"].answer_cancel(attempt)
    again, job = await begin(c)
    assert list(job.token_ids) == [*b"helloa"]
    assert (await refusal_of(before))[1].reason == "ABORTED"
    assert (await refusal_of(go_on(1, so_far)))[1].reason == "DUPLICATE_REQUEST_ID"
    await transfer(c, again, "b", 1)
    await step(c.nodes["d0"], again, 2, "c", inference_pb2.FINISH_REASON_LENGTH)
    chunks = [response.chunk.text async for response in later]
    assert "".join(chunks) == "bc"


@in_module_loop
async def test_the_answers_of_a_api_server_that_is_lost_have_failed_and_nodes_let_go_of_them(api_servers):
    c = api_servers
    num_before = await num_ended(c)
    call = c.generate("hello", n=2)
    attempts = [(await begin(c))[0] for _ in range(2)]
    await transfer(c, attempts[0], "a")
    await until(lambda: len(connected(c)) == 1)  # connections of other tests have ended
    [its_api_server] = connected(c)
    its_api_server.kill()
    with pytest.raises(grpc.aio.AioRpcError):
        await read_all(call)
    assert await c.nodes["p0"].command("cancel") == fleet_pb2.Cancel(attempt=attempts[1])
    for attempt in attempts:
        await c.nodes["d0"].answer_cancel(attempt)
    await c.nodes["p0"].send(events.cancelled(attempts[1]))
    call = c.stub.Generate(inference_pb2.GenerateRequest(request_id="r", text="hello"), wait_for_ready=True)
    _, (text, *_) = await asyncio.gather(answer(c, "ab"), read_all(call))
    assert text == "ab"
    num_failed, num_finished = await num_ended(c)
    assert (num_failed - num_before[0], num_finished - num_before[1]) == (2, 1)


async def num_ended(c):
    """Return how many answers have failed with their API server, and how many ended by their length."""
    async with plain_client(base_url=url_of(c)) as client:
        text = (await client.get("/metrics")).text
    found = []
    for labels in ('requests_failed_total{reason="WORKER_LOST"}', 'requests_finished_total{finished_reason="length"}'):
        lines = [line for line in text.splitlines() if line.startswith(f"splitserve_{labels}")]
        found.append(sum(float(line.rpartition(" ")[2]) for line in lines))
    return found


@in_module_loop
async def test_an_api_server_that_does_not_come_back_in_time_is_started_again(
    api_servers, tmp_path, monkeypatch, caplog
):
    """As where it hangs while it loads: the first time a program that does nothing stands for one that does."""
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 1000\n")
    hanging.chmod(0o700)
    with monkeypatch.context() as impatient:
        impatient.setattr(api_server_processes, "START_DEADLINE_S", 0.1)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", str(hanging))
            listening(api_servers)[0].kill()
            await until(lambda: "does not listen after 0.1 s" in caplog.text)
        await until(lambda: not {str(hanging), "sleep"} & words_of(psutil.Process().children()))
    await until(lambda: len(listening(api_servers)) == 2)


def test_the_end_of_a_api_server_that_is_yet_to_open_is_taken_note_of(tmp_path):
    async def scenario():
        async with cluster(tmp_path, api_server_count=2) as c:
            before = set(api_servers_of(os.getpid()))
            listening(c)[0].kill()
            await until(lambda: set(api_servers_of(os.getpid())) - before)
            [again] = set(api_servers_of(os.getpid())) - before
        assert not again.is_running()

    run(scenario())


def test_an_api_server_that_cannot_open_is_the_end_of_the_start(tmp_path, monkeypatch):
    async def scenario():
        with pytest.raises(SettingsError, match=r"API server \d has ended at its start, with code 1"):
            async with cluster(tmp_path, api_server_count=2):
                pass

    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    run(scenario())


def test_a_temporary_folder_whose_path_is_too_long_for_sockets_is_named(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()

    async def scenario():
        with pytest.raises(SettingsError, match=rf"^{folder}/.* is longer than a socket's path may be \(107\)"):
            async with cluster(tmp_path, api_server_count=2):
                pass

    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run(scenario())
    assert list(folder.iterdir()) == []
