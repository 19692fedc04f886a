"""Convert structured-output constraints to llguidance grammars, or refuse them with a reason. Performs no I/O."""

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher, grammar_from

from coordinator.text.answer_format import NONE
from coordinator.text.calls.reader import MAX_CALLS
from coordinator.text.enforceable import Unenforceable, read_schema
from coordinator.text.patterns import characters_of, with_ascii_classes
from coordinator.text.reasoning import THINK, Thoughts
from coordinator.text.schemas import of_schema, schemas_in

# ---- inputs of a grammar ----

MAX_CPU_S: Final = 0.5  # processor time for one grammar
MAX_BYTES: Final = 2**26  # memory for one grammar


@dataclass(frozen=True, slots=True)
class Leeway:
    """Freedom of an output besides its required format.

    `thinks` allows thoughts before it, between the tags of `reasoning`. Tool calls may take its place, in the format
    `calls` of answer_format: `tools` are the names that may be called, each with the JSON schema of its arguments, or
    empty for any object. With `must_call` the output is calls, and the schemas are the definitions of the required JSON
    schema, "0" that of the first tool. `loose` names the definitions of a JSON schema that are enforced as far as
    possible; an empty name stands for the whole schema.
    """

    thinks: bool = False
    reasoning: str = THINK
    calls: str = NONE
    tools: tuple[tuple[str, str], ...] = ()
    most_calls: int = MAX_CALLS
    loose: tuple[str, ...] = ()
    must_call: bool = False


NO_LEEWAY: Final = Leeway()


@dataclass(frozen=True, slots=True)
class Asked:
    """Inputs of a grammar. `kind`, `value`, `whitespace` and `closes_objects` are as in to_grammar."""

    kind: str
    value: Hashable
    whitespace: str | None
    leeway: Leeway
    thoughts: Thoughts
    closes_objects: bool = False


FREE: Final = '%llguidance {"no_forcing": true}\n'
"""Let required text be spelled by any tokens.

Otherwise the library would search all required text before each token, to produce the tokenizer's own spelling, which
includes special tokens for text that looks like them.
"""
TEXT: Final = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/')  # in Lark: strings and regular expressions


def to_grammar(
    kind: str,
    value: Any,
    whitespace: str | None,
    *,
    closes_objects: bool = False,
    unspelled: frozenset[int] = frozenset(),
) -> str:
    """Return the llguidance grammar of a constraint.

    `kind` is a field of the oneof `constraint` in protos/inference.proto, and `value` is its value. `whitespace` is a
    regular expression for the text between JSON tokens, or None for no such text. `closes_objects` is as in
    `read_schema`. `unspelled` are the bytes that no token has: regular expressions are restricted to texts without
    them, and a fixed text that has one is refused: Unenforceable, as for a schema that cannot be enforced. Whether the
    grammar compiles is not checked.
    """
    match kind:
        case "json_schema":
            schema = read_schema(value, closes_objects=closes_objects)
            _check_spelled(_texts_of(schema), unspelled)
            return _alone(of_schema(schema, whitespace))
        case "json_object":
            return _alone(of_schema({"type": "object"}, whitespace))
        case "regex":
            made = json.loads(LLMatcher.grammar_from_regex(with_ascii_classes(value)))
            return _of_lark(_spelled(made["grammars"][0]["lark_grammar"], class_of(unspelled)))
        case "choice":
            _check_spelled(value, unspelled)
            return _of_lark("start: CHOICE\nCHOICE: " + " | ".join(map(_in_lark, value)))
        case "grammar":
            grammar = _read_grammar(value)
            strings = (text for text in TEXT.findall(grammar) if text.startswith('"'))
            _check_spelled(("".join(characters_of(text)) for text in strings), unspelled)
            return _of_lark(grammar)
    raise AssertionError(f"{kind} is no constraint")


def may_begin_blank(kind: str, value: Any) -> bool:
    """Return whether an output may begin with blanks that belong to the format of a constraint (see `to_grammar`).

    Regular expressions and grammars count as True without a check.
    """
    if kind == "choice":
        return any(choice[0].isspace() for choice in value)
    return kind in ("regex", "grammar")


