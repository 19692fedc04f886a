"""An answer as it comes."""

import json
import subprocess
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Self

from command import Failed


class Answer:
    """Asked at once, greedily, for so many tokens; its stream is read in the background."""

    def __init__(self, command: Callable[..., list[str]], prompt: str, num_tokens: int) -> None:
        greedy = ("--temperature", "0", "--ignore-eos", "--max-tokens", str(num_tokens))
        self._process = subprocess.Popen(
            command("generate", prompt, "--json", *greedy), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._chunks: list[dict[str, Any]] = []
        self._times_s: list[float] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk["token_ids"]) for chunk in self._chunks)

    @property
    def text(self) -> str:
        return "".join(chunk["text"] for chunk in self._chunks)

    @property
    def seconds(self) -> float:
        return self._times_s[-1] - self._times_s[0]

    @property
    def longest_pause_s(self) -> float:
        return max(after - before for before, after in pairwise(self._times_s))

    @property
    def num_changes(self) -> int:
        """How often the answer went on elsewhere, once it has ended."""
        timeline = self._chunks[-1]["completion"]["timeline"]
        return int(timeline["num_restarts"] + timeline["num_migrations"])

    def end(self, deadline_s: float) -> Self:
        """Returns when it has ended well. Raises Failed."""
        self._reader.join(deadline_s)
        if self._reader.is_alive():
            self._process.kill()
            raise Failed(f"an answer has not ended within {deadline_s:g} s: {self.num_tokens} tokens have come")
        if self._process.wait(timeout=deadline_s):
            assert self._process.stderr is not None
            raise Failed(f"an answer has failed: {self._process.stderr.read().strip()}")
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._chunks.append(json.loads(line))
            self._times_s.append(time.monotonic())
