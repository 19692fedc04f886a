"""Read the JSON files of a model folder with type checks."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from serving_core.errors import ModelError

LARGEST_INTEGER = 2**31 - 1


def read_json_object(path: Path) -> "JsonFields":
    """Return the JSON object in a file. Raises ModelError if the file is missing, broken or holds another value."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return JsonFields(values, str(path))


class JsonFields:
    """A JSON object whose values are checked as they are read.

    A null counts as missing, and the default applies; without a default a missing value raises ModelError, as does a
    value of the wrong kind or out of range.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def raw(self, name: str) -> Any:
        """Return the value under a name unchecked, or None if it is missing or null."""
        return self._values.get(name)

    def renamed(self, other_names: Mapping[str, Sequence[str]]) -> "JsonFields":
        """Return the object with each missing name read from another one.

        `other_names` has, for a name, those to look for; the first that is there counts.
        """
        found = {}
        for name, others in other_names.items():
            said = [self.raw(other) for other in others if self.raw(other) is not None]
            if said and self.raw(name) is None:
                found[name] = said[0]
        return JsonFields(self._values | found, self._where)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "JsonFields":
        """Return the object with these values for names that are missing; a null counts as given."""
        return JsonFields({**defaults, **self._values}, self._where)

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST_INTEGER:
            raise self.error(name, f"an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number")
        if not minimum <= value <= sys.float_info.max:  # also rejects an integer beyond every float
            raise self.error(name, f"a finite number of at least {minimum}")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0.

        Raises ModelError for any other value, and for a missing one without a default.
        """
        value = self.number(name, default)
        if value == 0:
            raise self.error(name, "above 0")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def nested(self, name: str) -> "JsonFields | None":
        """Return the object under a name, or None if it is missing. Raises ModelError for another value."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return JsonFields(value, f"{name} in {self._where}")

    def error(self, name: str, expected: str) -> ModelError:
        """Return the ModelError which says that the value under `name` must be `expected`."""
        return ModelError(f"{name} in {self._where} must be {expected}, not {self._values.get(name)!r:.80}")

    def unsupported(self, name: str) -> ModelError:
        """Return the ModelError which says that the value under `name` requires something unsupported."""
        return ModelError(f"{name:.80} in {self._where} is not supported: it is {self._values.get(name)!r:.80}")

    def _present(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{name} is missing in {self._where}")
        return value


# ---- JSON in one line, for any reader's definition of a line ----

# U+0085, U+2028 and U+2029 end lines for `str.splitlines` and httpx, and a lone surrogate is invalid UTF-8. In JSON
# they occur only in strings, where each may be an escape. Control characters below U+0020 are always escaped.
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ESCAPED: Final = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


def json_line(value: Any) -> str:
    """Return a value as JSON in one line, without blanks, that can be encoded in UTF-8.

    Raises ValueError for a number that JSON does not allow.
    """
    text = _ENCODER.encode(value)
    if text.isascii():
        return text
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