def _texts_of(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the property names and data that JSON of a schema may have to spell."""
    for part in schemas_in(schema):
        names, data = part.get("properties"), (part.get("const"), part.get("enum"))
        yield json.dumps([list(names) if isinstance(names, dict) else [], data], ensure_ascii=False)


def _check_spelled(texts: Iterable[str], unspelled: frozenset[int]) -> None:
    if char := next(filter(None, (unspelled_in(text, unspelled) for text in texts)), ""):
        raise Unenforceable(f"no token of the model has {char}")


def _spelled(lark: str, unspelled: str) -> str:
    """Return a grammar of one terminal for a regular expression in Lark, without the characters of class
    `unspelled`."""
    answer = lark.removeprefix("start: ")
    return f"start: ANSWER\nANSWER: {answer} & /[^{unspelled}]*/" if unspelled else f"start: ANSWER\nANSWER: {answer}"


def _alone(form: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": [{"lark_grammar": FREE + "start: @form\n"}, {**form, "name": "form"}]})


def _of_lark(text: str) -> str:
    return _alone({"lark_grammar": text})


def _in_lark(text: str) -> str:
    """Return a text as a Lark string, in which DEL must be escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _read_grammar(text: str) -> str:
    try:
        grammar = str(grammar_from("grammar", text))
    except ValueError as error:
        raise Unenforceable(f"it is neither Lark nor GBNF: {error}") from error
    if "%json" in TEXT.sub("", grammar):
        raise Unenforceable("a grammar with %json is not supported: ask for a json_schema")
    return grammar


# Bytes that a model's tokens cannot spell. Some vocabularies lack bytes, such as control characters. A format that
# requires them would lead to a state in which no token is allowed.

_OF_TEXT: Final = frozenset({*range(0xC0), *range(0xC2, 0xF5)})  # bytes that occur in UTF-8
_SHORTEST: Final = {1: 0, 2: 0x80, 3: 0x800, 4: 0x10000}  # first character of each encoded length in bytes
_LAST: Final = 0x10FFFF
_LAST_BEFORE_SURROGATES: Final = 0xD7FF  # last character with first byte 0xED; UTF-8 has no surrogates


def unspelled_bytes(tokens: Iterable[bytes]) -> frozenset[int]:
    """Return the bytes that UTF-8 text may have and that occur in none of the tokens."""
    left = set(_OF_TEXT)
    for token in tokens:
        left.difference_update(token)
        if not left:
            break
    return frozenset(left)


def unspelled_in(text: str, unspelled: frozenset[int]) -> str:
    """Return the first character of a text whose UTF-8 has one of the bytes `unspelled`, as U+XXXX; "" without such.

    No token of the model has these bytes, so that the model cannot write the character.
    """
    spelled = ((char, char.encode(errors="surrogatepass")) for char in text)
    return next((f"U+{ord(char):04X}" for char, in_bytes in spelled if not unspelled.isdisjoint(in_bytes)), "")


def class_of(unspelled: frozenset[int]) -> str:
    """Return the characters whose first UTF-8 byte is in `unspelled`, as ranges for a regular expression's [...]."""
    ranges = (_beginning_with(byte) for byte in sorted(unspelled) if byte < 0x80 or byte >= 0xC2)
    return "".join(rf"\u{{{first:x}}}-\u{{{last:x}}}" for first, last in ranges)


def _beginning_with(byte: int) -> tuple[int, int]:
    """Return the first and last character whose UTF-8 encoding begins with this byte."""
    num_bytes = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
    if num_bytes == 1:
        return byte, byte
    num_bits = 6 * (num_bytes - 1)
    first = (byte & (0x3F >> (num_bytes - 1))) << num_bits
    last = min(first + (1 << num_bits) - 1, _LAST)
    return max(first, _SHORTEST[num_bytes]), _LAST_BEFORE_SURROGATES if byte == 0xED else last
