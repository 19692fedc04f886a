"""The conversation of `splitserve chat`, and the commands within it. No I/O but the file of /save."""

import json
import re
from pathlib import Path
from typing import Final

from splitserve.client.conversations import Message

COMMANDS: Final = "/reset, /system TEXT and /save FILE"
_COMMAND: Final = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


class Conversation:
    """What was said so far, behind what the model is told before."""

    def __init__(self, system: str) -> None:
        self._system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, as the server is sent it."""
        before: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return [*before, *self._turns]

    def asking(self, question: str) -> list[Message]:
        """Return the messages that ask a question, which is no part of the conversation until it is answered."""
        return [*self.messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Add an answered question."""
        self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def obey(self, line: str) -> str | None:
        """Carry out a line that is a command, and return what to report of that; None for a line that is none."""
        if (command := _COMMAND.fullmatch(line)) is None:
            return None
        name, argument = command[1], (command[2] or "").strip()
        match name:
            case "reset":
                self._turns = []
                return "The conversation begins anew."
            case "system":
                self._system, self._turns = argument, []
                told = f"the model is told: {argument}" if argument else "the model is told nothing before"
                return f"The conversation begins anew; {told}"
            case "save":
                return self._save(argument)
        return f"There is no command /{name}; there are {COMMANDS}"

    def _save(self, file: str) -> str:
        """Write the messages to a file, which must be a new one."""
        if not file:
            return "Nothing is saved: /save FILE names the file"
        text = json.dumps(self.messages, ensure_ascii=False, indent=2)
        try:
            with Path(file).expanduser().open("x", encoding="utf-8", errors="replace") as opened:
                opened.write(text)
        except OSError as error:
            return f"Nothing is saved: {file}: {error.strerror}"
        except (RuntimeError, ValueError) as error:  # a home that is not known; a name with a null character
            return f"Nothing is saved: {file}: {error}"
        return f"Saved {len(self.messages)} messages to {file}"
