"""Logging of a process: one line an event on stderr, with the role, the node and, where there is one, the request.

As JSON, or in a terminal as text for people; what libraries log, Python's warnings and failures that nobody caught come
in the same form. No line of ours holds a word of a prompt or an answer.
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
MAX_ID_CHARS: Final = 128  # of ids that were refused, too
CURRENT_REQUEST: Final = ContextVar("current_request", default="")  # the id of the call at hand, for lines about it

_TEXT_LINE: Final = re.compile(r"\S+Z (debug|info|warning|error|critical) \S+: (.*?)(?: exception=.*)?")
_PLAIN: Final = re.compile(r"[^\s\"=]+")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What a process writes of what it does."""

    log_level: str = flag("info", "Least severe log line to write.", choices=LEVELS)
    log_format: str = flag(
        AUTO,
        "How log lines are written: as JSON, or as text for people. auto: as text to a terminal, as JSON elsewhere.",
        choices=(AUTO, JSON, TEXT),
    )


class JsonFormatter(logging.Formatter):
    """One JSON object a line. `extra={"request_id": ...}` adds the request, `extra={"fields": {...}}` further keys."""

    def __init__(self, role: str, name: str) -> None:
        super().__init__()
        self._fixed = {"role": role, "node": name}

    def format(self, record: logging.LogRecord) -> str:
        line = {"ts": _time_of(record), "level": record.levelname.lower(), **self._fixed, "event": record.getMessage()}
        return json.dumps(line | _details(record, self), default=str)


class TextFormatter(logging.Formatter):
    """One line as `TIME level NAME: event key=value ...`, with the keys of the JSON form."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time_of(record)} {record.levelname.lower()} {self._name}:"
        event = record.getMessage().replace("\n", "\\n")
        return " ".join([head, event, *(f"{key}={_shown(value)}" for key, value in _details(record, self).items())])


def parse_line(line: str) -> tuple[str, str]:
    """The level and the text of a log line; a line that is not of our loggers has no level, and is as it stands."""
    try:
        fields = json.loads(line)
        return str(fields["level"]), str(fields["event"])
    except (ValueError, TypeError, KeyError):
        found = _TEXT_LINE.fullmatch(line.rstrip())
        return (found[1], found[2]) if found else ("", line.rstrip())


def configure_logging(role: str, name: str, settings: LogSettings) -> None:
    """Sends every logger of this process to stderr, with Python's warnings and failures that nobody caught. Only mains
    call it."""
    handler = logging.StreamHandler(sys.stderr)
    is_text = settings.log_format == TEXT or (settings.log_format == AUTO and sys.stderr.isatty())
    handler.setFormatter(TextFormatter(name) if is_text else JsonFormatter(role, name))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    sys.excepthook = partial(_log_uncaught, logging.CRITICAL)
    threading.excepthook = _log_failed
    sys.unraisablehook = _log_failed


def is_read_in_terminal() -> bool:
    """Whether this process logs text to a terminal, where a progress bar may be drawn."""
    is_text = any(isinstance(handler.formatter, TextFormatter) for handler in logging.getLogger().handlers)
    return is_text and sys.stderr.isatty()


def _log_failed(failed: "threading.ExceptHookArgs | sys.UnraisableHookArgs") -> None:
    """Of a thread, or where nobody can catch it."""
    _log_uncaught(logging.ERROR, failed.exc_type, failed.exc_value, failed.exc_traceback)


def about(answer_id: str, **fields: Any) -> dict[str, Any]:
    """The `extra` of a line about one answer of a request, which goes by ID/INDEX."""
    request_id, slash, index = answer_id.rpartition("/")
    return {"request_id": request_id, "fields": {"index": int(index), **fields}} if slash else {"request_id": answer_id}


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
    """A value that a reader can tell the end of."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
