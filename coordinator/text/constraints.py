"""From what a client wants an answer to be to a grammar in llguidance's own form, or a sentence on why not. Pure."""

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
from coordinator.text.reasoning import Thoughts
from coordinator.text.schemas import of_schema, schemas_in

# ---- what a grammar is asked for ----

MAX_CPU_S: Final = 0.5  # for one grammar
MAX_BYTES: Final = 2**26  # likewise


@dataclass(frozen=True, slots=True)
class Leeway:
    """What an answer may have beside the form that it is held to: thoughts before it, and in its place calls, in the
    format `calls` of answer_format. `tools` are the names of those that may be called, each with the JSON schema of its
    arguments, or nothing for any object. Of a JSON schema that the answer is held to, the definitions that `loose`
    names, or it itself for an empty name, are kept to as far as they can be enforced."""

    thinks: bool = False
    calls: str = NONE
    tools: tuple[tuple[str, str], ...] = ()
    most_calls: int = MAX_CALLS
    loose: tuple[str, ...] = ()


NO_LEEWAY: Final = Leeway()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a grammar is made of. `kind`, `value`, `whitespace` and `closes_objects` are those of to_grammar."""

    kind: str
    value: Hashable
    whitespace: str | None
    leeway: Leeway
    thoughts: Thoughts
    closes_objects: bool = False


FREE: Final = '%llguidance {"no_forcing": true}\n'
"""What has to come may be spelled by any tokens. Else the library looks, before each token through all that is to come,
however long, to have it come as the tokenizer reads it: as special tokens where it looks like them."""
TEXT: Final = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/')  # in Lark: strings and regular expressions


def to_grammar(
    kind: str,
    value: Any,
    whitespace: str | None,
    *,
    closes_objects: bool = False,
    unspelled: frozenset[int] = frozenset(),
) -> str:
    """`kind` is a field of the oneof `constraint` of protos/inference.proto, `value` what it holds; `whitespace` is a
    regex for what may stand between the tokens of JSON, None for nothing. `closes_objects` is that of `read_schema`.
    `unspelled` are the bytes that no token has: what a regular expression lets come is without them, and a text that
    has some is refused. Raises Unenforceable; whether the grammar compiles is not checked."""
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
    """Whether an answer may begin with blanks that are its own, and no mere distance from what stands before it. What
    regular expressions and grammars begin with is not looked into."""
    if kind == "choice":
        return any(choice[0].isspace() for choice in value)
    return kind in ("regex", "grammar")


def _texts_of(schema: Mapping[str, Any]) -> Iterator[str]:
    """The names and the data that JSON of a schema may have to spell."""
    for part in schemas_in(schema):
        names, data = part.get("properties"), (part.get("const"), part.get("enum"))
        yield json.dumps([list(names) if isinstance(names, dict) else [], data], ensure_ascii=False)


def _check_spelled(texts: Iterable[str], unspelled: frozenset[int]) -> None:
    if char := next(filter(None, (unspelled_in(text, unspelled) for text in texts)), ""):
        raise Unenforceable(f"no token of the model has {char}")


def _spelled(lark: str, unspelled: str) -> str:
    """A grammar of one regular expression, in Lark, as one of a terminal, of no text with a character of this class."""
    answer = lark.removeprefix("start: ")
    return f"start: ANSWER\nANSWER: {answer} & /[^{unspelled}]*/" if unspelled else f"start: ANSWER\nANSWER: {answer}"


def _alone(form: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": [{"lark_grammar": FREE + "start: @form\n"}, {**form, "name": "form"}]})


def _of_lark(text: str) -> str:
    return _alone({"lark_grammar": text})


def _in_lark(text: str) -> str:
    """A text as a string of Lark, which does not take DEL as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _read_grammar(text: str) -> str:
    try:
        grammar = str(grammar_from("grammar", text))
    except ValueError as error:
        raise Unenforceable(f"it is neither Lark nor GBNF: {error}") from error
    if "%json" in TEXT.sub("", grammar):
        raise Unenforceable("a grammar with %json is not supported: ask for a json_schema")
    return grammar


# What the tokens of a model cannot spell. Some vocabularies lack bytes, such as those of control characters, and a form
# that asks for them would lead an answer to where no token may come.

_OF_TEXT: Final = frozenset({*range(0xC0), *range(0xC2, 0xF5)})  # bytes that UTF-8 has
_SHORTEST: Final = {1: 0, 2: 0x80, 3: 0x800, 4: 0x10000}  # the first character of so many bytes
_LAST: Final = 0x10FFFF
_LAST_BEFORE_SURROGATES: Final = 0xD7FF  # of the first byte 0xED, behind which UTF-8 has nothing else


def unspelled_bytes(tokens: Iterable[bytes]) -> frozenset[int]:
    """Return the bytes of UTF-8 that none of these tokens has."""
    left = set(_OF_TEXT)
    for token in tokens:
        left.difference_update(token)
        if not left:
            break
    return frozenset(left)


def unspelled_in(text: str, unspelled: frozenset[int]) -> str:
    """Return the first character of a text that has one of these bytes, as U+XXXX; empty without one."""
    spelled = ((char, char.encode(errors="surrogatepass")) for char in text)
    return next((f"U+{ord(char):04X}" for char, in_bytes in spelled if not unspelled.isdisjoint(in_bytes)), "")


def class_of(unspelled: frozenset[int]) -> str:
    """Return the members of a class, in a regular expression, of all characters that begin with one of these bytes."""
    ranges = (_beginning_with(byte) for byte in sorted(unspelled) if byte < 0x80 or byte >= 0xC2)
    return "".join(rf"\u{{{first:x}}}-\u{{{last:x}}}" for first, last in ranges)


def _beginning_with(byte: int) -> tuple[int, int]:
    """The first and the last character whose UTF-8 begins with this byte."""
    num_bytes = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
    if num_bytes == 1:
        return byte, byte
    num_bits = 6 * (num_bytes - 1)
    first = (byte & (0x3F >> (num_bytes - 1))) << num_bits
    last = min(first + (1 << num_bits) - 1, _LAST)
    return max(first, _SHORTEST[num_bytes]), _LAST_BEFORE_SURROGATES if byte == 0xED else last
