"""Signals to work that one may end, and Ctrl-C, however early it comes: exit code 130 and no traceback."""

import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from splitserve.launch.launcher import free_port
from tests import forked
from tests.effort import few
from tests.tiny_models import write_fake_model

# ---- signals to work, in processes of their own ----

DEADLINE_S = 240.0
WORK = """
import asyncio, signal
from splitserve.signals import run_until_signal

signal.signal(signal.SIGHUP, signal.{at_first})

async def work():
    print("working", flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        print("cleaning up", flush=True)

def on_hangup():
    print("hung up", flush=True)
    return {taken}

print(run_until_signal(work(){hook}).name)
"""


def told(*numbers, hook="", taken=False):
    """What the work and its end say when it gets these signals, each once the one before it was answered."""
    code = WORK.format(at_first="SIG_DFL", hook=hook, taken=taken)
    said = []
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        for number in numbers:
            said.append(process.stdout.readline())
            process.send_signal(number)
        rest, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    return [line.strip() for line in (*said, *rest.splitlines())]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_work_and_is_told(number):
    assert told(number) == ["working", "cleaning up", number.name]


def test_a_hangup_may_mean_something_else():
    said = told(signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, hook=", on_hangup", taken=True)
    assert said == ["working", "hung up", "hung up", "cleaning up", "SIGTERM"]


def test_a_hangup_that_means_nothing_else_ends_the_work():
    assert told(signal.SIGHUP, hook=", on_hangup") == ["working", "hung up", "cleaning up", "SIGHUP"]


def test_hangups_that_nohup_has_switched_off_stay_so():
    code = WORK.format(at_first="SIG_IGN", hook=", on_hangup", taken=False)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "working\n"
        for number in (signal.SIGHUP, signal.SIGTERM):
            process.send_signal(number)
        rest, _ = process.communicate(timeout=DEADLINE_S)
    assert rest.splitlines() == ["cleaning up", "SIGTERM"]


# ---- Ctrl-C ----

DEADLINE_S = 240.0
ROOMS = ("coordinator", "serving_node", "prefill_node", "decode_node")
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture
def silent():
    """A server that takes connections and says nothing, so that whoever asks it is there until it is interrupted."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE_S)
        yield listening


def asking(command, silent):
    """The command with its server; `up` needs none."""
    host, port = silent.getsockname()
    if command.startswith("bench"):
        return [*command.split(), "--backend", "openai", "--model", "m", "--base-url", f"http://{host}:{port}"]
    return [*command.split(), "--server", f"{host}:{port}"]


@pytest.mark.parametrize("imported", ["click", "splitserve.cli"])
@pytest.mark.parametrize("command", few(["status", "generate hi", "chat", "bench serve"]))
def test_ctrl_c_while_modules_are_imported_is_exit_code_130(command, imported, silent):
    end_interrupted(start_to_import(asking(command, silent), imported))


@pytest.mark.nightly
def test_ctrl_c_while_up_is_imported_is_exit_code_130(tmp_path):
    model = str(write_fake_model(tmp_path / "fake"))
    arguments = ["up", model, "--grpc-port", str(free_port()), "--http-port", "-1"]
    end_interrupted(start_to_import(arguments, "splitserve.launch.launcher"))


@pytest.mark.parametrize("room", few(ROOMS, *ROOMS[:2]))
def test_ctrl_c_while_a_process_of_a_cluster_is_imported_is_exit_code_130(room):
    end_interrupted(start_to_import(["nowhere"], "click", room))


@pytest.mark.parametrize("room", ["coordinator", "mixed"])
def test_ctrl_c_while_a_process_of_a_cluster_loads_is_exit_code_130_at_once(tmp_path, room):
    model = str(write_fake_model(tmp_path / "fake"))
    process = forked.popen("tests.unit.splitserve.endless_load", room, model, **PIPES, text=True)
    while process.stderr.readline() != "loading\n":
        assert process.poll() is None
    end_interrupted(process)


@pytest.mark.nightly
def test_ctrl_c_that_comes_to_another_rank_first_is_exit_code_130_too(tmp_path):
    """While ranks wait for each other it may be the only one that can do something about it."""
    arguments = [str(write_fake_model(tmp_path / "fake")), "--tensor-parallel-size", "2"]
    with start_command(arguments, module="serving_node") as process:
        while not (followers := ranks_of(process)):
            assert process.poll() is None
            time.sleep(0.01)
        followers[0].send_signal(signal.SIGINT)
        assert process.wait(timeout=DEADLINE_S) == 130


def ranks_of(process):
    """Those that it has started, once they load what they compute with: before that it may be Python itself that is
    interrupted, which ends with 1."""
    first = psutil.Process(process.pid)
    others = [child for child in first.children() if child.cmdline() != first.cmdline()]
    return [child for child in others if any("torch" in each.path for each in child.memory_maps())]


@pytest.mark.parametrize("command", ["status", "generate hi", "chat", "bench serve"])
def test_ctrl_c_while_a_server_is_waited_for_is_exit_code_130(command, silent):
    process = forked.popen("splitserve", *asking(command, silent), **PIPES, text=True)
    with silent.accept()[0]:
        end_interrupted(process)


def start_command(arguments, *python_options, module="splitserve", pipe_bytes=-1):
    command = [sys.executable, *python_options, "-m", module, *arguments]
    return subprocess.Popen(command, **PIPES, text=True, pipesize=pipe_bytes)


def start_to_import(arguments, imported, module="splitserve"):
    """Returns when the command has imported this. It is still at its imports: nobody reads any more what it says of
    them, and the pipe takes a page."""
    process = start_command(arguments, "-X", "importtime", module=module, pipe_bytes=mmap.PAGESIZE)
    said, descriptor = b"", process.stderr.fileno()
    while not re.search(rf"\|\s+{re.escape(imported)}\n$".encode(), said):
        said = b"" if said.endswith(b"\n") else said
        said += (read := os.read(descriptor, 1))
        assert read, f"{imported} was never imported"
    return process


def end_interrupted(process):
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in errors
    assert "Aborted" not in errors


def test_ctrl_c_that_a_shell_has_switched_off_stays_so():
    code = (
        "from serving_core.process.interrupts import end_at_once; "
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "end_at_once(); signal.raise_signal(signal.SIGINT); print('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "goes on\n")


def test_ctrl_c_ends_an_interpreter_that_does_not_end_by_itself():
    code = (
        "import atexit, sys, time; from splitserve import __main__; sys.argv[1:] = ['--version']; "
        "atexit.register(lambda: (print('ending', flush=True), time.sleep(600))); __main__.run()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert [process.stdout.readline() for _ in range(2)][1] == "ending\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGINT
