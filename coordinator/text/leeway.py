"""The grammar of an answer that may have thoughts before its form, and calls of tools in its place. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from coordinator.text import reasoning
from coordinator.text.answer_format import TAGS
from coordinator.text.asked import Asked
from coordinator.text.calls.rules import BLANKS, Tag, rules
from coordinator.text.constraints import FREE, may_begin_blank
from coordinator.text.enforceable import read_schema
from coordinator.text.json_grammar import of_schema
from coordinator.text.reasoning import Thoughts

CLOSE: Final = reasoning.CLOSE.replace("/", r"\/")  # in a regular expression of Lark
ANY: Final = '{"type": "object"}'


def with_leeway(grammar: str, asked: Asked, special: Mapping[str, int]) -> str:
    """The grammar of an answer with leeway; `grammar` is that of its form alone. `special` are tokens that no text
    spells. Raises Unenforceable."""

    def tag(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    tools, thoughts = asked.leeway.tools, asked.thoughts
    arguments = {name: f"@arguments{index}" if schema else "@object" for index, (name, schema) in enumerate(tools)}
    calls = rules(asked.leeway.calls, arguments, tag, asked.leeway.most_calls) if arguments else ""
    if not calls and thoughts is Thoughts.NONE:
        return grammar
    [_, form] = json.loads(grammar)["grammars"]
    openings = [reasoning.OPEN] if thoughts is Thoughts.POSSIBLE else []
    openings += [TAGS[asked.leeway.calls]] if calls and asked.leeway.calls in TAGS else []
    if asked.kind == "regex" and openings:
        form = {"name": "form", "lark_grammar": _beginning_otherwise(form["lark_grammar"], openings)}
    is_next = may_begin_blank(asked.kind, asked.value)  # to thoughts, else nobody could tell whose the blanks are
    start = f"start: {_before(thoughts, is_next)}{_either(is_next) if calls else '@form'}\n"
    lark = FREE + start + _thoughts(thoughts, tag) + calls + BLANKS
    schemas = {place: schema or ANY for place, (_, schema) in zip(arguments.values(), tools, strict=True)}
    places = set(re.findall(r"@\w+", calls)) & schemas.keys()
    named = {place: read_schema(schemas[place], closes_objects=asked.closes_objects) for place in places}
    others = [{**of_schema(schema, asked.whitespace), "name": place[1:]} for place, schema in sorted(named.items())]
    return json.dumps({"grammars": [{"lark_grammar": lark}, form, *others]})


def _before(thoughts: Thoughts, is_next: bool) -> str:
    """What stands before the form."""
    before = "thoughts " if is_next else "thoughts blanks? "
    return {Thoughts.NONE: "", Thoughts.POSSIBLE: f"({before})? ", Thoughts.BEGUN: before}[thoughts]


def _either(is_next: bool) -> str:
    """The form, or calls, of which blanks before them say nothing."""
    return "(@form | blanks? calls)" if is_next else "(@form | calls)"


def _beginning_otherwise(lark: str, openings: Sequence[str]) -> str:
    """The grammar of a regular expression, which ends with its terminal, without the texts that are read as something
    else, by how they begin."""
    begun = "|".join(map(re.escape, openings))
    return f"{lark} & ~/\\s*({begun})(?s:.*)/\n"


def _thoughts(thoughts: Thoughts, tag: Tag) -> str:
    """The rules for them; those that the prompt has begun have no tag."""
    if thoughts is Thoughts.NONE:
        return ""
    begun, close = "" if thoughts is Thoughts.BEGUN else tag(reasoning.OPEN), tag(reasoning.CLOSE)
    if close.startswith("<"):  # a special token; but text that looks like it is read as the end of thoughts too
        return f"thoughts: {begun} TEXT? {close}\nTEXT: /(?s:.+)/ & ~/(?s:.*){CLOSE}(?s:.*)/\n"
    if begun.startswith("<") or not begun:
        return f"thoughts: {begun} thought\nthought[lazy]: /(?s:.*){CLOSE}/\n"
    return f"thoughts[lazy]: /{reasoning.OPEN}(?s:.*){CLOSE}/\n"  # in one: else a form of any text would go on with it
