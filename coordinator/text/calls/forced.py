"""Calls that an answer is held to by a JSON schema, whatever the model's own form: a list of them, or the arguments of
one alone."""

from coordinator.text.calls.json_calls import JsonCallReader
from coordinator.text.calls.reader import CallReader, Piece, Steps


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
