"""What is asked of the names of an object's properties, as the library knows it: as properties, or patterns. Pure."""

import json
from collections.abc import Mapping
from typing import Any, Final

BESIDE: Final = {"type", "title", "description"}  # keywords that ask nothing of a text
MOST_COPIED_CHARS: Final = 2**17


def put_names(part: dict[str, Any], schema: Mapping[str, Any]) -> None:
    """In place of `propertyNames` of an object with any properties: one whose names are of a list has the properties of
    that list, one whose names meet a pattern those of the pattern, and no others. What else is asked of names stays."""
    asked = _asked(part.get("propertyNames"), schema)
    if not asked or "properties" in part or "patternProperties" in part:
        return
    value = part.get("additionalProperties", True)
    listed, pattern = asked.get("enum"), _pattern(asked)
    if asked.keys() == {"enum"} and isinstance(listed, list) and all(isinstance(each, str) for each in listed):
        if len(listed) * len(json.dumps(value)) > MOST_COPIED_CHARS:
            return
        part["properties"] = dict.fromkeys(listed, value)
    elif pattern:
        part["patternProperties"] = {pattern: value}
    else:
        return
    del part["propertyNames"]
    part["additionalProperties"] = False


def _asked(names: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Of a text; nothing where that is not all."""
    if isinstance(names, dict) and names.keys() == {"$ref"} and isinstance(schema.get("$defs"), dict):
        names = schema["$defs"].get(str(names["$ref"]).removeprefix("#/$defs/"))
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return {}
    return {keyword: value for keyword, value in names.items() if keyword not in BESIDE}


def _pattern(asked: Mapping[str, Any]) -> str:
    """That says the same; empty where none does."""
    if asked.keys() == {"pattern"} and isinstance(asked["pattern"], str):
        return str(asked["pattern"])
    least, most = asked.get("minLength", 0), asked.get("maxLength", "")
    is_length = asked.keys() <= {"minLength", "maxLength"} and str(least).isdecimal() and str(most or 0).isdecimal()
    return rf"^(?s:.{{{least},{most}}})$" if is_length else ""
