"""Formats that the library does not know, or knows in part, as what it knows. Pure."""

import math
import re
from collections.abc import Callable
from typing import Any, Final, TypeGuard

from coordinator.text.patterns import with_ascii_classes

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
_LABEL: Final = "[A-Za-z0-9]"
_INNER: Final = "[A-Za-z0-9-]"
_IN_LABEL: Final = f"{_INNER}{{0,2}}{_LABEL}|{_INNER}(?:{_LABEL}{_INNER}|-{_LABEL}){_INNER}{{0,58}}{_LABEL}"
"""What follows the first character: no hyphens are the third and the fourth, as in the labels of IDNA (xn--)."""
_HOST: Final = rf"{_LABEL}(?:{_IN_LABEL})?(?:\.{_LABEL}(?:{_IN_LABEL})?)*"
_ATOM: Final = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_MAILBOX: Final = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOST}|\[{_BYTE}(?:\.{_BYTE}){{3}}\])"
_PATTERNS: Final = {
    "byte": (_BASE64,),
    "base64": (_BASE64,),
    "date": (with_ascii_classes(f"^{_DATE}$"),),
    "time": (with_ascii_classes(f"^{_TIME}$"),),
    "date-time": (with_ascii_classes(f"^{_DATE}T{_TIME}$"),),
    "hostname": (f"^{_HOST}$",),
    "email": (f"^{_MAILBOX}$", "^[^@]{1,64}@"),
}
_MOST_CHARS: Final = {"hostname": 253, "email": 254}  # RFC 1123, and errata to RFC 3696


def put_format(part: dict[str, Any]) -> None:
    """In place of the format that a schema asks for, bounds of a number or a pattern of a string, beside its own."""
    form = str(part.get("format"))
    if form in IDLE:
        del part["format"]
    elif form in _PATTERNS:
        del part["format"]
        for pattern in _PATTERNS[form]:
            _put_pattern(part, pattern)
        if form in _MOST_CHARS and is_number(own := part.get("maxLength", math.inf)):
            part["maxLength"] = min(own, _MOST_CHARS[form])
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
