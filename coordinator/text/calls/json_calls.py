"""Calls that are JSON objects: {"name": "f", "arguments": {...}}. Most formats have them, between tags of their own."""

import json
from typing import Final

from coordinator.text.calls.reader import BLANKS, CallReader, Piece, Steps

ARGUMENTS: Final = ("arguments", "parameters")


class JsonCallReader(CallReader):
    """What such formats share. Where the name comes first, the arguments are told as they come."""

    _name = ""  # of what is a call once it has arguments

    def _calls(self, char: str) -> Steps[bool]:
        """Read calls in a row, of which this character begins the first. Return whether there is one: what is held then
        stands behind the last."""
        has_calls = False
        while True:
            if char == "{" and (behind := (yield from self._call())):
                char, has_calls = behind, True
            elif has_calls and char in "]}":  # a bracket too many
                self._held.clear()
                char = yield from self._solid()
            else:
                return has_calls

    def _call(self) -> Steps[str]:
        """Behind the { of what may be a call: empty where it is none; else the first solid character behind the call,
        which is over then, however it ended. What is held is that character, and what stands before it."""
        if not (yield from self._members()):
            return ""
        self._end()
        if self._last != "}":  # which was forgotten
            return self._last
        self._held.clear()
        return (yield from self._solid())

    def _members(self) -> Steps[bool]:
        """Behind the { of what may be a call, as far as members of an object go: whether they are those of a call."""
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
                self._held[:] = [char]  # what stands before it was part of the call
            if char == ",":
                char = yield from self._solid()
        return has_begun

    def _begin_named(self, name: str) -> bool:
        """Whether a call of this name has begun."""
        if self._is_held:
            self._name = name
            return False
        return self._begin(name)

    def _may_argue(self, *, has_begun: bool) -> bool:
        """Whether an object is the arguments of a call: of one that has begun, or of one that was named and begins."""
        name, self._name = self._name, ""
        return self._begin(name) if name else has_begun and self._lacks_arguments

    def _list(self) -> Steps[None]:
        """Behind the [ of what may be a list of calls, as far as it is one."""
        char, has_calls = (yield from self._solid()), False
        while char == "{" and (behind := (yield from self._call())):
            char, has_calls = behind, True
            if char == ",":
                self._held.clear()
                char = yield from self._solid()
        if has_calls and char == "]":
            self._held.clear()

    def _told_object(self) -> Steps[None]:
        """Tells the arguments, of which the { was taken."""
        self._argue("{")
        self._tells_arguments = True
        yield from self._container()
        self._tells_arguments = False

    def _value(self, char: str) -> Steps[tuple[str, str]]:
        """A value that begins with this character, as it is written, and the solid character behind it."""
        start = len(self._held) - 1
        if char not in '"{[':
            while char not in ",}]":
                char = self._take((yield))
            return "".join(self._held[start:-1]).strip(BLANKS), char
        yield from self._string() if char == '"' else self._container()
        value = "".join(self._held[start:])
        return value, (yield from self._solid())

    def _container(self) -> Steps[None]:
        """Behind the bracket that begins an object or a list, to the one that ends it."""
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
    """What a JSON string says; other values as they are written, but null, which is nothing."""
    if value == "null":
        return ""
    if not value.startswith('"'):
        return value
    try:
        text = str(json.loads(value))
        text.encode()
    except ValueError:  # of escapes that JSON does not know, and of halves of surrogate pairs
        return value
    return text


# ---- Calls as Hermes and Qwen write them: <tool_call>{"name": "f", "arguments": {...}}</tool_call> ----

HERMES_OPEN: Final = "<tool_call>"
HERMES_CLOSE: Final = "</tool_call>"


class HermesReader(JsonCallReader):
    """One call in every pair of tags, with text before and between them. A second call in the same tags is a call too,
    and what else follows a call there is text."""

    def _read(self) -> Steps[None]:
        yield from self._until(HERMES_OPEN)
        while True:
            if (yield from self._calls((yield from self._solid()))):
                if (yield from self._until(HERMES_CLOSE, HERMES_OPEN)) == HERMES_OPEN:  # the end was forgotten
                    continue
                self._held.clear()
            yield from self._until(HERMES_OPEN)


# Calls as Llama 3 writes them: {"name": "f", "parameters": {...}}; {...}, from the beginning of the answer on.

PYTHON_TAG: Final = "<|python_tag|>"


class Llama3Reader(JsonCallReader):
    """Calls alone, behind the tag or without it, then text. An answer that begins otherwise is text."""

    offered_only = True

    def _read(self) -> Steps[None]:
        char = yield from self._opening(PYTHON_TAG)
        while char == "{" and (behind := (yield from self._call())):
            char = behind
            if char in ";,":
                self._held.clear()
                char = yield from self._solid()


# Calls as Mistral's models write them: [TOOL_CALLS] and a JSON list of calls; later ones [TOOL_CALLS]f{...} for each
# call, also with [CALL_ID] and [ARGS] between the name and the arguments.

MISTRAL_TAG: Final = "[TOOL_CALLS]"
MISTRAL_ARGUMENTS: Final = "[ARGS]"


class MistralReader(JsonCallReader):
    """Text, then calls behind every tag. The tag is a special token, which must not be left out of the text."""

    def _read(self) -> Steps[None]:
        while True:
            yield from self._until(MISTRAL_TAG)
            char = yield from self._solid()
            if char == "[":
                yield from self._list()
            elif char == "{":
                yield from self._calls(char)
            else:
                yield from self._named(char)

    def _named(self, char: str) -> Steps[None]:
        """A call whose name begins with this character, and has the arguments behind it."""
        start = len(self._held) - 1
        while char != "{":
            char = self._take((yield))
        name = "".join(self._held[start:-1]).partition("[")[0].strip(BLANKS)
        if self._begin(name):
            yield from self._told_object()
            self._end()


# Calls that an answer is held to by a JSON schema, whatever the model's own form: a list of them, or the arguments of
# one alone.


class ListReader(JsonCallReader):
    """The answer is a JSON list of calls. Where it was cut short, what is left of it is no text."""

    def finish(self) -> list[Piece]:
        self._held.clear()
        return super().finish()

    def _read(self) -> Steps[None]:
        if (yield from self._solid()) == "[":
            yield from self._list()


class NamedReader(CallReader):
    """The answer is the arguments of a call of the one tool that there is."""

    def _read(self) -> Steps[None]:
        [name] = self._names
        char = yield
        self._begin(name)
        while True:
            self._argue(char)
            char = yield
