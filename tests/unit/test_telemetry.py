"""Log lines are JSON objects."""

import json
import logging

from engine.telemetry import JsonFormatter


def line(**extra):
    record = logging.makeLogRecord(
        {"name": "n", "levelno": 20, "levelname": "INFO", "msg": "what %s", "args": ("for",), **extra}
    )
    return json.loads(JsonFormatter("decode", "d0").format(record))


def test_fields_are_keys_of_their_own():
    written = line(request_id="r", fields={"num_tokens": 3, "reason": 'a "b"\n'})
    assert written.pop("ts").endswith("Z")
    assert written == {
        "level": "info", "role": "decode", "node": "d0", "event": "what for",
        "request_id": "r", "num_tokens": 3, "reason": 'a "b"\n',
    }  # fmt: skip


def test_a_line_needs_neither():
    assert line().keys() == {"ts", "level", "role", "node", "event"}
