"""Configure the logging of a process: one line per event on stderr, with the role, the node and, if any, the request.

Lines are JSON, or readable text in a terminal; libraries' logs, Python's warnings and uncaught exceptions have the same
form. No SplitServe log line holds text of a prompt or an output.
"""

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from serving_core.flags import flag

AUTO, JSON, TEXT = "auto", "json", "text"
LEVELS: Final = ("debug", "info", "warning", "error")
MAX_ID_CHARS: Final = 128  # also of refused ids
CURRENT_REQUEST: Final = ContextVar("current_request", default="")  # the id of the current call, for log lines about it

_TEXT_LINE: Final = re.compile(r"\S+Z (debug|info|warning|error|critical) \S+: (.*?)(?: exception=.*)?")
_PLAIN: Final = re.compile(r"[^\s\"=]+")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Logging settings of a process."""

    log_level: str = flag("info", "Log events of this severity and above.", choices=LEVELS)
    log_format: str = flag(
        AUTO,
        "Write log lines as JSON or as text; auto writes text to a terminal and JSON elsewhere.",
        choices=(AUTO, JSON, TEXT),
    )


class JsonFormatter(logging.Formatter):
    """Format a log record as one JSON object.

    `extra={"request_id": ...}` adds the request, `extra={"fields": {...}}` further keys.
    """

    def __init__(self, role: str, name: str) -> None:
        super().__init__()
        self._fixed = {"role": role, "node": name}

    def format(self, record: logging.LogRecord) -> str:
        line = {"ts": _time_of(record), "level": record.levelname.lower(), **self._fixed, "event": record.getMessage()}
        return json.dumps(line | _details(record, self), default=str)


class TextFormatter(logging.Formatter):
    """Format a log record as `TIME level NAME: event key=value ...`, with the keys of the JSON form."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time_of(record)} {record.levelname.lower()} {self._name}:"
        event = record.getMessage().replace("\n", "\\n")
        return " ".join([head, event, *(f"{key}={_shown(value)}" for key, value in _details(record, self).items())])


def parse_line(line: str) -> tuple[str, str]:
    """Return the level and the event of a log line in either format; for any other line, "" and the line itself."""
    try:
        fields = json.loads(line)
        return str(fields["level"]), str(fields["event"])
    except (ValueError, TypeError, KeyError):
        found = _TEXT_LINE.fullmatch(line.rstrip())
        return (found[1], found[2]) if found else ("", line.rstrip())


def configure_logging(role: str, name: str, settings: LogSettings) -> None:
    """Send every logger of this process to stderr, with Python's warnings and uncaught exceptions.

    Only main functions call this.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_text = settings.log_format == TEXT or (settings.log_format == AUTO and sys.stderr.isatty())
    handler.setFormatter(TextFormatter(name) if is_text else JsonFormatter(role, name))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    sys.excepthook = partial(_log_uncaught, logging.CRITICAL)
    threading.excepthook = _log_failed
    sys.unraisablehook = _log_failed


def is_read_in_terminal() -> bool:
    """Return whether this process logs text to a terminal, where a progress bar may be drawn."""
    is_text = any(isinstance(handler.formatter, TextFormatter) for handler in logging.getLogger().handlers)
    return is_text and sys.stderr.isatty()


def _log_failed(failed: "threading.ExceptHookArgs | sys.UnraisableHookArgs") -> None:
    """Log an uncaught exception of a thread or a finalizer."""
    _log_uncaught(logging.ERROR, failed.exc_type, failed.exc_value, failed.exc_traceback)


def about(sequence_id: str, **fields: Any) -> dict[str, Any]:
    """Return the `extra` of a log line about the sequence with this id, REQUEST_ID/INDEX; `fields` are further keys."""
    request_id, slash, index = sequence_id.rpartition("/")
    return (
        {"request_id": request_id, "fields": {"index": int(index), **fields}} if slash else {"request_id": sequence_id}
    )


def _log_uncaught(level: int, kind: type[BaseException], error: BaseException | None, trace: Any) -> None:
    if kind is not SystemExit:
        uncaught = (kind, error or kind(), trace)
        logging.getLogger(__name__).log(level, "%s: %s", kind.__name__, error, exc_info=uncaught)


def _time_of(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"


def _details(record: logging.LogRecord, formatter: logging.Formatter) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if request_id := getattr(record, "request_id", None) or CURRENT_REQUEST.get():
        details["request_id"] = request_id[:MAX_ID_CHARS]
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    details |= fields
    if record.exc_info:
        details["exception"] = formatter.formatException(record.exc_info)
    return details


def _shown(value: object) -> str:
    """Return the value quoted where needed, so that its end is recognizable."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
