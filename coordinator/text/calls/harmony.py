"""Parse Harmony, the messages of gpt-oss: each has a channel and may have a recipient, which is a tool in a call.

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text
<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}
"""

import re
from typing import Final

from coordinator.text.calls.json_calls import JsonCallReader
from coordinator.text.calls.reader import BLANKS, END, Kind, Steps

HARMONY: Final = "openai"  # vLLM's name of the format
START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT: Final = "to="
ANALYSIS: Final = "analysis"
PREFIX: Final = "functions."
TAGS: Final = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)

_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")


class HarmonyReader(JsonCallReader):
    """Parse the messages of one output, which begins within the header of the first; anything else is text.

    Messages in the channel of analysis are thoughts. Messages to tools that are built into the model are left out.
    """

    keeps_blanks = True

    def _read(self) -> Steps[None]:
        begun = ""
        while any(tag.startswith(begun) for tag in (CHANNEL, RECIPIENT, START, MESSAGE)):
            begun = (begun + self._take((yield))).lstrip(BLANKS)
            if begun in (CHANNEL, RECIPIENT, START, MESSAGE):
                break
        else:
            return
        while True:
            self._is_opened = True
            if not begun.endswith(MESSAGE):
                yield from self._find([MESSAGE])
            header = "".join(self._held).rpartition(START)[2]
            self._held.clear()
            yield from self._message(header)
            begun = START

    def _message(self, header: str) -> Steps[None]:
        """Parse the message behind a header, and the tag that begins the next one."""
        channel, recipient = _CHANNEL.findall(header), _RECIPIENT.findall(header)
        called = recipient[-1] if recipient else ""
        name = called.removeprefix(PREFIX)
        if called.startswith(PREFIX) or name in self._tools:
            yield from self._called_with(name)
            return
        self._is_opened = False
        kind = Kind.REASONING if channel and channel[-1] == ANALYSIS else Kind.TEXT
        is_told = not called or called == "assistant"

        def tell(text: str) -> None:
            if is_told:
                self._tell(kind, text)

        yield from self._text_until(dict.fromkeys(ENDS, (START, END)), tell, lambda: None)

    def _called_with(self, name: str) -> Steps[None]:
        """Parse the arguments of a call, and the tag that begins the next message."""
        char = yield from self._solid()
        if char == "{" and self._tools and self._begin(name):
            yield from self._told_object()
            self._end()
        yield from self._find([START])
