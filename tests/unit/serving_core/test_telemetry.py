"""Log lines are JSON objects, or for people, and there is one for each event, whoever tells of it."""

import json
import logging
import subprocess
import sys

import pytest

from serving_core.process.telemetry import CURRENT_REQUEST, JsonFormatter, TextFormatter, about, parse_line


def line(**extra):
    record = logging.makeLogRecord(
        {"name": "n", "levelno": 20, "levelname": "INFO", "msg": "what %s", "args": ("for",), "created": 0.25, **extra}
    )
    record.msecs = 250.0
    return json.loads(JsonFormatter("decode", "d0").format(record))


def test_fields_are_keys_of_their_own():
    written = line(request_id="r", fields={"num_tokens": 3, "reason": 'a "b"\n'})
    assert written.pop("ts") == "1970-01-01T00:00:00.250Z"
    assert written == {
        "level": "info", "role": "decode", "node": "d0", "event": "what for",
        "request_id": "r", "num_tokens": 3, "reason": 'a "b"\n',
    }  # fmt: skip


def test_a_line_needs_neither():
    assert line().keys() == {"ts", "level", "role", "node", "event"}


def text(**extra):
    record = logging.makeLogRecord({"levelno": 30, "levelname": "WARNING", "msg": "no\nroom", "created": 0.25, **extra})
    record.msecs = 250.0
    return TextFormatter("d0").format(record)


def test_a_line_for_people_is_one_line_with_the_same_keys():
    written = text(request_id="r", fields={"num_tokens": 3, "message": 'a "b"\n', "node": "d 1"})
    assert written == (
        '1970-01-01T00:00:00.250Z warning d0: no\\nroom request_id=r num_tokens=3 message="a \\"b\\"\\n" node="d 1"'
    )
    assert parse_line(written)[0] == "warning"


def test_an_id_is_not_longer_than_ids_may_be():
    assert line(request_id="x" * 1000)["request_id"] == "x" * 128


def test_a_line_within_a_call_bears_its_id():
    token = CURRENT_REQUEST.set("r")
    try:
        assert line()["request_id"] == "r"
        assert line(**about("s/1", epoch=7)) == {**line(), "request_id": "s", "index": 1, "epoch": 7}
    finally:
        CURRENT_REQUEST.reset(token)
    assert "request_id" not in line()


PROGRAM = """
import gc, logging, sys, threading, warnings
from serving_core.process.telemetry import LogSettings, configure_logging
configure_logging("decode", "d0", LogSettings(log_format=sys.argv[1]))
class Grave:
    def __del__(self): raise KeyError("grave")
def fail(): raise OSError("in a thread")
logging.getLogger("uvicorn.error").warning("a library's words")
warnings.warn("old", DeprecationWarning, stacklevel=1)
thread = threading.Thread(target=fail)
thread.start()
thread.join()
Grave()
raise ValueError("at the end\\nof all")
"""


@pytest.mark.parametrize("log_format", ["auto", "json", "text"])
def test_what_others_write_is_a_line_of_ours(log_format):
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", PROGRAM, log_format], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout) == (1, "")
    parsed = [parse_line(line) for line in done.stderr.splitlines()]
    assert [level for level, _ in parsed] == ["warning", "warning", "error", "error", "critical"]
    [library, warning, thread, grave, end] = [event for _, event in parsed]
    assert library == "a library's words"
    assert "DeprecationWarning: old" in warning
    assert (thread, grave) == ("OSError: in a thread", "KeyError: 'grave'")
    assert end.startswith("ValueError: at the end")
