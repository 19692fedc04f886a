"""Build OpenAI's chat messages and their deltas from the text of an output."""

import secrets
import string
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final

from coordinator.text.answer_format import AnswerReader
from coordinator.text.calls.reader import MAX_CALLS, Kind, Piece

ID_CHARS: Final = string.ascii_letters + string.digits
ID_LENGTH: Final = 9  # required by Mistral's templates

CONTENT, REASONING, CALLS = "content", "reasoning_content", "tool_calls"
_FIELDS: Final = {Kind.TEXT: CONTENT, Kind.REASONING: REASONING, Kind.CALL: CALLS, Kind.ARGUMENTS: CALLS}

_NOTHING: Final = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))  # as in vLLM

Delta = dict[str, Any]
"""A piece of a message: of its content, of its thoughts (under both of their names), or of its tool calls.

A delta never has two of these, so that a list of deltas keeps the order of the output.
"""


class Deltas:
    """Split the text of one output into deltas, which add up to its message, with or without thoughts."""

    def __init__(self, reader: AnswerReader, *, is_parallel: bool = True, includes_thoughts: bool = True) -> None:
        self._reader = reader
        self._tells_thoughts = includes_thoughts
        self._most_calls = MAX_CALLS if is_parallel else 1
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that the next piece of text makes certain."""
        return self._deltas(self._reader.feed(text))

    def finish(self) -> list[Delta]:
        """Return the remaining deltas, when the text has ended."""
        return self._deltas(self._reader.finish())

    def _deltas(self, pieces: Sequence[Piece]) -> list[Delta]:
        if len(pieces) == 1 and pieces[0].kind is Kind.TEXT:  # the usual case
            return [{CONTENT: pieces[0].text}]
        told: list[Delta] = []
        for field, run in groupby(pieces, lambda piece: _FIELDS[piece.kind]):
            if field == CALLS:
                if calls := self._calls(run):
                    told.append({CALLS: calls})
            elif field == CONTENT or self._tells_thoughts:
                told.append(_with_reasoning({field: "".join(piece.text for piece in run)}))
        return told

    def _calls(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.kind is Kind.CALL:
                calls[self._num_calls] = _new_call(self._num_calls, piece.text)
                self._num_calls += 1
            else:
                index = self._num_calls - 1
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        return [call for index, call in calls.items() if index < self._most_calls]


class Message:
    """Build the whole message of one output as its text comes."""

    def __init__(self, deltas: Deltas) -> None:
        self._deltas = deltas
        self._texts: dict[str, list[str]] = {}
        self._calls: list[tuple[dict[str, Any], list[str]]] = []  # each call with the pieces of its arguments

    @property
    def has_calls(self) -> bool:
        return self._deltas.has_calls

    def feed(self, text: str) -> None:
        """Add the next piece of text."""
        self._add(self._deltas.feed(text))

    def finish(self) -> dict[str, Any]:
        """Return the message, when the text has ended. Content is null when there are only tool calls or thoughts."""
        self._add(self._deltas.finish())
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        calls = [
            {**call, "function": {**call["function"], "arguments": "".join(arguments)}}
            for call, arguments in self._calls
        ]
        message = {"role": "assistant", "content": None if calls or texts else "", **_NOTHING, **texts}
        return _with_reasoning({**message, CALLS: calls} if calls else message)

    def _add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            for name in (CONTENT, REASONING):
                if name in delta:
                    self._texts.setdefault(name, []).append(delta[name])
            for part in delta.get(CALLS, ()):
                if part["index"] == len(self._calls):
                    self._calls.append(({name: value for name, value in part.items() if name != "index"}, []))
                self._calls[part["index"]][1].append(part["function"]["arguments"])


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its thoughts also under `reasoning`, vLLM's newer name."""
    thoughts = message.get(REASONING)
    return message if thoughts is None else {**message, "reasoning": thoughts}


def _new_call(index: int, name: str) -> dict[str, Any]:
    call_id = "".join(secrets.choice(ID_CHARS) for _ in range(ID_LENGTH))
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
