"""Define Lark rules for arguments that are written as parameters between tags, and find what these cannot enforce."""

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from coordinator.text.calls.markup import TOKEN, Markup
from coordinator.text.calls.values import TEXT, listed, target, types_in
from coordinator.text.enforceable import Unenforceable, parse_schema

Tag = Callable[[str], str]
"""Return the Lark form of a tag: a string, or the special token."""

MAX_REFERENCES: Final = 16  # followed from a property to its schema
NOTES: Final = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"))
_OF_OBJECTS: Final = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_KINDS: Final = ("array", "boolean", "null", "number", "object")  # types of values that are no text
_DEFINITIONS: Final = ("$defs", "definitions")
_NAME: Final = re.compile(r"[^<>\"\n]{1,128}")
_META: Final = re.compile(r"[\\.+*?()|\[\]{}^$/]")


class Parameters:
    """Write the Lark rules of the arguments of one output's calls, as parameters between tags.

    `lines` are the rules that `of` refers to, and `schemas` the JSON schemas of the grammars that these rules refer to.
    """

    def __init__(self, markup: Markup, tag: Tag, *, closes_objects: bool) -> None:
        self._markup = markup
        self._tag = tag
        self._closes_objects = closes_objects
        self._close = markup.padding + markup.value[1]
        self.lines = [text_until("text", self._close, tag)]
        self.schemas: dict[str, str] = {}

    def of(self, place: str, text: str, *, is_strict: bool) -> str:
        """Return the rule body for all parameters of a tool, from the JSON schema `text`; an empty schema allows any.

        Adds the rules that it refers to, to `lines` and `schemas`, whose names begin with `place`. Raises Unenforceable
        with `is_strict` if the parameters cannot keep to the schema, and for a text that is no JSON object.
        """
        document = parse_schema(text or "{}")
        root = _resolved(document, document)
        if is_strict and (problem := unwritable(text)):
            raise Unenforceable(problem)
        properties, required = root.get("properties"), listed(root, "required")
        bodies = []
        for index, (name, schema) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
            if _NAME.fullmatch(name):
                body = self._parameter(f"{place}_{index}", name, schema, document)
                bodies.append(body if name in required else f"({body})?")
        others = root.get("additionalProperties")
        is_open = not bodies or not self._closes_objects or others is True
        if is_open and others is not False:
            bodies.append("free*")
            self._add_free()
        return " ".join(bodies)

    def _parameter(self, place: str, name: str, schema: Any, document: Mapping[str, Any]) -> str:
        part = _resolved(document, schema)
        types, values = types_in(document, part), _values_of(part)
        options = []
        if types == TEXT and values:
            texts = any_of(self._spelled(str(value) + self._close) for value in values)
            options.append(self._written(name, TEXT, texts))
        elif not types or types >= TEXT:
            options.append(self._written(name, TEXT, "text"))
        if (types and not types >= TEXT) or (self._markup.text and types != TEXT):
            definitions = {key: document[key] for key in _DEFINITIONS if key in document}
            self.schemas[place] = json.dumps({**part, **definitions})
            options.append(self._written(name, types - TEXT, f"@{place} {self._spelled(self._close)}"))
        return any_of(options)

    def _add_free(self) -> None:
        """Add the rule for a parameter of any name."""
        options = [self._written(None, TEXT, "text")]
        if self._markup.text:
            self.schemas["any"] = "{}"
            options.append(self._written(None, frozenset(), f"@any {self._spelled(self._close)}"))
        line = f"free: {any_of(options)}\nKEY: /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/\n"
        self.lines += [] if line in self.lines else [line]

    def _written(self, name: str | None, types: frozenset[str], value: str) -> str:
        """Return the rule body of a parameter; without a name for any one."""
        markup = self._markup
        kinds = sorted({"number" if kind == "integer" else kind for kind in types}) or _KINDS
        keys = dict.fromkeys(
            markup.key_written.format(key="\0", is_text=str(types == TEXT).lower(), type=kind) for kind in kinds
        )
        shown = name if name is None or not markup.text else html.escape(name)
        key = any_of(
            " ".join(
                filter(
                    None, (self._spelled(before), "KEY" if shown is None else lark_string(shown), self._spelled(after))
                )
            )
            for before, after in (written.split("\0") for written in keys)
        )
        opening = (markup.between if markup.value[0] else "") + markup.value[0] + markup.padding
        parts = (
            self._spelled(markup.key[0]),
            f"({key})",
            self._spelled(markup.key[1] + opening),
            f"({value})",
            self._spelled(markup.between),
        )
        return " ".join(filter(None, parts))

    def _spelled(self, text: str) -> str:
        return spelled(text, self._tag)


