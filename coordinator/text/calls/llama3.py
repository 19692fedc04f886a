"""Calls as Llama 3 writes them: {"name": "f", "parameters": {...}}; {...}, from the beginning of the answer on."""

from typing import Final

from coordinator.text.calls.json_calls import JsonCallReader
from coordinator.text.calls.reader import Steps

TAG: Final = "<|python_tag|>"


class Llama3Reader(JsonCallReader):
    """Calls alone, behind the tag or without it, then text. An answer that begins otherwise is text."""

    offered_only = True

    def _read(self) -> Steps[None]:
        char = yield from self._opening(TAG)
        while char == "{" and (behind := (yield from self._call())):
            char = behind
            if char in ";,":
                self._held.clear()
                char = yield from self._solid()
