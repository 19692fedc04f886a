"""What an answer of a chat says, as OpenAI's messages and their deltas."""

import secrets
import string
from collections.abc import Sequence
from typing import Any, Final

from coordinator.text.answer_format import AnswerReader
from coordinator.text.calls.reader import MAX_CALLS, Kind, Piece

ID_CHARS: Final = string.ascii_letters + string.digits
ID_LENGTH: Final = 9  # that Mistral's templates ask for

_FIELDS: Final = {Kind.TEXT: "content", Kind.REASONING: "reasoning_content"}


class Deltas:
    """Of one answer. Added up, they are its message, with its thoughts or without."""

    def __init__(self, reader: AnswerReader, *, is_parallel: bool = True, tells_thoughts: bool = True) -> None:
        self._reader = reader
        self._tells_thoughts = tells_thoughts
        self._most_calls = MAX_CALLS if is_parallel else 1
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def feed(self, text: str) -> dict[str, Any]:
        """What the next piece of text makes certain; empty for nothing."""
        return self._delta(self._reader.feed(text))

    def finish(self) -> dict[str, Any]:
        """The rest, when no more text will come."""
        return self._delta(self._reader.finish())

    def _delta(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            match piece.kind:
                case Kind.CALL:
                    calls[self._num_calls] = _new_call(self._num_calls, piece.text)
                    self._num_calls += 1
                case Kind.ARGUMENTS:
                    index = self._num_calls - 1
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += piece.text
                case Kind.REASONING if not self._tells_thoughts:
                    continue
                case _:
                    field = _FIELDS[piece.kind]
                    delta[field] = delta.get(field, "") + piece.text
        told = [call for index, call in calls.items() if index < self._most_calls]
        return _with_reasoning({**delta, "tool_calls": told} if told else delta)


class Message:
    """The whole message of one answer, as its text comes."""

    def __init__(self, deltas: Deltas) -> None:
        self._deltas = deltas
        self._texts: dict[str, list[str]] = {}
        self._calls: list[tuple[dict[str, Any], list[str]]] = []  # each with the parts of its arguments

    @property
    def has_calls(self) -> bool:
        return self._deltas.has_calls

    def feed(self, text: str) -> None:
        """Takes the next piece of text."""
        self._add(self._deltas.feed(text))

    def finish(self) -> dict[str, Any]:
        """The message, when no more text will come. Its content is null where it has calls or thoughts alone."""
        self._add(self._deltas.finish())
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        calls = [
            {**call, "function": {**call["function"], "arguments": "".join(arguments)}}
            for call, arguments in self._calls
        ]
        message = {"role": "assistant", "content": None if calls or texts else "", "refusal": None, **texts}
        return _with_reasoning({**message, "tool_calls": calls} if calls else message)

    def _add(self, delta: dict[str, Any]) -> None:
        for name in _FIELDS.values():
            if name in delta:
                self._texts.setdefault(name, []).append(delta[name])
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(self._calls):
                self._calls.append(({name: value for name, value in part.items() if name != "index"}, []))
            self._calls[part["index"]][1].append(part["function"]["arguments"])


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The same with its thoughts under the name too that vLLM has for them by now."""
    thoughts = message.get(_FIELDS[Kind.REASONING])
    return message if thoughts is None else {**message, "reasoning": thoughts}


def _new_call(index: int, name: str) -> dict[str, Any]:
    call_id = "".join(secrets.choice(ID_CHARS) for _ in range(ID_LENGTH))
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
