"""From what a client wants an answer to be to a grammar in llguidance's own form, or a sentence on why not. Pure."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from llguidance import LLMatcher, grammar_from

from coordinator.text.ascii_classes import with_ascii_classes
from coordinator.text.controls import characters_of
from coordinator.text.enforceable import Unenforceable, read_schema
from coordinator.text.json_grammar import of_schema
from coordinator.text.schemas import schemas_in
from coordinator.text.spelling import class_of, unspelled_in

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
