"""What the roles write to a terminal, and to what is none."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import termios

import pytest

from splitserve.launch.launcher import free_port
from tests import forked
from tests.tiny_models import write_tiny_llama

DEADLINE_S = 240.0
SIZE = struct.pack("HHHH", 24, 100, 0, 0)  # lines, columns, and pixels that nobody asks for


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def flags_of(role):
    if role == "decode":
        return ["--coordinator", f"127.0.0.1:{free_port()}", "--num-kv-blocks", "8", "--block-size", "8"]
    return ["--grpc-port", str(free_port()), "--fleet-port", str(free_port()), "--http-port", "-1"]


ROLES = {"decode": b"weights loaded in", "coordinator": b"clients may dial port"}  # and what each says in time


@pytest.fixture
def started(model):
    """Starts a role with this file descriptor as its stderr; ends it with the test."""
    processes = []

    def start(role, stderr, *flags):
        processes.append(forked.popen("splitserve", role, str(model), *flags_of(role), *flags, stderr=stderr))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait(DEADLINE_S)


@pytest.fixture
def terminal():
    """Both ends of a pseudo-terminal of 100 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, SIZE)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read_until(descriptor, text, said=b""):
    while text not in said or not said.endswith(b"\n"):
        assert select.select([descriptor], [], [], DEADLINE_S)[0], f"{text!r} never came after {said!r}"
        said += os.read(descriptor, 4096)
    return said


@pytest.mark.parametrize("role", ROLES)
def test_a_terminal_gets_plain_lines(started, terminal, role):
    ours, theirs = terminal
    started(role, theirs)
    lines = read_until(ours, ROLES[role]).decode().replace("\r", "\n").splitlines()
    events = [line for line in lines if " info " in line]
    assert events
    assert all(re.match(rf"20\S+Z info {role}\S*: \w", line) for line in events)


def test_a_node_draws_a_bar_while_it_loads_weights_which_goes_when_they_are_there(started, terminal):
    ours, theirs = terminal
    started("decode", theirs)
    said = read_until(ours, ROLES["decode"]).decode()
    begin = r": loading \d+\.\d KiB of weights num_bytes=\d+ num_tensors=30\r\n"
    bar = r"loading weights: +0%\|.*"
    assert re.search(rf"{begin}\r{bar}\r +\r20\S+Z info \S+: weights loaded in", said, re.DOTALL)


@pytest.mark.parametrize("role", ROLES)
def test_what_is_no_terminal_gets_json(started, role):
    ours, theirs = os.pipe()
    started(role, theirs)
    os.close(theirs)
    lines = read_until(ours, ROLES[role]).splitlines()
    os.close(ours)
    assert {json.loads(line)["role"] for line in lines} == {role}


@pytest.mark.parametrize(("log_format", "begins"), [("json", "{"), ("text", "20")])
def test_a_format_that_is_asked_for_is_written_anywhere(started, terminal, log_format, begins):
    pipe = os.pipe()
    for ours, theirs in (terminal, pipe):
        started("coordinator", theirs, "--log-format", log_format)
        assert read_until(ours, ROLES["coordinator"]).decode().startswith(begins)
    for end in pipe:
        os.close(end)
