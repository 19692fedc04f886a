"""Compile grammars for structured output in a helper process: `python -m coordinator.text.compiling`.

A process of its own (coordinator/text/program.py), since compiling may take long or exhaust the stack in spite of the
library's limits. A grammar that compiles here compiles on the nodes, whose threads have larger stacks.
"""

import json
import re
import resource
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from coordinator.text import reasoning
from coordinator.text.answer_format import ANSWERS, OPENINGS
from coordinator.text.answering import answer_lines, line
from coordinator.text.calls.parameters import Tag, pattern, spelled, text_until
from coordinator.text.calls.rules import BLANKS, NO_RULES, Tool, rules
from coordinator.text.constraints import FREE, NO_LEEWAY, Asked, Leeway, may_begin_blank, to_grammar, unspelled_bytes
from coordinator.text.enforceable import Unenforceable, freed, loosened, parse_schema, read_schema
from coordinator.text.reasoning import Thoughts
from coordinator.text.schemas import of_schema
from serving_core.errors import RequestError
from serving_core.grammars import LIMITS, Grammars

# ---- Grammar of an output with thoughts before its format, and tool calls in its place ----


def with_leeway(grammar: str, asked: Asked, special: Mapping[str, int]) -> str:
    """Return the grammar of an output with thoughts before its required format, or tool calls in its place.

    `grammar` is that of the format alone, and `asked` says what leeway there is. `special` maps special tokens, which
    text does not spell, to their ids. Raises Unenforceable for schemas of tools.
    """

    def tag(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    leeway, thoughts, tools = asked.leeway, asked.thoughts, list(_tools(asked))
    calls, schemas = NO_RULES
    if tools:
        calls, schemas = rules(leeway.calls, tools, tag, leeway.most_calls, closes_objects=asked.closes_objects)
    if not calls and thoughts is Thoughts.NONE and leeway.calls not in ANSWERS:
        return grammar
    [_, form] = json.loads(grammar)["grammars"]
    tags = reasoning.TAGS[leeway.reasoning]
    openings = [tags.open] if thoughts is Thoughts.POSSIBLE else []
    openings += [OPENINGS[leeway.calls]] if calls and leeway.calls in OPENINGS else []
    if asked.kind == "regex" and openings:
        form = {"name": "form", "lark_grammar": _beginning_otherwise(form["lark_grammar"], openings)}
    is_next = may_begin_blank(asked.kind, asked.value)  # to the thoughts; otherwise the blanks would be ambiguous
    answer = _answer(leeway.calls, tag)
    if calls:
        answer = "calls" if leeway.must_call else _either(answer, is_next)
    lark = f"{FREE}start: {_before(thoughts, is_next)}{answer}\n{_thoughts(thoughts, tags, tag)}{calls}{BLANKS}"
    named = {place: read_schema(schemas[place], closes_objects=asked.closes_objects) for place in sorted(schemas)}
    others = [{**of_schema(schema, asked.whitespace), "name": place} for place, schema in named.items()]
    return json.dumps({"grammars": [{"lark_grammar": lark}, *([] if leeway.must_call else [form]), *others]})


def _tools(asked: Asked) -> Iterator[Tool]:
    """Yield the tools that may be called."""
    leeway = asked.leeway
    if not leeway.must_call:
        yield from (Tool(*tool) for tool in leeway.tools)
        return
    definitions = parse_schema(str(asked.value))["$defs"]
    for index, (name, _) in enumerate(leeway.tools):
        schema = {"$ref": f"#/$defs/{index}", "$defs": {str(index): definitions[str(index)]}}
        yield Tool(name, json.dumps(schema), is_strict=str(index) not in leeway.loose)


def _answer(calls: str, tag: Tag) -> str:
    """Return the rule for the format, with the markup that models of this format of calls write around text."""
    if calls not in ANSWERS:
        return "@form"
    opening, closing = (f"({spelled(each, tag)})?" if each else "" for each in ANSWERS[calls])
    return f"{opening} @form {closing}"


def _before(thoughts: Thoughts, is_next: bool) -> str:
    """Return the rule for what precedes the format."""
    before = "thoughts " if is_next else "thoughts blanks? "
    return {Thoughts.NONE: "", Thoughts.POSSIBLE: f"({before})? ", Thoughts.BEGUN: before}[thoughts]


def _either(answer: str, is_next: bool) -> str:
    """Return the rule for the format or calls. Blanks before calls have no meaning."""
    return f"({answer} | blanks? calls)" if is_next else f"({answer} | calls)"


def _beginning_otherwise(lark: str, openings: Sequence[str]) -> str:
    """Return the grammar of a regular expression without the texts that begin like thoughts or calls.

    `lark` must end with its terminal; `openings` are the beginnings.
    """
    begun = "|".join(map(re.escape, openings))
    return f"{lark} & ~/\\s*({begun})(?s:.*)/\n"


def _thoughts(thoughts: Thoughts, tags: reasoning.Tags, tag: Tag) -> str:
    """Return the rules for thoughts. Thoughts that the prompt has begun have no opening tag."""
    if thoughts is Thoughts.NONE:
        return ""
    behind, until = spelled(tags.behind, tag), text_until("thought", tags.close, tag)
    begun = "" if thoughts is Thoughts.BEGUN else spelled(tags.open, tag)
    if begun and "<[" not in begun and "[lazy]" in until:  # one terminal, or any text would go on
        return f"thoughts[lazy]: /{pattern(tags.open)}(?s:.*){pattern(tags.close + tags.behind)}/\n"
    return f"thoughts: {begun} thought {behind}\n{until}"


# Tokenizer that knows its tokens and splits a text greedily, with a fraction of the memory of a full one. It suffices
# to check grammars: whether they compile does not depend on how texts are split.


class _Tokens(TokenizerWrapper):
    """Vocabulary of a tokenizer, from which the greedy tokenizer is built."""

    def __init__(self, whole: LLTokenizer) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = whole.eos_token, None
        self.tokens = [whole.decode_bytes([token_id]) for token_id in range(whole.vocab_size)]
        self.special_token_ids = [*filter(whole.is_special_token, range(whole.vocab_size))]
        self.made: LLTokenizer | None = None

    def __call__(self, s: str) -> list[int]:
        assert self.made is not None, "texts come when it is made"
        return self.made.greedy_tokenize(s)


def tokens_alone(text: str, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return a tokenizer that splits text greedily, with the tokens of a tokenizer.json whose contents are `text`.

    Raises ValueError when the library cannot read the file.
    """
    ends = list(eos_token_ids)
    tokens = _Tokens(LLTokenizer(text, eos_token=ends, slices=[]))
    tokens.made = LLTokenizer(tokens, eos_token=ends, slices=[])
    tokens.tokens, tokens.special_token_ids = (), ()  # the library has its own copy
    return tokens.made


# Tokens that a Lark grammar names: by text, such as <|tool|>, or by id: <[7]>, <[1,5-9]>, or all others: <[^7]>.

_NAME: Final = re.compile(r"<[^<>\s]+>")
_RANGE: Final = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_IDS: Final = re.compile(r"<\[(\^?)([\d,*-]+)\]>")


def names_any(grammar: str, tokens: Collection[tuple[int, str]]) -> bool:
    """Return whether a Lark grammar may name one of these tokens, given as (id, text).

    Names in strings and comments count too.
    """
    return any(_is_named(name, *token) for name in _NAME.findall(grammar) for token in tokens)


def _is_named(name: str, token_id: int, text: str) -> bool:
    ids = _IDS.fullmatch(name)
    if ids is None:
        return name == text
    is_listed = any(_holds(part, token_id) for part in ids[2].split(","))
    return is_listed != bool(ids[1])


def _holds(part: str, token_id: int) -> bool:
    ends = _RANGE.fullmatch(part)
    return part == "*" or (ends is not None and int(ends[1]) <= token_id <= int(ends[2] or ends[1]))


STACK_BYTES: Final = 2**20
MAX_KNOWN_PARTS: Final = 256  # cached schema parts, of which many are alike


class Compiler:
    """Answer a question with the grammar, or with the reason why there is none."""

    def __init__(self, folder: str, eos_token_ids: list[int]) -> None:
        self._grammars = Grammars(Path(folder), eos_token_ids, tokens_alone)
        self._special: dict[str, int] = {}
        self._unspelled: frozenset[int] = frozenset()
        with suppress(RequestError):  # every question is then answered with it
            tokenizer = self._grammars.load()
            self._special = _special_tokens(tokenizer)
            self._unspelled = unspelled_bytes(_text_tokens(tokenizer))

    def answer(self, question: Mapping[str, Any]) -> bytes:
        """Return the reply line to a question: a JSON object with the compiled grammar, or with why it was refused.

        A question has the fields of `Asked`: a constraint, and how loosely it may be enforced.
        """
        leeway = Leeway(**question["leeway"])
        asked = Asked(**{**question, "leeway": leeway, "thoughts": Thoughts(question["thoughts"])})
        try:
            return line({"grammar": self._held(asked)})
        except (RequestError, Unenforceable) as error:
            field = {"field": "tools"} if leeway.tools and self._compiles(replace(asked, leeway=NO_LEEWAY)) else {}
            return line({"refused": str(error), **field})

    def _held(self, asked: Asked) -> str:
        """Return the grammar that enforces as much as possible of the loose parts and all other parts.

        Raises the error of the full constraint if not even that compiles.
        """
        try:
            return self._compiled(asked)
        except (RequestError, Unenforceable):
            for value in _loosenings(asked):
                with suppress(RequestError, Unenforceable):
                    return self._compiled(replace(asked, value=value, closes_objects=False))
            raise

    def _compiles(self, asked: Asked) -> bool:
        try:
            self._compiled(asked)
        except (RequestError, Unenforceable):
            return False
        return True

    def _compiled(self, asked: Asked) -> str:
        """Return the grammar in the nodes' format. Raises Unenforceable or RequestError when it cannot be enforced."""
        closes, unspelled = asked.closes_objects, self._unspelled
        form = to_grammar(asked.kind, asked.value, asked.whitespace, closes_objects=closes, unspelled=unspelled)
        if asked.kind == "grammar":
            self._check_named(str(asked.value))
        grammar = with_leeway(form, asked, self._special)
        for each in dict.fromkeys((form, grammar)):  # with thoughts, even a format that allows no text would compile
            self._grammars.compiled(each)
        return self._grammars.for_nodes(grammar)

    def _check_named(self, grammar: str) -> None:
        """Refuse a grammar that names an end token, which would end the output wherever the grammar has it."""
        tokenizer = self._grammars.load()
        ends = [(token_id, tokenizer.decode_str([token_id])) for token_id in tokenizer.eos_tokens]
        if names_any(grammar, ends):
            raise Unenforceable("it names an end token: one comes where the grammar may end, and nowhere else")


def _loosenings(asked: Asked) -> Iterator[str]:
    """Yield the JSON schema with fewer and fewer requirements. Objects are closed as requested."""
    if asked.leeway.loose:
        text, loose = str(asked.value), asked.leeway.loose
        yield loosened(text, loose, _is_enforced, closes_objects=asked.closes_objects)
        yield freed(text, loose)


def _is_enforced(schema: Mapping[str, Any]) -> bool:
    return _is_enforced_as(json.dumps(schema))


@lru_cache(MAX_KNOWN_PARTS)
def _is_enforced_as(text: str) -> bool:
    try:
        return not LLMatcher.validate_grammar(to_grammar("json_schema", text, None), limits=LIMITS)
    except Unenforceable:
        return False


def _special_tokens(tokenizer: LLTokenizer) -> dict[str, int]:
    """Return the special tokens as a map of text to id."""
    special = filter(tokenizer.is_special_token, range(tokenizer.vocab_size))
    return {text: token_id for token_id in special if (text := tokenizer.decode_str([token_id]))}


def _text_tokens(tokenizer: LLTokenizer) -> Iterator[bytes]:
    """Yield the bytes of all tokens that are not special."""
    for token_id in range(tokenizer.vocab_size):
        if not tokenizer.is_special_token(token_id):
            yield tokenizer.decode_bytes([token_id])


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, most))
    answer_lines(lambda given: Compiler(**given).answer)


if __name__ == "__main__":
    main()
