"""The grammar of an answer that may have thoughts before its form, and calls of tools in its place. Pure."""

import json
from collections.abc import Mapping
from typing import Final

from coordinator.text import reasoning
from coordinator.text.calls.rules import BLANKS, Tag, call_schema, rules
from coordinator.text.constraints import of_schema
from coordinator.text.reasoning import Thoughts
from coordinator.text.structures import Leeway

CLOSE: Final = reasoning.CLOSE.replace("/", r"\/")  # in a regular expression of Lark
FREE: Final = '%llguidance {"no_forcing": true}\n'


def with_leeway(
    grammar: str,
    leeway: Leeway,
    thoughts: Thoughts,
    whitespace: str | None,
    special: Mapping[str, int],
    *,
    is_free: bool = False,
) -> str:
    """The grammar of an answer that has leeway beside its form, in the form of serving_core/grammars.py. `special` are
    tokens that no text spells. With `is_free`, what has to come may be spelled by any tokens: else the library has it
    come as a tokenizer reads it, as special tokens where it looks like them."""

    def tag(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    calls = rules(leeway.calls, leeway.names, tag) if leeway.names else ""
    if not (is_free or calls or thoughts is not Thoughts.NONE):
        return grammar
    [form] = json.loads(grammar)["grammars"]
    start = f"start: {_START[thoughts]}{'(@form | calls)' if calls else '@form'}\n"
    lark = (FREE if is_free else "") + start + _thoughts(thoughts, tag) + calls + BLANKS
    parts = {"call": call_schema(leeway.calls, leeway.names), "object": {"type": "object"}} if calls else {}
    grammars = [{"lark_grammar": lark}, {**form, "name": "form"}]
    grammars += [{**of_schema(part, whitespace), "name": name} for name, part in parts.items() if f"@{name}" in calls]
    return json.dumps({"grammars": grammars})


_START: Final = {Thoughts.NONE: "", Thoughts.POSSIBLE: "thoughts? ", Thoughts.BEGUN: "thoughts "}


def _thoughts(thoughts: Thoughts, tag: Tag) -> str:
    """The rules for them; those that the prompt has begun have no tag."""
    if thoughts is Thoughts.NONE:
        return ""
    begun = "" if thoughts is Thoughts.BEGUN else f"{tag(reasoning.OPEN)} "
    close = tag(reasoning.CLOSE)
    if close.startswith("<"):  # a special token; but text that looks like it is read as the end of thoughts too
        return f"thoughts: {begun}TEXT? {close} blanks?\nTEXT: /(?s:.+)/ & ~/(?s:.*){CLOSE}(?s:.*)/\n"
    return f"thoughts: {begun}thought blanks?\nthought[lazy]: /(?s:.*){CLOSE}/\n"
