"""What a fault acts on: the cluster, the clients, and a clock that notes when it struck."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tests.faults.load import ANSWER_DEADLINE_S, PAUSE_S, Load
from tests.faults.proxy import Proxy
from tests.system.cluster import Child, Cluster

DEADLINE_S = 240.0
LOOK_S = 0.02


class Scene:
    """One fault under load. Everything here may be called by the row's strike."""

    def __init__(self, cluster: Cluster, stub: Any, load: Load, proxies: dict[str, Proxy]) -> None:
        self.cluster = cluster
        self.stub = stub
        self.load = load
        self.proxies = proxies  # by the process that is behind them
        self.struck_at: float | None = None
        self._logs = {child.log: child.log.stat().st_size for child in cluster.children.values()}

    def strike(self) -> None:
        """The fault is now, or was the first time that this was called."""
        if self.struck_at is None:
            self.struck_at = time.monotonic()

    # ---- what is seen ----

    def says(self, name: str, words: str) -> bool:
        """Whether the log of a process has these words, since the scene began."""
        log = self.cluster.children[name].log
        with log.open("rb") as lines:
            lines.seek(self._logs.get(log, 0))
            return words in lines.read().decode(errors="replace")

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Returns when a condition holds, which must come true."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
            await asyncio.sleep(LOOK_S)

    async def until_says(self, name: str, words: str) -> None:
        await self.until(lambda: self.says(name, words), f"{name} says {words!r}")

    async def until_at_failpoint(self, name: str) -> None:
        """The process has come to one of its failpoints: that is the fault."""
        await self.until(lambda: self.says(name, "failpoint "), f"{name} comes to its failpoint")
        self.strike()

    async def until_answered(self) -> None:
        """Returns when a question that is asked now, and again if it fails, has its right answer."""
        end = time.monotonic() + DEADLINE_S
        while True:
            asked = self.load.ask([7, 8, 9], 4)
            await asked.stream.end(ANSWER_DEADLINE_S)
            if asked.is_right:
                return
            assert time.monotonic() < end, f"no answer within {DEADLINE_S:g} s: {asked.outcome}"
            await asyncio.sleep(PAUSE_S)

    # ---- what is done ----

    def child(self, name: str) -> Child:
        """One that may end."""
        return self.cluster.expect_end(name)

    def kill(self, *names: str) -> None:
        self.strike()
        self.cluster.kill(*names)

    @contextlib.asynccontextmanager
    async def stopped(self, name: str) -> AsyncIterator[None]:
        """The process stands still."""
        child = self.child(name)
        self.strike()
        child.send(signal.SIGSTOP)
        try:
            yield
        finally:
            child.send(signal.SIGCONT)

    def start(self, name: str, **flags: object) -> Child:
        """Starts a process again, or another one of its name."""
        return start(self.cluster, name, **flags)

    async def end(self, name: str) -> int:
        """SIGTERM; the exit code."""
        child = self.child(name)
        self.strike()
        child.send(signal.SIGTERM)
        return await asyncio.to_thread(child.wait, DEADLINE_S)

    async def complete(self) -> None:
        """Returns when the cluster is complete."""
        await asyncio.to_thread(self.cluster.wait_complete)


def start(cluster: Cluster, name: str, **options: Any) -> Child:
    """Starts the coordinator or a node."""
    return cluster.start_coordinator(**options) if name == "coordinator" else cluster.start_node(name, **options)


def move_socket(path: Path) -> str:
    """Moves the file of a bound socket away from where dialers look for it; its address from now on."""
    migrated = path.with_name(f"{path.name}.moved")
    os.rename(path, migrated)
    return f"ipc://{migrated}"
