"""Calls as Hermes and Qwen write them: <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""

from typing import Final

from coordinator.text.calls.json_calls import JsonCallReader
from coordinator.text.calls.reader import Steps

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class HermesReader(JsonCallReader):
    """One call in every pair of tags, with text before and between them. A second call in the same tags is a call too,
    and what else follows a call there is text."""

    def _read(self) -> Steps[None]:
        yield from self._until(OPEN)
        while True:
            if (yield from self._calls((yield from self._solid()))):
                if (yield from self._until(CLOSE, OPEN)) == OPEN:  # the end was forgotten
                    continue
                self._held.clear()
            yield from self._until(OPEN)
