"""Failpoints: what the variable may say, what happens when, and that without it nothing of them is there."""

import os
import signal
import subprocess
import sys
import time

import pytest

from protos import fleet_pb2
from serving_core.errors import SettingsError
from serving_core.process import failpoints
from serving_core.process.failpoint_actions import COMMANDS, EVENTS, FailpointReached, Failpoints

ALONE = {key: value for key, value in os.environ.items() if not key.startswith("SPLITSERVE_")}
DEADLINE_S = 240.0


@pytest.fixture
def armed(monkeypatch):
    """Arms this process with rules, and disarms it when the test is over."""
    monkeypatch.setattr(failpoints, "_act", None)

    def arm(text):
        monkeypatch.setenv(failpoints.ENVIRONMENT, text)
        failpoints.arm()

    return arm


def test_the_names_are_those_of_the_messages():
    """Those of an attached node; hello and what answers it come before."""
    commands = {field.name for field in fleet_pb2.NodeCommand.DESCRIPTOR.oneofs_by_name["command"].fields}
    events = {field.name for field in fleet_pb2.NodeEvent.DESCRIPTOR.oneofs_by_name["event"].fields}
    assert set(COMMANDS) == commands - {"welcome", "refusal"}
    assert set(EVENTS) == events - {"hello"}


def test_a_rule_with_a_number_acts_that_time_alone(armed):
    armed("sent:3=raise; commit=raise")
    failpoints.reach("sent")
    failpoints.reach("sent")
    with pytest.raises(FailpointReached):
        failpoints.reach("sent")
    failpoints.reach("sent")
    for _ in range(2):
        with pytest.raises(FailpointReached):
            failpoints.reach("commit")


def test_messages_are_told_apart_by_their_kind(armed):
    armed("on.reserve=raise;after.reserved=raise")
    failpoints.reach("on", fleet_pb2.NodeCommand(prefill=fleet_pb2.Prefill()))
    failpoints.reach("before", fleet_pb2.NodeEvent(reserved=fleet_pb2.Reserved()))
    with pytest.raises(FailpointReached):
        failpoints.reach("on", fleet_pb2.NodeCommand(reserve=fleet_pb2.Reserve()))
    with pytest.raises(FailpointReached):
        failpoints.reach("after", fleet_pb2.NodeEvent(reserved=fleet_pb2.Reserved()))


def test_sleep_stops_the_process_for_so_long(armed):
    armed("step:2=sleep:0.2")
    failpoints.reach("step")
    began_at = time.monotonic()
    failpoints.reach("step")
    assert time.monotonic() - began_at >= 0.2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sent", "a rule is POINT=ACTION"),
        ("sent=explode", "an action kill, raise or sleep:SECONDS"),
        ("sent=kill:3", "a rule is POINT=ACTION"),
        ("snet=kill", "there is no point 'snet', perhaps 'sent'"),
        ("on.first_tokens=kill", "perhaps 'on.first_token'"),
        ("sent:0=kill", "N must be a whole number from 1 on, not '0'"),
        ("sent:x=kill", "N must be a whole number from 1 on, not 'x'"),
        ("sent:=kill", "N must be a whole number from 1 on, not ''"),
        ("step=sleep", "up to 600 seconds, not ''"),
        ("step=sleep:-1", "up to 600 seconds, not '-1'"),
        ("step=sleep:nan", "up to 600 seconds, not 'nan'"),
        ("step=sleep:601", "up to 600 seconds, not '601'"),
    ],
)
def test_other_words_are_refused_with_the_reason(text, why):
    with pytest.raises(SettingsError) as refused:
        Failpoints(f"commit=kill;{text}", "SPLITSERVE_FAILPOINTS")
    assert f"SPLITSERVE_FAILPOINTS has {text!r}: " in str(refused.value)
    assert why in str(refused.value)


def test_spaces_and_empty_rules_do_not_matter(armed):
    armed(" sent:1 = raise ;; ")
    with pytest.raises(FailpointReached):
        failpoints.reach("sent")


def test_a_process_does_not_start_with_words_that_it_does_not_know():
    done = _run(["-m", "coordinator", "no/such/folder"], "snet=kill")
    assert done.returncode == 2
    assert "there is no point 'snet', perhaps 'sent'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_kill_ends_the_process_at_once():
    code = (
        "from serving_core.process import failpoints as f; f.arm(); "
        "f.reach('sent'); print('on'); f.reach('sent'); print('x')"
    )
    done = _run(["-uc", code], "sent:2=kill")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "on\n")


def test_without_the_variable_nothing_of_it_is_imported():
    code = (
        "import sys; from serving_core.process import failpoints as f; f.arm(); f.reach('sent')\n"
        "sys.exit('serving_core.process.failpoint_actions' in sys.modules)"
    )
    assert _run(["-c", code], "").returncode == 0
    assert _run(["-c", code], "sent:9=kill").returncode == 1


def _run(arguments, rules):
    env = {**ALONE, failpoints.ENVIRONMENT: rules}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=DEADLINE_S)
