"""Define Lark rules for arguments that are written as literals of a language, and find what these cannot enforce."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from coordinator.text.calls.parameters import NOTES, any_of, lark_string
from coordinator.text.calls.values import listed, target
from coordinator.text.enforceable import parse_schema
from coordinator.text.schemas import schemas_in

MAX_DEPTH: Final = 32  # of schemas within schemas
_KNOWN: Final = NOTES | {
    *("type", "enum", "const", "anyOf", "$ref", "$defs", "definitions"),
    *("properties", "required", "additionalProperties", "items"),
}


@dataclass(frozen=True, slots=True)
class Language:
    """How values are written.

    The functions return the Lark form of a text, of what precedes a member of an object, and of what precedes an
    argument, which is empty for a name that cannot be written. `rules` define any `value`, `list` and `dict`, any
    `arguments`, and the terminals or rules `text`, NUMBER and INTEGER.
    """

    words: Mapping[bool | None, str]
    text: Callable[[str], str]
    key: Callable[[str], str]
    argument: Callable[[str], str]
    rules: str


class Literals:
    """Write the Lark rules of the arguments of one output's calls; `lines` are the rules that `of` refers to."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._document: Mapping[str, Any] = {}
        self._named: dict[str, str] = {}  # rules of the definitions of this document
        self._num_rules = 0
        self.lines = [language.rules]

    def of(self, text: str) -> str:
        """Return the rule body for the arguments of a tool, from the JSON schema `text`; an empty schema allows any.

        Adds the rules that it refers to, to `lines`. What `unwritable` finds in the schema is not enforced. Raises
        Unenforceable if `text` is no JSON object.
        """
        self._document, self._named = parse_schema(text or "{}"), {}
        return self._members(_root_of(self._document), self._language.argument, "arguments?", 0)

    def _members(self, schema: Mapping[str, Any], key: Callable[[str], str], free: str, depth: int) -> str:
        """Return the rule body for the members of an object, in the order of its schema."""
        properties, required = schema.get("properties"), listed(schema, "required")
        if not isinstance(properties, Mapping) or not properties:
            return "" if schema.get("additionalProperties") is False else free
        members = [
            (self._rule(f"{key(name)} {self._value(each, depth + 1)}"), name in required)
            for name, each in properties.items()
            if key(name)
        ]
        behind, options = "", list[str]()
        for member, is_required in reversed(members):
            options = [f"{member} {behind}", *([] if is_required else options)]
            behind = self._rule(
                f'"," blanks? {member} {behind}' if is_required else f'("," blanks? {member})? {behind}'
            )
        is_empty = not any(is_required for _, is_required in members)
        return f"({any_of(options)}){'?' if is_empty else ''}" if options else ""

    def _value(self, schema: Any, depth: int) -> str:
        """Return the rule body for a value of a schema."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return "value"
        if isinstance(reference := schema.get("$ref"), str):
            return self._definition(reference, depth)
        values = [schema["const"]] if "const" in schema else listed(schema, "enum")
        if values and all(isinstance(value, str | int | float | None) for value in values):
            return f"({any_of(map(self._literal, values))})"
        if options := listed(schema, "anyOf"):
            return f"({any_of(self._value(each, depth + 1) for each in options)})"
        named = schema.get("type")
        kinds = listed(schema, "type") or ([named] if isinstance(named, str) else [])
        return f"({any_of(self._of_type(kind, schema, depth) for kind in kinds)})" if kinds else "value"

    def _definition(self, reference: str, depth: int) -> str:
        if reference not in self._named:
            self._num_rules += 1
            name = self._named[reference] = f"v{self._num_rules}"
            self.lines.append(f"{name}: {self._value(target(self._document, reference), depth + 1)}\n")
        return self._named[reference]

    def _of_type(self, kind: Any, schema: Mapping[str, Any], depth: int) -> str:
        words = self._language.words
        match kind:
            case "string":
                return "text"
            case "integer" | "number":
                return "INTEGER" if kind == "integer" else "NUMBER"
            case "boolean":
                return f'"{words[True]}" | "{words[False]}"'
            case "null":
                return f'"{words[None]}"'
            case "array":
                item = self._rule(self._value(schema.get("items"), depth + 1))
                return f'"[" ({item} ("," blanks? {item})*)? "]"'
            case "object":
                return f'"{{" {self._members(schema, self._language.key, "pairs?", depth)} "}}"'
        return "value"

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return self._language.text(value)
        return lark_string(self._language.words[value] if isinstance(value, bool | None) else str(value))

    def _rule(self, body: str) -> str:
        self._num_rules += 1
        self.lines.append(f"v{self._num_rules}: {body}\n")
        return f"v{self._num_rules}"


def _root_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that the document is, or names."""
    root: Any = document
    for _ in range(MAX_DEPTH):
        if not isinstance(root, Mapping):
            return {}
        if "$ref" not in root:
            break
        root = target(document, root["$ref"])
    return root if isinstance(root, Mapping) else {}


def unwritable(language: Language, text: str) -> str:
    """Return why literals of the language cannot be kept to a schema of arguments; empty if they can.

    `text` is the JSON schema, or empty. Raises Unenforceable if it is no JSON object.
    """
    document = parse_schema(text or "{}")
    root = _root_of(document)
    for part in schemas_in(document):
        if unknown := sorted(part.keys() - _KNOWN):
            return f"arguments in the model's own format do not keep to {unknown[0]!r}"
        properties, required = part.get("properties", {}), part.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return "properties are no object, or required is no list"
        if not isinstance(part.get("additionalProperties", False), bool):
            return "arguments in the model's own format do not keep to a schema of additionalProperties"
        written = language.argument if part is root else language.key
        if odd := [name for name in (*properties, *required) if name not in properties or not written(name)]:
            return f"arguments in the model's own format have no {odd[0]!r:.80}"
    return ""
