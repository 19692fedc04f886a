"""Calls as Mistral's models write them: [TOOL_CALLS] and a JSON list of calls; later ones [TOOL_CALLS]f{...} for each
call, also with [CALL_ID] and [ARGS] between the name and the arguments."""

from typing import Final

from coordinator.text.calls.json_calls import JsonCallReader
from coordinator.text.calls.reader import BLANKS, Steps

TAG: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"


class MistralReader(JsonCallReader):
    """Text, then calls behind every tag. The tag is a special token, which must not be left out of the text."""

    def _read(self) -> Steps[None]:
        while True:
            yield from self._until(TAG)
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
