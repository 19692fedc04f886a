"""Formats that the library does not know, or knows in part, as what it knows. Pure."""

import re
from collections.abc import Callable
from typing import Any, Final, TypeGuard

IDLE: Final = ("binary", "password", "path", "float", "double")  # any string has the first, any number the others
OF_DRAFTS: Final = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uuid", "uri", "uri-reference", "iri", "iri-reference", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
)
WIDEST: Final = 2**63 - 1024  # of the bounds that the library takes; a float says it

_INTEGER: Final = re.compile(r"(u?)int(8|16|32|64)")
_CHAR: Final = "[A-Za-z0-9+/]"
_BASE64: Final = f"^({_CHAR}{{4}})*({_CHAR}[AQgw]==|{_CHAR}{{2}}[AEIMQUYcgkosw048]=)?$"
_YEAR: Final = r"(?:\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)"  # all but 0, in which no calendar begins
_FOURTH: Final = "(?:0[48]|[2468][048]|[13579][26])"  # of two digits, each fourth but 00
_LONG: Final = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
_SHORT: Final = r"(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])"
_DATE: Final = rf"(?:{_YEAR}-(?:{_LONG}|{_SHORT})|(?:\d\d{_FOURTH}|{_FOURTH}00)-02-29)"
_MINUTE: Final = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME: Final = rf"{_MINUTE}:[0-5]\d(?:\.\d{{1,9}})?(?:Z|[+-]{_MINUTE})"
_PATTERNS: Final = {
    "byte": _BASE64,
    "base64": _BASE64,
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}


def put_format(part: dict[str, Any]) -> None:
    """In place of the format that a schema asks for, bounds of a number or a pattern of a string, beside its own."""
    form = str(part.get("format"))
    if form in IDLE:
        del part["format"]
    elif form in _PATTERNS:
        del part["format"]
        _put_pattern(part, _PATTERNS[form])
    elif found := _INTEGER.fullmatch(form):
        del part["format"]
        num_bits = int(found[2])
        lowest, highest = (0, 2**num_bits - 1) if found[1] else (-(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1)
        _put_bound(part, "minimum", max(lowest, -WIDEST), max)
        _put_bound(part, "maximum", min(highest, WIDEST), min)
    elif form not in OF_DRAFTS and isinstance(part.get("pattern"), str):
        part.pop("format", None)  # a name of whoever wrote the schema, for what the pattern asks


def is_number(value: Any) -> TypeGuard[int | float]:
    """Of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _put_pattern(part: dict[str, Any], pattern: str) -> None:
    if "pattern" not in part:
        part["pattern"] = pattern
    elif isinstance(others := part.setdefault("allOf", []), list):
        part["allOf"] = [*others, {"pattern": pattern}]


def _put_bound(part: dict[str, Any], name: str, bound: int, narrower: Callable[[float, float], float]) -> None:
    own = part.get(name, bound)
    if part.get("type") != "string" and is_number(own):
        part[name] = narrower(own, bound)
