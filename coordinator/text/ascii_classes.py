"""What \\d, \\w and \\s of a regular expression stand for: ASCII, as in RE2, in ECMA 262 without the flag u and in
Python's re.ASCII. The library takes them for Unicode's digits, letters and blanks. Pure."""

import re
from typing import Final

_MEMBERS: Final = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t-\r\x20"}
_PART: Final = re.compile(
    r"""
    \\(?P<escaped>.)
    |(?P<hyphen>(?<!-)-(?=\\[dDsSwW]))
    |(?P<opens>\[\^?(?:-+|\]?))  # a bracket at the beginning of a class stands for itself
    |(?P<closes>\])
    |\(\?(?P<flags>[a-zA-Z-]+)(?P<end>[:)])
    |(?P<bracket>[()])
    """,
    re.DOTALL | re.VERBOSE,
)


def with_ascii_classes(pattern: str) -> str:
    """Return the regular expression with these classes written out, but within (?u: ) and behind (?u), which ask for
    Unicode's."""
    is_unicode = [False]  # by group that is open
    depth = 0  # of classes

    def put(found: re.Match[str]) -> str:
        nonlocal depth
        if (escaped := found["escaped"]) is not None:
            members = None if is_unicode[-1] else _MEMBERS.get(escaped.lower())
            return found[0] if members is None else f"[{'^' if escaped.isupper() else ''}{members}]"
        if found["hyphen"] is not None:  # the bracket that is put behind it would be the end of a range
            return r"\-" if depth else "-"
        if found["opens"] is not None:
            depth += 1
        elif found["closes"] is not None:
            depth = max(0, depth - 1)
        elif not depth:
            _enter_group(found, is_unicode)
        return found[0]

    return _PART.sub(put, pattern)


def _enter_group(found: re.Match[str], is_unicode: list[bool]) -> None:
    """Note what a bracket says, outside of classes."""
    if (flags := found["flags"]) is not None:
        switched_on, _, switched_off = flags.partition("-")
        is_on = "u" in switched_on or (is_unicode[-1] and "u" not in switched_off)
        if found["end"] == ":":
            is_unicode.append(is_on)
        else:
            is_unicode[-1] = is_on
    elif found["bracket"] == "(":
        is_unicode.append(is_unicode[-1])
    elif len(is_unicode) > 1:
        is_unicode.pop()
