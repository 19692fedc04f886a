"""Plays one row: its cluster, its load, the fault, what is seen of it, and the sum of it all."""

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import inference_pb2_grpc
from serving_core.net.ports import SocketFolder
from serving_core.process.failpoints import ENVIRONMENT
from tests.faults.load import ANSWER_DEADLINE_S, Asked, Load, Tokens
from tests.faults.proxy import Fault, Proxy
from tests.faults.rows import Row
from tests.faults.scene import DEADLINE_S, LOOK_S, Scene, move_socket, start
from tests.system.cluster import Cluster

ROW_DEADLINE_S = 800.0
JUMPING_CLOCK = Path(__file__).parent / "jumping_clock.c"
AFTER_S = 1.0  # that the load goes on when all seems well

PROPERTY = "row of the matrix"  # what a test's report keeps of it

Options = dict[str, dict[str, Any]]
"""What processes are started with, by their names."""


@dataclass
class Report:
    """What a row has brought to light."""

    num_ok: int
    failed: Counter[str]  # by outcome
    num_retried: int
    tokens: Tokens
    detect_s: float | None
    recover_s: float
    num_leaked: int = 0

    def troubles(self, row: Row) -> list[str]:
        """What should not be, in words."""
        troubles = []
        if self.tokens != Tokens():
            troubles.append(f"tokens of answers: {self.tokens}")
        if self.num_leaked:
            troubles.append(f"{self.num_leaked} blocks leaked")
        if odd := {how for how in self.failed if how not in row.may_fail and how.split()[0] not in row.may_fail}:
            troubles.append(f"requests ended as {sorted(odd)}, and may as {list(row.may_fail)}")
        if row.must_fail and not self.failed:
            troubles.append("no request has failed")
        if row.must_retry and not self.num_retried:
            troubles.append("no request has begun again")
        if self.num_retried and not row.may_retry:
            troubles.append(f"{self.num_retried} requests have begun again")
        return troubles


class Stage:
    """A cluster for one row after the other, started with the first one's options. What a row has changed is put right
    before the next one."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._changed: set[str] = set()
        cluster.folder.mkdir(parents=True, exist_ok=True)

    def prepare(self, options: Options) -> None:
        """Starts whatever does not run, and anew what is to be, or was, other than usual."""
        running = {name for name, child in self.cluster.children.items() if child.is_running}
        changed = self._changed | options.keys()
        for name in running & changed:
            self.cluster.kill(name)
        self._changed = set(options)
        for name in sorted({"coordinator", *self.cluster.names} - (running - changed)):
            start(self.cluster, name, **options.get(name, {}))
        self.cluster.wait_complete()
        self.cluster.wait_all_free()

    def num_leaked(self) -> int:
        """Blocks that nodes hold, or 1 where requests are known, when all should be over."""
        try:
            self.cluster.wait_all_free()
        except AssertionError:
            loads = self.cluster.loads().values()
            return max(1, sum(load.num_blocks - load.num_blocks_free for load in loads))
        return 0


async def play(row: Row, stage: Stage) -> Report:
    """Raises AssertionError where the row does not even come to its end."""
    async with asyncio.timeout(ROW_DEADLINE_S):
        async with contextlib.AsyncExitStack() as stack:
            scene = await _set(row, stage, stack)
            report = await _play(row, scene)
            report.num_leaked = await asyncio.to_thread(stage.num_leaked)
    return report


async def _set(row: Row, stage: Stage, stack: contextlib.AsyncExitStack) -> Scene:
    cluster = stage.cluster
    sockets = stack.enter_context(SocketFolder()).path
    options: Options = {name: dict(flags) for name, flags in row.flags.items()}
    proxies = {}
    for name in row.fleet_proxied:
        proxy = Proxy(f"tcp://127.0.0.1:{cluster.fleet_port}", Fault())
        proxies[name] = await stack.enter_async_context(proxy.listening())
        options.setdefault(name, {})["coordinator"] = proxy.address.removeprefix("tcp://")
    for name in row.proxied:
        flags = {"kv_bind": f"ipc://{sockets}/{name}", "kv_shared_memory": False}  # all goes through the proxy
        options.setdefault(name, {}).update(flags)
    for name in row.failpoints:
        options.setdefault(name, {})["env"] = {ENVIRONMENT: row.failpoints[name]}
    for name in row.jumping:
        options.setdefault(name, {})["env"] = {"LD_PRELOAD": str(_jumping_clock(cluster.folder))}
    await asyncio.to_thread(stage.prepare, options)
    for name in row.failpoints:
        cluster.expect_end(name)
    for name, fault in row.proxied.items():
        proxy = Proxy(move_socket(sockets / name), fault)
        proxies[name] = await stack.enter_async_context(proxy.listening(f"ipc://{sockets}/{name}"))
    stub = await stack.enter_async_context(_patient(cluster) if row.is_patient else cluster.connect())
    return Scene(cluster, stub, Load(stub, row.habits), proxies)


def _jumping_clock(folder: Path) -> Path:
    """Compiled on demand; the row is skipped where there is no C compiler."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    library = folder / "jumping_clock.so"
    if not library.exists():
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, JUMPING_CLOCK], check=True, timeout=DEADLINE_S)
    return library


