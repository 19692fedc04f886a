"""A cluster of the fake model under load and random faults for a long time: what becomes of the requests, and what its
processes take more and more of. `make soak`, or

    python -m tests.system.soak [--seconds N] [--clients N] [--seed N]

Every answer is checked, and in the end nothing may be held. The coordinator is killed in the first quarter alone, and
one node of each role never, so that there are processes that live long enough for a slope.
"""

import asyncio
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil

from splitserve import AsyncClient
from splitserve.client.errors import ClientError
from tests.system.cluster import STOP_DEADLINE_S, Cluster
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

MIB = 2**20
SAMPLE_S = 2.0
WARM_UP_S = 30.0  # of a process, which are no part of its slope
LEAST_S = 60.0  # that a slope is taken over
MOST_MIB_A_MINUTE = 3.0
MOST_FDS_A_MINUTE = 2.0
MOST_FAILED = 0.02  # of the requests: two faults in a row may hit one that has come no further
ANSWER_S = 120.0
STRUCK = ("prefill-0", "decode-0")
FAULTS = ("kill", "stop", "hang")


@dataclass
class Tally:
    """What has become of the requests."""

    num_whole: int = 0
    num_left: int = 0  # by their clients
    num_not_taken: int = 0  # while there was no coordinator
    num_resumes: int = 0
    num_restarts: int = 0
    failed: Counter = field(default_factory=Counter)
    wrong: list = field(default_factory=list)
    faults: Counter = field(default_factory=Counter)


@dataclass
class Life:
    """What one process has taken at moments of its life."""

    name: str
    began_s: float
    times_s: list = field(default_factory=list)
    mib: list = field(default_factory=list)
    fds: list = field(default_factory=list)

    def note(self, process, now):
        with process.oneshot():
            self.mib.append(process.memory_info().rss / MIB)
            self.fds.append(process.num_fds())
        self.times_s.append(now)

    def slope(self, values):
        """A minute, when the process was warm; None of one that did not live for long enough."""
        since_s = self.began_s + WARM_UP_S
        pairs = [(at_s, value) for at_s, value in zip(self.times_s, values, strict=True) if at_s >= since_s]
        if not pairs or pairs[-1][0] - pairs[0][0] < LEAST_S:
            return None
        return 60.0 * statistics.linear_regression(*zip(*pairs, strict=True)).slope


class Soak:
    """One run on one cluster."""

    def __init__(self, cluster, *, seconds, num_clients, seed):
        self.tally = Tally()
        self.lives = {}  # by pid
        self._cluster, self._num_clients = cluster, num_clients
        self._random = random.Random(seed)
        self._start_s = time.monotonic()
        self._seconds = seconds
        self._calm = asyncio.Event()

    async def run(self):
        """Raises AssertionError when something is held in the end."""
        async with AsyncClient(self._cluster.target) as client:
            tasks = [asyncio.create_task(self._ask(client, number)) for number in range(self._num_clients)]
            sampling = asyncio.create_task(self._sample())
            await self._strike()
            self._calm.set()
            await asyncio.gather(*tasks)
            sampling.cancel()
        await asyncio.to_thread(self._cluster.heal)
        await asyncio.to_thread(self._cluster.wait_all_free)

    @property
    def _age_s(self):
        return time.monotonic() - self._start_s

    async def _ask(self, client, number):
        own = random.Random(f"{self._random.random()} {number}")
        while not self._calm.is_set():
            prompt = [own.randrange(256) for _ in range(own.choice([3, 40, 300]))]
            max_tokens = own.choice([1, 10, 60, 200])
            leaves_at = own.randrange(max_tokens) if own.random() < 0.2 else max_tokens
            await self._one(client, prompt, max_tokens, leaves_at)

    async def _one(self, client, prompt, max_tokens, leaves_at):
        tally, token_ids, end = self.tally, [], None
        options = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "deadline_s": ANSWER_S}
        try:
            async with aclosing(client.generate(prompt, **options)) as stream:
                async for chunk in stream:
                    token_ids += chunk.token_ids
                    end = chunk.completion
                    if leaves_at < max_tokens and len(token_ids) > leaves_at:
                        break
        except ClientError as error:
            if not token_ids and not error.reason:
                tally.num_not_taken += 1
                await asyncio.sleep(0.5)
            else:
                tally.failed[f"{type(error).__name__} {error.reason}".strip()] += 1
        if token_ids != fake_answer(prompt, max_tokens)[: len(token_ids)]:
            tally.wrong.append((prompt, token_ids))
        if end is not None:
            tally.num_whole += 1
            tally.num_resumes += end.num_resumes
            tally.num_restarts += end.timeline.num_restarts
        elif token_ids:
            tally.num_left += len(token_ids) > leaves_at

    async def _strike(self):
        while self._age_s < self._seconds:
            await asyncio.sleep(self._random.uniform(1.0, 5.0))
            is_early = self._age_s < self._seconds / 4
            if is_early and self._random.random() < 0.2:
                await asyncio.to_thread(self._restart_coordinator)
            else:
                name, how = self._random.choice(STRUCK), self._random.choice(FAULTS)
                await asyncio.to_thread(self._fault, name, how, self._random.uniform(0.5, 4.0))
            await asyncio.to_thread(self._cluster.wait_complete)

    def _restart_coordinator(self):
        self.tally.faults["coordinator"] += 1
        self._cluster.kill("coordinator")
        self._cluster.start_coordinator()

    def _fault(self, name, how, pause_s):
        self.tally.faults[how] += 1
        child = self._cluster.expect_end(name)
        child.send({"kill": signal.SIGKILL, "stop": signal.SIGTERM, "hang": signal.SIGSTOP}[how])
        time.sleep(pause_s)
        if how == "hang":
            child.send(signal.SIGCONT)
        else:
            child.wait(STOP_DEADLINE_S)
            self._cluster.start_node(name)

    async def _sample(self):
        """No longer than was asked for: on a slow machine the last faults take their time."""
        while self._age_s < self._seconds:
            now = time.monotonic()
            for name, child in list(self._cluster.children.items()):
                pid = child.process.pid
                life = self.lives.setdefault(pid, Life(name, now))
                try:
                    life.note(psutil.Process(pid), now)
                except psutil.Error:  # it was killed meanwhile
                    continue
            await asyncio.sleep(SAMPLE_S)


