"""Parse calls in Python syntax, as Llama 3.2, Llama 4 and ToolACE write: [f(city="Paris", days=[1, 2]), g()]."""

import ast
import json
import warnings
from typing import Any, Final

from coordinator.text.calls.json_calls import PYTHON_TAG
from coordinator.text.calls.reader import BLANKS, CallReader, Steps

NAMES: Final = {"true": True, "false": False, "null": None}  # JSON literals, which models mix in
START: Final = "<|python_start|>"  # tags of Llama 4 around the list
END: Final = "<|python_end|>"
TAGS: Final = (PYTHON_TAG, START, END)
FAILURES: Final = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)  # of source that is no literal
BETWEEN: Final = BLANKS + "._("  # may surround the words of a call's name


class PythonicReader(CallReader):
    """Parse one list of calls at the beginning of an output, with or without a tag, then text.

    Each call is returned when it is complete.
    """

    offered_only = True

    def _read(self) -> Steps[None]:
        char = yield from self._opening(PYTHON_TAG, START)
        if char == "[":
            yield from self._list()
            if (yield from self._next(END)):
                self._held.clear()
        self._is_opened = False

    def _list(self) -> Steps[None]:
        """Parse the calls of a list after its [."""
        char = ","
        while char == ",":
            call = parse_call((yield from self._source()))
            if call is None or not self._begin(call[0]):
                return
            self._argue(call[1])
            self._end()
            char = yield from self._solid()
            if char in ",]":
                self._held.clear()

    def _source(self) -> Steps[str]:
        """Read the next call up to its closing bracket, or as far as needed to see that it is no call."""
        start, depth = len(self._held), 0
        while True:
            char = self._take((yield))
            if char in "\"'":
                yield from self._string(char)
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
            if depth <= 0 and not (char.isalnum() or char in BETWEEN):
                return "".join(self._held[start:]).strip(BLANKS)


def parse_call(source: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as a JSON object, of a call in Python syntax.

    None if `source` is no call, or has other arguments than keywords with literal values.
    """
    try:
        call = _parsed(source)
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        values = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        return ast.unparse(call.func), _json(values)
    except FAILURES:
        return None


def literal(source: str) -> str | None:
    """Return a Python literal as JSON; None for any other text."""
    try:
        return _json(_value(_parsed(source)))
    except FAILURES:
        return None


def _parsed(source: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unknown escapes
        return ast.parse(source, mode="eval").body


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # refuses lone surrogates
    return text


def _value(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError("this is no literal")
