"""Control characters that JSON spells by \\uXXXX alone, which answers do not have: the library would leave them out of
what is asked for. Pure."""

import re
from typing import Final

CONTROLS: Final = frozenset(map(chr, (*range(8), 11, *range(14, 32), 127)))  # the library takes DEL for one of them

_ATOM: Final = r"(?:\\(?:[xuU]\{[^}]*\}|x[^\\]{2}|u[^\\]{4}|U[^\\]{8}|.)|[^\\])"  # a character, however it is written
_ATOMS: Final = re.compile(_ATOM, re.DOTALL)
_CLASS: Final = re.compile(r"\\.|\[(\^?)((?:\\.|[^\]\\])*)\]", re.DOTALL)
_CODE: Final = re.compile(r"\\[xuU]\{?([0-9A-Fa-f]{1,8})\}?")


def control_in(text: str) -> str:
    """The first such character of a text, as U+XXXX; empty without one."""
    return next((f"U+{ord(char):04X}" for char in text if char in CONTROLS), "")


def control_of_pattern(pattern: str) -> str:
    """The first that a regular expression asks for, where nothing else can come for it."""
    asked = _CLASS.sub(_asked, pattern)
    return next(filter(None, (control_in(_character(atom)) for atom in _ATOMS.findall(asked))), "")


def _asked(found: re.Match[str]) -> str:
    """Of a class, its characters where all of them are controls by name; what is none stays."""
    negated, members = found.groups()
    if members is None:
        return found[0]
    atoms = _ATOMS.findall(members.lstrip("["))
    is_asked = not negated and all(control_in(_character(atom)) for atom in atoms)
    return "".join(atoms) if is_asked else ""


def _character(atom: str) -> str:
    """The one that an atom stands for; other escapes stay."""
    if code := _CODE.fullmatch(atom):
        return chr(min(int(code[1], 16), 0x10FFFF))
    return {r"\a": "\a", r"\v": "\v"}.get(atom, atom)
