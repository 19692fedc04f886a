"""A model folder's chat template, rendered in a sandbox the way transformers' apply_chat_template does."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import jinja2

from coordinator.text.rendering import MAX_CPU_S, make_environment
from serving_core.errors import ModelError, RequestError
from serving_core.reasons import BAD_PARAM, ENGINE_ERROR

logger = logging.getLogger(__name__)

PROGRAM: Final = "coordinator.text.rendering"
ANSWER_S: Final = 30.0  # until a process that does not even start, or is kept from working, is given up

Messages = Sequence[Mapping[str, str]]


class ChatTemplate:
    """Messages to the text of a prompt that ends where the assistant's answer begins.

    `variables` are the special tokens by name, such as bos_token. Raises ModelError when the source does not parse.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        try:
            make_environment().parse(source)  # no more: compiling it would work out what is constant, however large
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is broken: {error.message}, in its line {error.lineno}") from error
        self._given = {"source": source, "variables": dict(variables)}
        self._process: _Process | None = None
        self._thread = ThreadPoolExecutor(1, "chat template")  # one conversation at a time, in order of arrival

    async def render(self, messages: Messages) -> str:
        """Raises RequestError when the template refuses the messages, or fails, which is no fault of theirs."""
        answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, messages)
        if "text" in answer:
            return answer["text"]
        if "refused" in answer:
            message = f"the chat template refuses the messages: {answer['refused']}"
            raise RequestError(BAD_PARAM, message, field="chat")
        raise RequestError(ENGINE_ERROR, f"the model's chat template fails: {answer['failed']}")

    def _ask(self, messages: Messages) -> dict[str, str]:
        """What the process answers, which is started when it is needed. A client that leaves meanwhile changes nothing:
        it is soon done, or ended."""
        if self._process is None or not self._process.is_running:
            self._process = _Process(self._given)
        answer = self._process.ask(messages)
        if "failed" in answer:
            logger.error("the chat template fails: %s", answer["failed"])
        return answer


class _Process:
    """The program with one template, until it has ended or nobody knows it any more."""

    def __init__(self, given: Mapping[str, object]) -> None:
        command = [sys.executable, "-m", "serving_core.child", str(os.getpid()), sys.executable, "-m", PROGRAM]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._end = weakref.finalize(self, _end, self._process)
        self._unsent = _line(given)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, messages: Messages) -> dict[str, str]:
        """Its answer, or why there is none."""
        process = self._process
        assert process.stdin is not None, "it has pipes"
        assert process.stdout is not None, "it has pipes"
        watchdog = threading.Timer(ANSWER_S, process.kill)
        watchdog.start()
        try:
            process.stdin.write(self._unsent + _line(messages))
            process.stdin.flush()
            self._unsent = b""
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            watchdog.cancel()
        if line.endswith(b"\n"):
            answer: dict[str, str] = json.loads(line)
            return answer
        self._end()
        is_late = process.returncode == -signal.SIGPROF
        return {"failed": f"it takes more than {MAX_CPU_S:g} s" if is_late else "its process has ended"}


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def _line(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"
