"""Control characters that JSON spells by \\uXXXX alone, which answers do not have. The library would leave them out of
what is asked for, and takes a class that has all of them for one that has quotes and backslashes too. Pure."""

import re
from collections.abc import Iterator
from typing import Final

CONTROLS: Final = frozenset(map(chr, (*range(8), 11, *range(14, 32), 127)))  # the library takes DEL for one of them

_ATOM: Final = r"(?:\\(?:[xuU]\{[^}]*\}|x[^\\]{2}|u[^\\]{4}|U[^\\]{8}|.)|[^\\])"  # a character, however it is written
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
    """The first such character of a text, as U+XXXX; empty without one."""
    return next((f"U+{ord(char):04X}" for char in text if char in CONTROLS), "")


def characters_of(text: str) -> Iterator[str]:
    """The characters of a text with escapes, however they are written; an escape that names none stays."""
    return map(_character, _ATOMS.findall(text))


def control_of_pattern(pattern: str) -> str:
    """The first that a regular expression asks for, where nothing else can come for it."""
    asked = _CLASS.sub(_asked, pattern)
    return next(filter(None, map(control_in, characters_of(asked))), "")


def may_name_controls(pattern: str) -> bool:
    """Whether a regular expression has a control character, or an escape or a class by name that may stand for some."""
    return _MAY_NAME.search(pattern) is not None


def without_control(pattern: str) -> str:
    """The same of a pattern that asks for none. U+0001, which cannot come, is in no class of it: so none has all."""
    return _BROAD.sub(_narrowed, pattern)


def _asked(found: re.Match[str]) -> str:
    """Of a class, its characters where all of them are controls by name; what is none stays."""
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
    """The one that an atom stands for; other escapes stay."""
    if code := _CODE.fullmatch(atom):
        return chr(min(int(code[1], 16), 0x10FFFF))
    return {r"\a": "\a", r"\v": "\v"}.get(atom, atom)
