"""Signals to work that one may end, in processes of their own."""

import signal
import subprocess
import sys

import pytest

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