def unwritable(text: str) -> str:
    """Return why parameters between tags cannot keep to a schema of arguments; empty if they can.

    `text` is the JSON schema, or empty. Texts come without quotes, so that of their schemas only types and listed
    values are enforced. Raises Unenforceable if `text` is no JSON object.
    """
    document = parse_schema(text or "{}")
    root = _resolved(document, document)
    properties, required = root.get("properties", {}), root.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return "properties are no object, or required is no list"
    if unknown := sorted(root.keys() - _OF_OBJECTS):
        return f"arguments between tags do not keep to {unknown[0]!r}"
    if not isinstance(root.get("additionalProperties", False), bool):
        return "arguments between tags do not keep to a schema of additionalProperties"
    if missing := [name for name in required if name not in properties]:
        return f"the schema requires {missing[0]!r}, which is no property"
    for name, schema in properties.items():
        part = _resolved(document, schema)
        if not _NAME.fullmatch(name):
            return f"arguments between tags are not named {name!r:.80}"
        if types_in(document, part) >= TEXT and (others := sorted(_beyond_types(part))):
            return f"a text between tags does not keep to {others[0]!r}"
        if any(not place.startswith(("#/$defs/", "#/definitions/")) for place in _references(part)):
            return "a reference leads to no definition"
    return ""


def _beyond_types(part: Mapping[str, Any]) -> set[str]:
    """Return the keywords of a schema that may be a text's and are not enforced."""
    known = {"type"} | ({"enum", "const"} if part.get("type", "string") == "string" else set())
    others = {name for name in part if name not in NOTES | known | {"anyOf"}}
    return others.union(*(_beyond_types(each) for each in listed(part, "anyOf") if isinstance(each, Mapping)))


def _references(part: Any) -> Iterable[str]:
    if isinstance(part, Mapping):
        if isinstance(place := part.get("$ref"), str):
            yield place
        part = [*part.values()]
    if isinstance(part, list):
        for each in part:
            yield from _references(each)


def _resolved(document: Mapping[str, Any], schema: Any) -> Mapping[str, Any]:
    """Return the schema that a schema with nothing but a reference names."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if "$ref" not in schema or schema.keys() - NOTES - {"$ref", *_DEFINITIONS}:
            return schema
        schema = target(document, schema["$ref"])
    return {}


def _values_of(part: Mapping[str, Any]) -> Sequence[Any]:
    return [part["const"]] if "const" in part else listed(part, "enum")


# ---- Lark ----


def spelled(text: str, tag: Tag) -> str:
    """Return a text as Lark strings, separated by spaces; `tag` gives the Lark form of a tag in it."""
    return " ".join(_pieces(text, tag))


def text_until(name: str, close: str, tag: Tag) -> str:
    """Return a Lark rule, called `name`, for any text up to the first `close`, which ends it and belongs to it."""
    pieces = _pieces(close, tag)
    first = next((index for index, piece in enumerate(pieces) if piece.startswith("<")), None)
    if first is None:
        return f"{name}[lazy]: /(?s:.*){pattern(close)}/\n"
    before = "".join(json.loads(piece) for piece in pieces[:first])
    body, least = f"{name.upper()}{'' if before else '?'} {' '.join(pieces[first:])}", "*" if before else "+"
    ending = f"& ~/(?s:.*){pattern(close)}(?s:.*)/"  # text that looks like the token ends it too
    return f"{name}: {body}\n{name.upper()}: /(?s:.{least}){pattern(before)}/ {ending}\n"


def pattern(text: str) -> str:
    """Return a regular expression of Lark that matches this text."""
    return _META.sub(r"\\\g<0>", text).replace("\n", r"\n")


def _pieces(text: str, tag: Tag) -> list[str]:
    """Return the Lark forms of the parts of a text: special tokens, and what lies between them."""
    pieces, plain = list[str](), ""
    for part in re.split(f"({TOKEN.pattern})", text):
        if (form := tag(part)).startswith("<"):
            pieces += [lark_string(plain), form] if plain else [form]
            plain = ""
        else:
            plain += part
    return [*pieces, lark_string(plain)] if plain else pieces


def lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def any_of(rules: Iterable[str]) -> str:
    return " | ".join(rules)