def report_of(soak):
    """Lines for people, and what is wrong."""
    tally, lives = soak.tally, [life for life in soak.lives.values() if life.slope(life.mib) is not None]
    num_failed = sum(tally.failed.values())
    num_all = tally.num_whole + tally.num_left + num_failed
    lines = [
        f"requests: {num_all}; whole {tally.num_whole}, left by their clients {tally.num_left}, failed {num_failed} "
        f"{dict(tally.failed)}; not taken while there was no coordinator: {tally.num_not_taken}",
        f"wrong tokens: {len(tally.wrong)}; blocks held in the end: 0",
        f"answers went on after {tally.num_resumes} breaks, and began again on other nodes {tally.num_restarts} times",
        f"faults: {dict(tally.faults)}",
        f"{'process':<14}{'s':>6}{'MiB':>16}{'MiB/min':>10}{'descriptors':>14}{'a minute':>10}",
    ]
    wrong = [f"wrong tokens of the prompt {prompt}: {token_ids}" for prompt, token_ids in tally.wrong[:3]]
    if num_failed > MOST_FAILED * num_all:
        wrong.append(f"{num_failed} of {num_all} requests failed")
    for life in sorted(lives, key=lambda life: life.name):
        mib, fds = life.slope(life.mib), life.slope(life.fds)
        size, number = f"{life.mib[0]:.0f} to {life.mib[-1]:.0f}", f"{life.fds[0]} to {life.fds[-1]}"
        seconds = life.times_s[-1] - life.began_s
        lines.append(f"{life.name:<14}{seconds:>6.0f}{size:>16}{mib:>10.2f}{number:>14}{fds:>10.2f}")
        if mib > MOST_MIB_A_MINUTE or fds > MOST_FDS_A_MINUTE:
            wrong.append(f"{life.name} takes more and more: {mib:.2f} MiB and {fds:.2f} descriptors a minute")
    return lines, wrong


def soak_of(folder, *, seconds, num_clients=12, seed=0):
    """The run, which has ended."""
    model = write_fake_model(folder / "model", step_s=0.005, token_s=0.0002)
    numbers = {"num_prefill": 2, "num_decode": 2, "num_mixed": 1}
    cluster = Cluster(
        model,
        folder,
        **numbers,
        coordinator={"node_wait_s": 60, "max_restarts": 50, "node_timeout_s": 3},
        node={"num_kv_blocks": 1000, "drain_s": 5},
    ).start()
    try:
        soak = Soak(cluster, seconds=seconds, num_clients=num_clients, seed=seed)
        asyncio.run(soak.run())
        cluster.stop()
    finally:
        cluster.kill_everything()
    return soak


@click.command()
@click.option("--seconds", default=1200.0, show_default=True, type=click.FloatRange(10), help="Of faults.")
@click.option("--clients", default=12, show_default=True, type=click.IntRange(1, 200), help="At a time.")
@click.option("--seed", default=0, show_default=True, help="Of requests and faults.")
def main(seconds, clients, seed):
    """Ends with code 1 when anything is wrong."""
    with tempfile.TemporaryDirectory(prefix="splitserve-soak-") as folder:
        lines, wrong = report_of(soak_of(Path(folder), seconds=seconds, num_clients=clients, seed=seed))
    click.echo("\n".join(lines))
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
