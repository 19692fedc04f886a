"""Commands with a deadline, and lines with the seconds since the start."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_STARTED_S = time.monotonic()


class Failed(Exception):
    """What did not go as it should, in a sentence."""


def say(line: str) -> None:
    print(f"{time.monotonic() - _STARTED_S:7.1f} s  {line}", flush=True)


def run(command: Sequence[str | Path], *, timeout_s: float = 60.0, env: Mapping[str, str] | None = None) -> str:
    """What the command says on stdout. Raises Failed with the end of what it says where it fails."""
    words = [*map(str, command)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)
    except FileNotFoundError as error:
        raise Failed(f"there is no {words[0]} on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(words[:4])} ... has not ended within {timeout_s:g} s") from error
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise Failed(f"{' '.join(words[:4])} ... has failed with exit code {done.returncode}:\n{last}")
    return done.stdout


def succeeds(command: Sequence[str | Path], *, timeout_s: float = 60.0) -> bool:
    try:
        run(command, timeout_s=timeout_s)
    except Failed:
        return False
    return True
