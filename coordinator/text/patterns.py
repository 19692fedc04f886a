"""Convert regular expressions and formats of JSON schemas to the library's dialect. Performs no I/O."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeGuard

# \d, \w and \s of a regular expression stand for ASCII, as in RE2, in ECMA 262 without the flag u and in Python's
# re.ASCII. The library would take Unicode's digits, letters and blanks.

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
    r"""Return the regular expression with \d, \w and \s spelled out in ASCII.

    Parts within (?u: ) and after (?u) ask for Unicode and stay unchanged.
    """
    is_unicode = [False]  # for each open group
    depth = 0  # of character classes

    def put(found: re.Match[str]) -> str:
        nonlocal depth
        if (escaped := found["escaped"]) is not None:
            members = None if is_unicode[-1] else _MEMBERS.get(escaped.lower())
            return found[0] if members is None else f"[{'^' if escaped.isupper() else ''}{members}]"
        if found["hyphen"] is not None:  # the bracket that follows would end a range
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
    """Update `is_unicode` for a bracket outside of character classes."""
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


# Control characters that JSON spells only by \uXXXX, which outputs do not have. The library would leave these out of
# required text, and would take a class of all of them for a class that has quotes and backslashes too.

CONTROLS: Final = frozenset(map(chr, (*range(8), 11, *range(14, 32), 127)))  # the library counts DEL as one, too

_ATOM: Final = r"(?:\\(?:[xuU]\{[^}]*\}|x[^\\]{2}|u[^\\]{4}|U[^\\]{8}|.)|[^\\])"  # one character in any spelling
_ATOMS: Final = re.compile(_ATOM, re.DOTALL)
_CLASS: Final = re.compile(r"\\.|\[(\^?)((?:\\.|[^\]\\])*)\]", re.DOTALL)
_BROAD: Final = re.compile(
    r"""
    (?P<first>\\(?:x0[01]|[xuU]\{0*[01]\}|u000[01]|U0{7}[01])|[\x00\x01])(?P<range>-(?!\]))?
    |\[\^(?P<dashes>-*)(?P<bracket>\]?)  # dashes, and else a bracket, stand for themselves at the beginning
    |(?P<named>\\[pP](?:\{[^}]*\}|.)|\[:\^?[a-z]+:\])
    |\\.
    """,
    re.DOTALL | re.VERBOSE,
)
_MAY_NAME: Final = re.compile(r"[\x00-\x1f\x7f]|\\[xuUavpP]|\[:")
_CODE: Final = re.compile(r"\\[xuU]\{?([0-9A-Fa-f]{1,8})\}?")


def control_in(text: str) -> str:
    r"""Return the first control character that JSON spells only by \uXXXX in a text, as U+XXXX; empty without one."""
    return next((f"U+{ord(char):04X}" for char in text if char in CONTROLS), "")


def characters_of(text: str) -> Iterator[str]:
    """Yield the characters of a Lark string or pattern, each escape resolved to its character if it names one.

    Other escapes stay as they are written.
    """
    return map(_character, _ATOMS.findall(text))


def control_of_pattern(pattern: str) -> str:
    """Return the first control character that a regular expression requires, as U+XXXX; empty without one."""
    asked = _CLASS.sub(_asked, pattern)
    return next(filter(None, map(control_in, characters_of(asked))), "")


def may_name_controls(pattern: str) -> bool:
    """Return whether a regular expression may match a control character by name.

    It does if it has one, or an escape or a named class that may stand for one.
    """
    return _MAY_NAME.search(pattern) is not None


def without_control(pattern: str) -> str:
    """Return the regular expression with U+0001 removed from all classes, so that no class has all control characters.

    The expression must not require a control character.
    """
    return _BROAD.sub(_narrowed, pattern)


def _asked(found: re.Match[str]) -> str:
    """Return the characters of a class if all of them are control characters by name; text outside classes is
    unchanged."""
    negated, members = found.groups()
    if members is None:
        return found[0]
    atoms = _ATOMS.findall(members.lstrip("["))
    is_asked = not negated and all(control_in(_character(atom)) for atom in atoms)
    return "".join(atoms) if is_asked else ""


def _narrowed(found: re.Match[str]) -> str:
    if (first := found["first"]) is not None:
        return (r"\x00" if _character(first) == "\0" else "") + (r"\x02-" if found["range"] else "")
    if (dashes := found["dashes"]) is not None:
        return rf"[^{dashes}\x01{found['bracket']}" if dashes else r"[^\x01" + found["bracket"].replace("]", r"\]")
    return rf"[{named}&&[^\x01]]" if (named := found["named"]) else found[0]


def _character(atom: str) -> str:
    """Return the character that an atom stands for; other escapes are returned unchanged."""
    if code := _CODE.fullmatch(atom):
        return chr(min(int(code[1], 16), 0x10FFFF))
    return {r"\a": "\a", r"\v": "\v"}.get(atom, atom)


# ---- Formats that the library knows partly or not at all, as patterns and bounds ----

IDLE: Final = ("binary", "password", "path", "float", "double")  # true of any string (the first three) or any number
OF_DRAFTS: Final = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uuid", "uri", "uri-reference", "iri", "iri-reference", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
)
WIDEST: Final = 2**63 - 1024  # the largest bound that the library supports, exact as a float

_INTEGER: Final = re.compile(r"(u?)int(8|16|32|64)")
_CHAR: Final = "[A-Za-z0-9+/]"
_BASE64: Final = f"^({_CHAR}{{4}})*({_CHAR}[AQgw]==|{_CHAR}{{2}}[AEIMQUYcgkosw048]=)?$"
_YEAR: Final = r"(?:\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)"  # all but year 0
_FOURTH: Final = "(?:0[48]|[2468][048]|[13579][26])"  # two digits, divisible by 4, without 00
_LONG: Final = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
_SHORT: Final = r"(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])"
_DATE: Final = rf"(?:{_YEAR}-(?:{_LONG}|{_SHORT})|(?:\d\d{_FOURTH}|{_FOURTH}00)-02-29)"
_MINUTE: Final = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME: Final = rf"{_MINUTE}:[0-5]\d(?:\.\d{{1,9}})?(?:Z|[+-]{_MINUTE})"
_LABEL: Final = "[A-Za-z0-9]"
_INNER: Final = "[A-Za-z0-9-]"
_IN_LABEL: Final = f"{_INNER}{{0,2}}{_LABEL}|{_INNER}(?:{_LABEL}{_INNER}|-{_LABEL}){_INNER}{{0,58}}{_LABEL}"
"""Characters after the first: the third and fourth are not both hyphens, which is reserved for IDNA (xn--)."""
_HOST: Final = rf"{_LABEL}(?:{_IN_LABEL})?(?:\.{_LABEL}(?:{_IN_LABEL})?)*"
_LOCAL_ATOM: Final = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_MAILBOX: Final = rf"{_LOCAL_ATOM}(?:\.{_LOCAL_ATOM})*@(?:{_HOST}|\[{_BYTE}(?:\.{_BYTE}){{3}}\])"
_PATTERNS: Final = {
    "byte": (_BASE64,),
    "base64": (_BASE64,),
    "date": (with_ascii_classes(f"^{_DATE}$"),),
    "time": (with_ascii_classes(f"^{_TIME}$"),),
    "date-time": (with_ascii_classes(f"^{_DATE}T{_TIME}$"),),
    "hostname": (f"^{_HOST}$",),
    "email": (f"^{_MAILBOX}$", "^[^@]{1,64}@"),
}
_MOST_CHARS: Final = {"hostname": 253, "email": 254}  # RFC 1123, and errata of RFC 3696


def put_format(part: dict[str, Any]) -> None:
    """Replace `format` in a part of a schema by bounds of a number or a pattern of a string, in place.

    These are joined with the part's own bounds and pattern. A format without effect is removed; formats that the
    library knows stay.
    """
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
        part.pop("format", None)  # an unknown format, which the pattern of the schema describes


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is a JSON number."""
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
