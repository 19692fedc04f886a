"""The program that makes grammars of what clients want answers to be: `python -m coordinator.text.compiling`.

A process of its own (coordinator/text/program.py): compiling may take long or exhaust the stack, whatever the limits of
the library. What compiles here compiles on the nodes, whose threads have more of a stack.
"""

import json
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from coordinator.text.answering import answer_lines, line
from coordinator.text.asked import NO_LEEWAY, Asked, Leeway
from coordinator.text.constraints import to_grammar
from coordinator.text.enforceable import Unenforceable
from coordinator.text.leeway import with_leeway
from coordinator.text.loosening import freed, loosened
from coordinator.text.named_tokens import names_any
from coordinator.text.reasoning import Thoughts
from coordinator.text.spelling import unspelled_bytes
from coordinator.text.vocabulary import tokens_alone
from serving_core.errors import RequestError
from serving_core.grammars import LIMITS, Grammars

STACK_BYTES: Final = 2**20
MAX_KNOWN_PARTS: Final = 256  # of schemas, since many are alike


class Compiler:
    """Answers by the grammar, or by why there is none."""

    def __init__(self, folder: str, eos_token_ids: list[int]) -> None:
        self._grammars = Grammars(Path(folder), eos_token_ids, tokens_alone)
        self._special: dict[str, int] = {}
        self._unspelled: frozenset[int] = frozenset()
        with suppress(RequestError):  # which every question is then answered by
            tokenizer = self._grammars.load()
            self._special = _special_tokens(tokenizer)
            self._unspelled = unspelled_bytes(_text_tokens(tokenizer))

    def answer(self, question: Mapping[str, Any]) -> bytes:
        """The line that answers a question: the fields of asked.Asked."""
        leeway = Leeway(**question["leeway"])
        asked = Asked(**{**question, "leeway": leeway, "thoughts": Thoughts(question["thoughts"])})
        try:
            return line({"grammar": self._held(asked)})
        except (RequestError, Unenforceable) as error:
            field = {"field": "tools"} if leeway.tools and self._compiles(replace(asked, leeway=NO_LEEWAY)) else {}
            return line({"refused": str(error), **field})

    def _held(self, asked: Asked) -> str:
        """The grammar that holds an answer to as much as can be of what may be loose, and to all else. Raises what
        forbids the whole."""
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
        """The grammar, as nodes are given it. Raises RequestError or Unenforceable."""
        closes, unspelled = asked.closes_objects, self._unspelled
        form = to_grammar(asked.kind, asked.value, asked.whitespace, closes_objects=closes, unspelled=unspelled)
        if asked.kind == "grammar":
            self._check_named(str(asked.value))
        grammar = with_leeway(form, asked, self._special)
        for each in dict.fromkeys((form, grammar)):  # of no text there may be thoughts all the same
            self._grammars.compiled(each)
        return self._grammars.for_nodes(grammar)

    def _check_named(self, grammar: str) -> None:
        """An end token ends the answer, whatever the grammar has behind it."""
        tokenizer = self._grammars.load()
        ends = [(token_id, tokenizer.decode_str([token_id])) for token_id in tokenizer.eos_tokens]
        if names_any(grammar, ends):
            raise Unenforceable("it names an end token: one comes where the grammar may end, and nowhere else")


def _loosenings(asked: Asked) -> Iterator[str]:
    """The JSON schema with less and less to keep to, whose objects are closed where they are to be."""
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
    """By their texts."""
    special = filter(tokenizer.is_special_token, range(tokenizer.vocab_size))
    return {text: token_id for token_id in special if (text := tokenizer.decode_str([token_id]))}


def _text_tokens(tokenizer: LLTokenizer) -> Iterator[bytes]:
    """The tokens of which texts are made."""
    for token_id in range(tokenizer.vocab_size):
        if not tokenizer.is_special_token(token_id):
            yield tokenizer.decode_bytes([token_id])


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, most))
    answer_lines(lambda given: Compiler(**given).answer)


if __name__ == "__main__":
    main()
