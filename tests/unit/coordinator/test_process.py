"""python -m coordinator: start, drain on a signal, and the sentences with which it does not start."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import grpc
import psutil
import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, ScriptedNode, read_all, run
from tests.tiny_models import write_fake_model


def command(*arguments):
    return [sys.executable, "-m", "coordinator", *map(str, arguments)]


@contextlib.asynccontextmanager
async def coordinator(folder, *arguments):
    """The process and its two ports."""
    write_fake_model(folder)
    process = await asyncio.create_subprocess_exec(
        *command(folder, "--port", 0, "--fleet-port", 0, "--http-port", -1, *arguments), stderr=subprocess.PIPE
    )
    try:
        line = await until_logged(process, b"dial port")
        yield process, *map(int, re.search(rb"dial port (\d+), nodes port (\d+)", line).groups())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_logged(process, text):
    """The next log line that holds the text."""
    async with asyncio.timeout(DEADLINE_S):
        async for line in process.stderr:
            if text in line:
                return line
    raise AssertionError(f"the coordinator ended before it logged {text}")


async def log_of(process):
    """The rest of the log, once the process has ended."""
    async with asyncio.timeout(DEADLINE_S):
        lines = (await process.stderr.read()).splitlines()
        await process.wait()
    return [json.loads(line)["event"] for line in lines]


def test_ctrl_c_in_a_terminal_while_doors_start_is_a_good_end(tmp_path):
    """Which tells every process of the terminal's group."""
    ports = ("--port", 0, "--fleet-port", 0, "--http-port", -1)
    words = command(write_fake_model(tmp_path), *ports, "--doors", 2)
    with subprocess.Popen(words, stderr=subprocess.PIPE, process_group=0, text=True) as process:
        try:
            while num_doors(process.pid) < 2:
                assert process.poll() is None
            os.killpg(process.pid, signal.SIGINT)
            _, log = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert [json.loads(line)["level"] for line in log.splitlines()] == ["info"] * len(log.splitlines())
    assert process.returncode == 0


def test_nobody_waits_for_doors_that_are_not_open(tmp_path):
    """These stand still, as ones that load for long do."""
    ports = ("--port", 0, "--fleet-port", 0, "--http-port", -1)
    words = command(write_fake_model(tmp_path), *ports, "--doors", 2)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            while num_doors(process.pid) < 2:
                assert process.poll() is None
            for door in psutil.Process(process.pid).children():
                door.suspend()
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert (process.returncode, json.loads(log.splitlines()[-1])["event"]) == (0, "stopped")


def num_doors(pid):
    return sum("coordinator.doors" in child.cmdline() for child in psutil.Process(pid).children())


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
                await until_logged(process, b"draining")
                with pytest.raises(grpc.aio.AioRpcError, match="the server is draining"):
                    await read_all(stub.Generate(inference_pb2.GenerateRequest(text="hi")))
                await p0.send(events.first_token(events.sampled(attempt, 0, 97, events.LENGTH)))
                assert (await read_all(call))[0] == "a"
            assert "stopped" in await log_of(process)
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
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
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
            line = await asyncio.to_thread(refusal, tmp_path, "--port", port)
            assert line == f"coordinator: --port {port} is in use on 127.0.0.1"

    run(scenario())
