"""A cluster as the quick start has it, and a shell beside it in which the commands of the pages are run.

What the pages leave to whoever reads them is in the environment (the model) or put in its place (ports, placeholders).
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from splitserve.launch.launcher import free_port

START_S: Final = 600.0
COMMAND_S: Final = 300.0
STOP_S: Final = 120.0
TEXT: Final = "Why is the sky blue?"


class Shell:
    """A folder and an environment for commands."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self._grpc, self._http = free_port(), free_port()
        self._model = model
        (folder / "file").write_text(TEXT)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPLITSERVE_")}
        self._environment = inherited | {
            "PATH": f"{Path(sys.executable).parent}:{inherited['PATH']}",
            "OMP_NUM_THREADS": "1",
            "SPLITSERVE_SERVER": f"localhost:{self._grpc}",
        }

    def in_place(self, text: str) -> str:
        """The text with this machine's ports and model."""
        text = text.replace(".venv/bin/splitserve", "splitserve")
        text = re.sub(r"\bMODEL\b", str(self._model), text)
        return text.replace(":50051", f":{self._grpc}").replace(":8000", f":{self._http}")

    def run(self, text: str) -> str:
        """What the command writes, once it has ended well."""
        return self._run(["bash", "-euo", "pipefail", "-c", self.in_place(text)], text)

    def python(self, text: str) -> str:
        """The same of a program."""
        return self._run([sys.executable, "-W", "error", "-c", self.in_place(text)], text)

    def _run(self, argv: list[str], text: str) -> str:
        done = subprocess.run(
            argv, cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\nended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    @contextmanager
    def serving(self, command: str) -> Iterator[str]:
        """The command serves within; gives what it says when it is ready."""
        flags = {"MODEL": str(self._model), "GRPC_PORT": str(self._grpc), "HTTP_PORT": str(self._http)}
        environment = self._environment | {f"SPLITSERVE_{name}": value for name, value in flags.items()}
        log = self.folder / "up.log"
        with log.open("wb") as output:
            up = subprocess.Popen(
                ["bash", "-c", f"exec {self.in_place(command)}"], cwd=self.folder, env=environment, stderr=output
            )
        try:
            end = time.monotonic() + START_S
            while "Ready: " not in log.read_text():
                assert up.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            yield log.read_text()
        finally:
            up.terminate()
            up.wait(STOP_S)
        assert up.returncode == 0, log.read_text()
