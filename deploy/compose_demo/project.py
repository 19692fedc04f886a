"""One compose project: what is up, and what its coordinator says."""

import os
import re
import secrets
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command import Failed, run

DEPLOY = Path(__file__).parents[1]
NAME = "splitserve-compose-demo"
UP_S, DOWN_S, CALL_S = 600.0, 120.0, 60.0
SAMPLE = re.compile(r'^splitserve_node_(\w+)\{node="([^"]+)",role="(\w+)"\} (\S+)$', re.MULTILINE)


class Project:
    """Has two nodes of each role. `down` leaves nothing of it but the image."""

    def __init__(self, compose: list[str], image: str, scratch: Path, *, tls: bool) -> None:
        self._key = secrets.token_hex(16)
        for name, secret in (("api_key", self._key), ("fleet_secret", secrets.token_hex(16))):
            (scratch / name).write_text(f"{secret}\n")
            (scratch / name).chmod(0o644)  # for the container's user, who reaches nothing but the file
        self._http_port, grpc_port = _free_port(), _free_port()
        files = ["docker-compose.yml", *(["docker-compose.tls.yml"] if tls else [])]
        self._compose = [*compose, *(word for file in files for word in ("-f", str(DEPLOY / file)))]
        self._env = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": NAME,
            "COMPOSE_PROFILES": "cpu",
            "SECRETS_DIR": str(scratch),
            "MODELS_DIR": str(scratch),
            "IMAGE": image,
            "HTTP_PORT": str(self._http_port),
            "GRPC_PORT": str(grpc_port),
            "HEALTH_INTERVAL": "5s",
        }
        self._is_tls = tls
        self._tls: ssl.SSLContext | None = None
        self._coordinator = ""  # its container, once it is up
        self.network = f"{NAME}_fleet"

    def up(self) -> None:
        self._call("up", "--detach", "--no-build", timeout_s=UP_S)
        self._coordinator = self._call("ps", "--quiet", "coordinator").strip()
        if self._is_tls:
            self._tls = ssl.create_default_context(cadata=run(self.exec("cat", "/tls/ca.crt")))

    def down(self) -> None:
        """With its volumes, gracefully."""
        self._call("down", "--volumes", "--remove-orphans", timeout_s=DOWN_S)

    def exec(self, *words: str) -> list[str]:
        """The command that runs this one where the coordinator is."""
        return ["docker", "exec", "--interactive", self._coordinator, *words]

    def splitserve(self, *words: str) -> list[str]:
        """A command of ours, asked of this fleet by gRPC."""
        return self.exec("splitserve", *words)

    def ask_http(self, path: str, body: bytes | None = None) -> bytes:
        """From outside, as any client would, through the published port. Raises OSError."""
        scheme = "http" if self._tls is None else "https"
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        request = urllib.request.Request(f"{scheme}://localhost:{self._http_port}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=CALL_S, context=self._tls) as response:
            return bytes(response.read())

    def nodes(self, figure: str, role: str | None = None) -> dict[str, float]:
        """A figure of every attached node, by name."""
        found = SAMPLE.findall(self.ask_http("/metrics").decode())
        return {node: float(value) for name, node, its, value in found if name == figure and role in (None, its)}

    def num_ready(self) -> int:
        """Nodes that take requests; 0 while nobody answers."""
        try:
            return int(sum(self.nodes("ready").values()))
        except (OSError, urllib.error.HTTPError):
            return 0

    def num_healthy(self) -> int:
        """Containers that the engine has found healthy."""
        wanted = ["--filter", f"label=com.docker.compose.project={NAME}", "--filter", "health=healthy"]
        return len(run(["docker", "ps", "--quiet", *wanted]).split())

    def _call(self, *words: str, timeout_s: float = CALL_S) -> str:
        return run([*self._compose, *words], timeout_s=timeout_s, env=self._env)


def container_of(node: str) -> str:
    """A node is named after its role, its container and its process."""
    return node.split("-")[1]


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float) -> Any:
    """Its first value that is true. Raises Failed."""
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end_s:
            raise Failed(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.1)
    return value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
