"""Logging of a process: JSON lines on stderr with the role, the node and, where there is one, the request."""

import json
import logging
import sys
import time


class JsonFormatter(logging.Formatter):
    """One JSON object a line. `extra={"request_id": ...}` adds the request, `extra={"fields": {...}}` further keys."""

    def __init__(self, role: str, name: str) -> None:
        super().__init__()
        self._fixed = {"role": role, "node": name}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            **self._fixed,
            "event": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", None):
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(role: str, name: str, level: str) -> None:
    """Sends every logger of this process to stderr. Only mains call it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role, name))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
