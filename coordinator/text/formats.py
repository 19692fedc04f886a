"""Formats of OpenAPI that the library does not know, as what it knows. Pure."""

import re
from collections.abc import Callable
from typing import Any, Final, TypeGuard

IDLE: Final = ("binary", "password", "path", "float", "double")  # any string has the first, any number the others
WIDEST: Final = 2**63 - 1024  # of the bounds that the library takes; a float says it

_INTEGER: Final = re.compile(r"(u?)int(8|16|32|64)")
_CHAR: Final = "[A-Za-z0-9+/]"
_BASE64: Final = f"^({_CHAR}{{4}})*({_CHAR}[AQgw]==|{_CHAR}{{2}}[AEIMQUYcgkosw048]=)?$"
_BYTES: Final = ("byte", "base64")


def put_format(part: dict[str, Any]) -> None:
    """In place of the format that a schema asks for, bounds of a number or a pattern of a string, beside its own."""
    form = str(part.get("format"))
    if form in IDLE:
        del part["format"]
    elif form in _BYTES:
        del part["format"]
        _put_pattern(part, _BASE64)
    elif found := _INTEGER.fullmatch(form):
        del part["format"]
        num_bits = int(found[2])
        lowest, highest = (0, 2**num_bits - 1) if found[1] else (-(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1)
        _put_bound(part, "minimum", max(lowest, -WIDEST), max)
        _put_bound(part, "maximum", min(highest, WIDEST), min)


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
