"""Parse calls that are JSON objects: {"name": "f", "arguments": {...}}. Most formats have these between their own
tags."""

import json
from typing import Final

from coordinator.text.calls.reader import BLANKS, NAME, CallReader, Piece, Steps

ARGUMENTS: Final = ("arguments", "parameters")


class JsonCallReader(CallReader):
    """Common parser of JSON call formats. Arguments that follow the name are returned as they come."""

    _name = ""  # name of a call whose arguments have not come yet

    def _calls(self, char: str) -> Steps[bool]:
        """Parse consecutive calls, the first of which begins with this character.

        Returns whether there is one. The text held then is the text after the last call.
        """
        has_calls = False
        while True:
            if char == "{" and (behind := (yield from self._call())):
                char, has_calls = behind, True
            elif has_calls and char in "]}":  # a superfluous bracket
                self._held.clear()
                char = yield from self._solid()
            else:
                return has_calls

    def _call(self) -> Steps[str]:
        """Parse the text after the { of a possible call.

        Returns an empty string if there is no call; else the first solid character after the call, which has ended. The
        text held then is that character and the blanks before it.
        """
        if not (yield from self._members()):
            return ""
        self._end()
        if self._last != "}":  # the closing bracket is missing
            return self._last
        self._held.clear()
        return (yield from self._solid())

    def _members(self) -> Steps[bool]:
        """Parse the members of an object after its {. Returns whether they are those of a call."""
        has_begun, arguments, self._name = False, "", ""
        char = yield from self._solid()
        while char == '"':
            key = yield from self._string()
            if (yield from self._solid()) != ":":
                break
            char = yield from self._solid()
            if char == "{" and key in ARGUMENTS and self._may_argue(has_begun=has_begun):
                has_begun = True
                yield from self._told_object()
                char = yield from self._solid()
            else:
                value, char = yield from self._value(char)
                if key in ARGUMENTS:
                    arguments = _unquoted(value)
                elif key == "name" and not has_begun:
                    has_begun = self._begin_named(_unquoted(value))
                if has_begun and arguments and self._lacks_arguments:
                    self._argue(arguments)
            if has_begun:
                self._held[:] = [char]  # the text before it was part of the call
            if char == ",":
                char = yield from self._solid()
        return has_begun

    def _begin_named(self, name: str) -> bool:
        """Return whether a call of this name has begun."""
        if self._is_held:
            self._name = name
            return False
        return self._begin(name)

    def _may_argue(self, *, has_begun: bool) -> bool:
        """Return whether an object is the arguments of a call, which may have begun or begins here."""
        name, self._name = self._name, ""
        return self._begin(name) if name else has_begun and self._lacks_arguments

    def _list(self) -> Steps[None]:
        """Parse the text after the [ of a possible list of calls."""
        char, has_calls = (yield from self._solid()), False
        while char == "{" and (behind := (yield from self._call())):
            char, has_calls = behind, True
            if char == ",":
                self._held.clear()
                char = yield from self._solid()
        if has_calls and char == "]":
            self._held.clear()

    def _told_object(self) -> Steps[None]:
        """Return the arguments piece by piece, after their {."""
        self._argue("{")
        self._tells_arguments = True
        yield from self._container()
        self._tells_arguments = False

    def _value(self, char: str) -> Steps[tuple[str, str]]:
        """Parse a value that begins with this character. Returns its text and the next solid character."""
        start = len(self._held) - 1
        if char not in '"{[':
            while char not in ",}]":
                char = self._take((yield))
            return "".join(self._held[start:-1]).strip(BLANKS), char
        yield from self._string() if char == '"' else self._container()
        value = "".join(self._held[start:])
        return value, (yield from self._solid())

    def _container(self) -> Steps[None]:
        """Read to the bracket that ends an object or list, after its opening bracket."""
        depth = 1
        while depth:
            char = self._take((yield))
            if char == '"':
                yield from self._string()
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1


def _unquoted(value: str) -> str:
    """Return the text of a JSON string; other values as written; empty for null."""
    if value == "null":
        return ""
    if not value.startswith('"'):
        return value
    try:
        text = str(json.loads(value))
        text.encode()
    except ValueError:  # unknown escapes, and lone surrogates
        return value
    return text


# ---- Hermes and Qwen: <tool_call>{"name": "f", "arguments": {...}}</tool_call> ----

HERMES_OPEN: Final = "<tool_call>"
HERMES_CLOSE: Final = "</tool_call>"


class HermesReader(JsonCallReader):
    """Parse one call in every pair of tags, with text before and between the pairs.

    A second call within the same tags counts too; other text within the tags is text.
    """

    def _read(self) -> Steps[None]:
        yield from self._until(HERMES_OPEN)
        while True:
            self._is_opened = True
            has_calls = yield from self._calls((yield from self._solid()))
            self._is_opened = False
            if has_calls:
                if (yield from self._until(HERMES_CLOSE, HERMES_OPEN)) == HERMES_OPEN:  # the closing tag is missing
                    continue
                self._held.clear()
            yield from self._until(HERMES_OPEN)


# Llama 3: {"name": "f", "parameters": {...}}; {...}, at the beginning of the output.

PYTHON_TAG: Final = "<|python_tag|>"


class Llama3Reader(JsonCallReader):
    """Parse calls at the beginning, with or without the tag, and after each tag; all else is text."""

    offered_only = True

    def _read(self) -> Steps[None]:
        char = yield from self._opening(PYTHON_TAG)
        while True:
            while char == "{" and (behind := (yield from self._call())):
                char = behind
                if char in ";,":
                    self._held.clear()
                    char = yield from self._solid()
            self._is_opened = False
            yield from self._until(PYTHON_TAG)
            self._is_opened = True
            char = yield from self._solid()


# Mistral: [TOOL_CALLS] and a JSON list of calls; newer models write [TOOL_CALLS]f{...} for each call, also with
# [CALL_ID] and [ARGS] between name and arguments.

MISTRAL_TAG: Final = "[TOOL_CALLS]"
MISTRAL_ARGUMENTS: Final = "[ARGS]"


class MistralReader(JsonCallReader):
    """Parse text, then calls after every tag. The tag is a special token, which must stay in the text."""

    def _read(self) -> Steps[None]:
        while True:
            yield from self._until(MISTRAL_TAG)
            self._is_opened = True
            char = yield from self._solid()
            if char == "[":
                yield from self._list()
            elif char == "{":
                yield from self._calls(char)
            else:
                yield from self._named(char)
            self._is_opened = False

    def _named(self, char: str) -> Steps[None]:
        """Parse a call whose name begins with this character and is followed by its arguments."""
        start = len(self._held) - 1
        while char != "{":
            name = "".join(self._held[start:]).partition("[")[0].rstrip(BLANKS)
            if not NAME.fullmatch(name):
                return
            char = self._take((yield))
        if self._begin(name):
            yield from self._told_object()
            self._end()


# Calls that a JSON schema enforces, whatever the model's own format: a list of calls, or the arguments of a single
# call.


class ListReader(JsonCallReader):
    """Parse an output that is a JSON list of calls, enforced by a schema.

    The rest of a list that was cut short is dropped.
    """

    def finish(self) -> list[Piece]:
        self._held.clear()
        return super().finish()

    def _read(self) -> Steps[None]:
        if (yield from self._solid()) == "[":
            yield from self._list()


class NamedReader(CallReader):
    """Parse an output that is, enforced by a schema, the arguments of a call of the only tool."""

    def _read(self) -> Steps[None]:
        [name] = self._tools
        char = yield
        self._begin(name)
        while True:
            self._argue(char)
            char = yield
