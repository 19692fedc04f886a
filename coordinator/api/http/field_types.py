"""What the request models of the HTTP API are made of: their base class, kinds of fields, and errors.

A null counts as missing. A value has to have its JSON type: nothing is converted. Every fault of a body is named in one
error, each with the field, the value and the limit.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

MAX_FAULTS: Final = 8  # named in one error
MAX_FIELD_CHARS: Final = 200
QUOTE: Final = "'"


class Model(BaseModel):
    """A JSON object. Unknown fields are kept apart, so that they can be reported."""

    # str_min_length has pydantic check that strings are valid Unicode, which those of JSON need not be.
    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=(), defer_build=True, str_min_length=0
    )

    def unknown_fields(self) -> list[str]:
        """Return the dotted names, each once, of the unknown fields that are not null.

        Nested objects are included; objects of one list share a name, as in messages[].role.
        """
        return list(dict.fromkeys(self._unknown("")))

    def _unknown(self, prefix: str) -> Iterator[str]:
        if extra := self.model_extra:
            yield from (prefix + name for name, value in extra.items() if value is not None)
        values = self.__dict__  # without unknown fields
        for name in self.model_fields_set:
            if isinstance(value := values.get(name), Model | list):
                yield from _unknown_in(value, prefix + name)


def _unknown_in(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Model):
        yield from value._unknown(f"{path}.")
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, Model | list):
                yield from _unknown_in(entry, f"{path}[]")


class RequestModel(Model):
    """The body of a call."""

    _given: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Return the request with these fields. Raises RequestError that names all faults."""
        try:
            request = cls.model_validate(values)
        except ValidationError as error:
            raise refusal(error, values) from None  # its text would hold the client's values
        request._given = values
        return request

    def given(self, name: str) -> Any:
        """Return the value of a field as the client sent it, None when missing."""
        return self._given.get(name)


# ---- Kinds of fields ----

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**32 - 1)]], Field(fail_fast=True)]


@dataclass(frozen=True)
class Ignored:
    """Mark a field that may be sent and has no effect. `about` is the reason, without its full stop."""

    about: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "description": f"No effect: {self.about}."}


@dataclass(frozen=True, init=False)
class Refused:
    """Mark a field that would change the output and is not supported.

    `about` is the reason, without its full stop. `harmless` are values that are accepted because they change nothing;
    so is the value of the earlier field `same_as`.
    """

    about: str
    harmless: tuple[Any, ...]
    same_as: str

    def __init__(self, about: str, *harmless: Any, same_as: str = "") -> None:
        object.__setattr__(self, "about", about)
        object.__setattr__(self, "harmless", harmless)
        object.__setattr__(self, "same_as", same_as)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        harmless = {"enum": [None, *self.harmless]} if not self.same_as else {}
        unless = f" It may be what {self.same_as} is." if self.same_as else ""
        return {**handler(schema), **harmless, "description": f"Not supported: {self.about}.{unless}"}

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        others = (info.data.get(self.same_as),) if self.same_as else ()
        # True == 1 in Python, but not in JSON.
        if value is None or any(type(value) is type(each) and value == each for each in (*self.harmless, *others)):
            return value
        raise fault(f"({shown(value)}) is not supported: {self.about}")


def _listed(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise expected("a string or a list of strings")
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_listed, json_schema_input_type=str | list[str])]
"""A list of strings, or a single string."""

TEXT, LIST, OBJECT = "#text", "#list", "#object"  # tags of unions; no field of a request has such a name
_JSON_TYPES: Final[Mapping[type, str]] = {str: TEXT, list: LIST, dict: OBJECT}


def by_json_type(what: str) -> Discriminator:
    """Return the discriminator of a union whose members have the tags TEXT, LIST and OBJECT."""
    return Discriminator(lambda value: _JSON_TYPES.get(type(value)), "expected", what)


# ---- Errors ----


def fault(problem: str) -> PydanticCustomError:
    """Return the error of a validator; `problem` goes on after the field's name."""
    return PydanticCustomError("fault", "{problem}", {"problem": problem})


def expected(what: str) -> PydanticCustomError:
    """Return the error of a validator for a value that is not `what`."""
    return PydanticCustomError("expected", "{what}", {"what": what})


_EXPECTED: Final = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a finite number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string of valid Unicode",
    "string_unicode": "a string of valid Unicode",
}
_ABOUT: Final = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "must not be empty",
}


def refusal(error: ValidationError, values: Mapping[str, Any]) -> RequestError:
    """Return the error that clients get, which names up to MAX_FAULTS faults. Its field is that of the first."""
    details = error.errors(include_url=False)
    faults = [_fault(each, values) for each in details[:MAX_FAULTS]]
    more = [f"{len(details) - MAX_FAULTS} more faults"] if len(details) > MAX_FAULTS else []
    return RequestError(BAD_PARAM, "; ".join([*(" ".join(each) for each in faults), *more]), field=faults[0][0])


def _fault(details: ErrorDetails, values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field of a fault, and what is wrong with it."""
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    field = _field(details["loc"], values)
    match kind:
        case "missing":
            return field, "is missing"
        case "fault":
            return field, details["msg"]
        case "expected":
            return field, f"must be {details['msg']}, not {shown(value)}"
        case "too_long":
            return field, f"has {len(value)} entries, the limit is {context['max_length']}"
        case "too_short":
            return field, f"has {len(value)} entries, at least {context['min_length']} is needed"
        case "string_too_long":
            return field, f"has {len(value)} characters, the limit is {context['max_length']}"
        case "union_tag_not_found":
            return f"{field}.{context['discriminator'].strip(QUOTE)}", "is missing"
        case "union_tag_invalid":
            name = context["discriminator"].strip(QUOTE)
            return f"{field}.{name}", f"{shown(value[name])} is not supported: it must be {context['expected_tags']}"
    context = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
    about = _ABOUT.get(kind, f"must be {_EXPECTED.get(kind, 'valid')}").format(**context)
    return field, f"{about}, not {shown(value)}"


def _field(location: tuple[int | str, ...], values: Any) -> str:
    """Return the path of a field. What is in a location but not in the values names the member of a union."""
    path, value = "", values
    for index, each in enumerate(location, start=1):
        if isinstance(value, list) and isinstance(each, int):
            path, value = f"{path}[{each}]", value[each]
        elif isinstance(value, dict) and (each in value or index == len(location)) and each != "[key]":
            path, value = f"{path}.{each}", value.get(each)
    # Keys of objects are the client's.
    return path.removeprefix(".")[:MAX_FIELD_CHARS].encode(errors="backslashreplace").decode()


def shown(value: Any) -> str:
    """Return a value for an error message: JSON, shortened."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 2**64 else "an integer beyond 64 bits"
    return text if len(text) <= 80 else text[:77] + "..."
