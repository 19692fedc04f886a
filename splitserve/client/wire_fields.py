"""Wire messages from what a caller has given, field by field, so that a refusal names the one that is wrong."""

from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from splitserve.client.errors import Refused, bad_argument

M = TypeVar("M", bound=Message)

MAX_SHOWN_CHARS: Final = 80
BYTES: Final = (bytes, bytearray, memoryview)  # lists of integers to Python, and text to protobuf: nobody means either

_KINDS: Final = {
    FieldDescriptor.CPPTYPE_BOOL: ("true or false", "bools"),
    FieldDescriptor.CPPTYPE_DOUBLE: ("a number", "numbers"),
    FieldDescriptor.CPPTYPE_FLOAT: ("a number", "numbers"),
    FieldDescriptor.CPPTYPE_INT32: ("an integer of 32 bits", "integers of 32 bits"),
    FieldDescriptor.CPPTYPE_INT64: ("an integer of 64 bits", "integers of 64 bits"),
    FieldDescriptor.CPPTYPE_STRING: ("a string of valid Unicode", "strings of valid Unicode"),
    FieldDescriptor.CPPTYPE_UINT32: ("an integer from 0 to 2**32 - 1", "integers from 0 to 2**32 - 1"),
}


def filled(message: M, fields: dict[str, Any], names: dict[str, str] | None = None) -> M:
    """The message, with these fields set; None leaves one out. Raises Refused, which calls a field by its name in
    `names`, where the wire cannot carry what was given."""
    for field, value in fields.items():
        if value is None:
            continue
        try:
            if isinstance(value, BYTES):
                raise TypeError("bytes")
            message.MergeFrom(type(message)(**{field: value}))
        except (TypeError, ValueError) as error:
            expected = _expected(message.DESCRIPTOR.fields_by_name[field])
            raise refused((names or {}).get(field, field), f"must be {expected}", value) from error
    return message


def refused(name: str, problem: str, value: object) -> Refused:
    """For an argument that is something else."""
    shown = repr(value)
    if len(shown) > MAX_SHOWN_CHARS:
        shown = shown[: MAX_SHOWN_CHARS - 3] + "..."
    return bad_argument(f"{name} {problem}, not {shown}", field=name)


def _expected(field: Any) -> str:
    """Of a field's descriptor."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_KINDS[each.cpp_type][1] for each in field.message_type.fields)
        return f"a mapping of {key} to {value}"
    one, many = _KINDS[field.cpp_type]
    return f"a list of {many}" if field.is_repeated else one
