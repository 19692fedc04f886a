"""Calls as Hermes and Qwen write them: <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""

from typing import Final

from coordinator.text.calls.json_calls import JsonCallReader
from coordinator.text.calls.reader import Steps

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class HermesReader(JsonCallReader):
    """One call in every pair of tags, with text before and between them. What follows a call in its tags is dropped."""

    def _read(self) -> Steps[None]:
        yield from self._until(OPEN)
        while True:
            if (yield from self._solid()) == "{" and (yield from self._call()):
                if (yield from self._skip_to([CLOSE, OPEN])) == OPEN:  # the end was forgotten
                    continue
            else:
                self._release()
            yield from self._until(OPEN)