@contextlib.asynccontextmanager
async def _patient(cluster: Cluster) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    """A stub that pings nobody."""
    async with grpc.aio.insecure_channel(cluster.target) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def _play(row: Row, scene: Scene) -> Report:
    load = scene.load
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run())
            detected = tasks.create_task(_detected(row, scene))
            recovered = tasks.create_task(_recovered(scene, detected))
            await row.strike(scene)
            detect_s, recover_s = await detected, await recovered
            await asyncio.sleep(AFTER_S)
            load.stop()
        for asked in load.asked:
            await asked.stream.end(ANSWER_DEADLINE_S)
    finally:
        for asked in load.asked:
            asked.stream.cancel()
    return _report(load.asked, detect_s, recover_s)


async def _detected(row: Row, scene: Scene) -> float | None:
    """Seconds from the fault to its sign."""
    await scene.until(lambda: scene.struck_at is not None, "the fault strikes")
    if not row.sign:
        return None
    end = time.monotonic() + DEADLINE_S
    while not await asyncio.to_thread(_is_seen, row, scene):
        assert time.monotonic() < end, f"no sign of the fault within {DEADLINE_S:g} s"
        await asyncio.sleep(LOOK_S)
    return time.monotonic() - scene.struck_at


def _is_seen(row: Row, scene: Scene) -> bool:
    return row.sign(scene) if callable(row.sign) else scene.says("coordinator", row.sign)


async def _recovered(scene: Scene, detected: "asyncio.Task[float | None]") -> float:
    """Seconds from the fault until whatever ran then has gone on after the fault was detected, or has ended, and a
    question that was asked later has its answer."""
    await scene.until(lambda: scene.struck_at is not None, "the fault strikes")
    running = [asked for asked in scene.load.asked if not asked.stream.has_ended]
    await scene.until_answered()
    detect_s = await detected
    seen_at = scene.struck_at + (detect_s or 0.0)
    await scene.until(lambda: all(each.has_gone_on_since(seen_at) for each in running), "everything goes on")
    return time.monotonic() - scene.struck_at


def _report(asked: list[Asked], detect_s: float | None, recover_s: float) -> Report:
    outcomes = Counter(each.outcome for each in asked)
    num_ok = outcomes.pop("LENGTH", 0)
    whole = [each.stream.answer.complete for each in asked if each.stream.answer.complete]
    num_retried = sum(complete.timeline.num_restarts > 0 for complete in whole)
    return Report(num_ok, outcomes, num_retried, sum((each.tokens for each in asked), Tokens()), detect_s, recover_s)
