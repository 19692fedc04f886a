"""What a node spends on a decode step beside the kernels: `python -m tests.step_costs [MODEL] [--batches 1,8,32]`.

A whole node in this process decodes with a tiny model, or with the model of a folder, and reports its tokens to nobody.
Told are microseconds of CPU time of a step: of the event loop's thread, of the engine's thread outside the kernels, by
part, and how often a thread went to sleep. Each step of the tiny model also sleeps, so that the loop has the time that
a real model leaves it. To compare two checkouts run this in each, in turn.
"""

import argparse
import asyncio
import resource
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch

from engine.engine import COMPUTE
from tests.tiny_models import write_tiny_model
from tests.unit.serving_node.runner_kit import Harness, running

TINY_STEP_S = 0.005
NUM_WARM = 20  # steps before those that count
NUM_TOLD = 50  # steps of which one figure is made; told is the median of the figures
PROMPT_TOKENS = 64


class ThreadClock:
    """Adds up the CPU time of each part of a step by thread, in place of the engine's own clock."""

    def __init__(self) -> None:
        self.seconds: Counter[tuple[str, str]] = Counter()
        self.num_sleeps: Counter[str] = Counter()
        self._of_thread = threading.local()

    def lap(self, part: str) -> None:
        thread = "loop" if threading.current_thread() is threading.main_thread() else "engine"
        self.seconds[thread, part] += time.thread_time() - getattr(self._of_thread, "last_s", time.thread_time())
        self.num_sleeps[thread] = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        self._of_thread.last_s = time.thread_time()


class Counted:
    """What the steps of a node have taken since this was made."""

    def __init__(self, node: Harness, clock: ThreadClock) -> None:
        self._node, self._clock = node, clock
        self._before = self._read()

    def _read(self) -> tuple[int, Counter[Any]]:
        sleeps = {f"{thread} sleeps": num for thread, num in self._clock.num_sleeps.items()}
        parts = {part: s * 1e6 for (thread, part), s in self._clock.seconds.items() if thread == "engine"}
        return self._node.node.load().num_steps, Counter({**parts, **sleeps, "loop": time.thread_time() * 1e6})

    @property
    def each(self) -> dict[str, float]:
        """Of one step: microseconds, and how often a thread slept."""
        (num, now), (num_before, before) = self._read(), self._before
        return {name: (now[name] - before[name]) / max(1, num - num_before) for name in now}


async def measure(node: Harness, clock: ThreadClock, batch: int, rounds: int) -> dict[str, float]:
    most = NUM_WARM + (rounds + 1) * NUM_TOLD + batch
    for index in range(batch):
        prompt = [(7 * index + place) % 200 for place in range(PROMPT_TOKENS)]
        node.local(f"{batch} {index}", prompt, max_tokens=most)

    async def steps(number: int) -> None:
        end = node.node.load().num_steps + number
        await node.until(lambda: node.node.load().num_steps >= end, look_s=0.05)

    await node.until(lambda: node.node.load().num_running == batch, look_s=0.05)
    await steps(NUM_WARM)
    figures = []
    for _ in range(rounds):
        counted = Counted(node, clock)
        await steps(NUM_TOLD)
        figures.append(counted.each)
    await node.idle()
    return {name: statistics.median(each[name] for each in figures) for name in figures[0]}


def make_slow(program: Any) -> None:
    run = program.run
    program.run = lambda num_rows: time.sleep(TINY_STEP_S) or run(num_rows)


async def compare(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or write_tiny_model(Path(folder) / "tiny")
        engine = {"model": str(model), "device": "cpu", "dtype": "bfloat16", "block_size": 16}
        options = {"num_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 512}
        async with running(Path(folder), engine=engine, **options) as node:
            clock = node.engine._engine.clock = ThreadClock()
            node.node._stepping._engine = node.engine._engine  # without what the harness notes of each step
            node.send = lambda **event: None
            if not given.model:
                make_slow(node.engine.program._program)
            for batch in map(int, given.batches.split(",")):
                each = await measure(node, clock, batch, given.rounds)
                loop_us, kernels_us = each.pop("loop"), each.pop(COMPUTE)
                sleeps = {name: each.pop(name) for name in list(each) if name.endswith("sleeps")}
                parts = ", ".join(f"{part} {us:.0f}" for part, us in sorted(each.items()))
                click.echo(
                    f"batch {batch}: event loop {loop_us:.0f} µs, engine {sum(each.values()):.0f} µs ({parts}), "
                    f"kernels {kernels_us:.0f} µs; " + ", ".join(f"{name} {num:.1f}" for name, num in sleeps.items())
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    torch.set_num_threads(1)
    asyncio.run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
