"""What it costs and saves the ranks of a node to divide prompts by tokens, beside the same ranks that do not, in turn:

torchrun --nproc-per-node 2 -m splitserve_bench.engine.sequence_parallel MODEL
"""

import os
import statistics
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.engine import Engine
from engine.parallel import LEADER, RankGroup, choose_device, join
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import DTYPES, EngineSettings
from splitserve_bench.models import writing_model
from splitserve_bench.prompts import Prompts

TIMEOUT_S: Final = 120.0
NAMES: Final = ("whole", "divided")
GREEDY: Final = SamplingParams(max_tokens=2, temperature=0)


@click.command()
@click.argument("model", default="")
@click.option("--tokens", default="64,256,512", show_default=True, help="Tokens of a prompt, each in one step.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Of each rank.")
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES))
@click.option("--repeats", default=15, show_default=True, type=click.IntRange(1))
def main(model: str, tokens: str, threads: int, dtype: str, repeats: int) -> None:
    """Medians of one rank after the other of a node whose ranks torchrun starts, of steps that come in turn."""
    torch.set_num_threads(threads)
    folder = writing_model(model, click.echo).folder
    sizes = [int(each) for each in tokens.split(",")]
    tp_size = int(os.environ["WORLD_SIZE"])
    with closing(join(choose_device("auto"), tp_size, TIMEOUT_S)) as group:
        engines = [_engine(folder, tp_size, dtype, max(sizes), min_tokens, group) for min_tokens in (0, 1)]
        if group.rank == LEADER:
            click.echo(f"{tp_size} ranks, {threads} thread(s) each, {engines[0].description['dtype']}")
        for num_tokens in sizes:
            for line in _lines(engines, num_tokens, repeats, group):
                if group.rank == LEADER:
                    click.echo(line)


def _engine(
    folder: Path, tp_size: int, dtype: str, num_tokens: int, min_divided_tokens: int, group: RankGroup
) -> Engine:
    settings = EngineSettings(
        model=str(folder),
        dtype=dtype,
        tensor_parallel_size=tp_size,
        num_kv_blocks=-(-num_tokens // EngineSettings().block_size),
        sequence_parallel_min_tokens=min_divided_tokens,
    )
    return Engine(settings, group)


def _lines(engines: list[Engine], num_tokens: int, repeats: int, group: RankGroup) -> list[str]:
    """What steps of so many tokens take on each rank. To be called on all of them."""
    steps = [_step(engine, num_tokens) for engine in engines]
    for step in steps:
        step()
    wall_s: list[list[float]] = [[], []]
    cpu_s: list[list[float]] = [[], []]
    for _ in range(repeats):
        for index, step in enumerate(steps):
            group.exchange(b"")  # all begin at once
            before = time.perf_counter(), time.process_time()
            step()
            wall_s[index].append(time.perf_counter() - before[0])
            cpu_s[index].append(time.process_time() - before[1])
    lines = []
    for index, step in enumerate(steps):
        told = f"{statistics.median(cpu_s[index]) * 1e3:.1f} {_peak_bytes(step) / 2**20:.2f}"
        cpu_ms, peaks = zip(*(each.decode().split() for each in group.exchange(told.encode())), strict=True)
        rate = num_tokens / statistics.median(wall_s[index])
        lines.append(
            f"{num_tokens:5} tokens {NAMES[index]:8} {rate:8.0f} tokens/s, "
            f"CPU ms of each rank {' '.join(cpu_ms)}, most MiB of activations {' '.join(peaks)}"
        )
    return lines


def _step(engine: Engine, num_tokens: int) -> Callable[[], None]:
    request = Request("bench", 0, Prompts(engine.config.vocab_size, num_tokens).draw(), num_tokens, GREEDY)
    work = Work(request, 0, num_tokens, range(engine.layout.num_blocks_for(num_tokens)))

    def step() -> None:
        if engine.group.rank == LEADER:
            engine.step([work])
        else:
            engine.follow([work.share])

    return step


class _Held(TorchDispatchMode):
    """The bytes of all tensors that are made while it is entered, as long as each is there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = 0
        self._num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and id(each.untyped_storage()) not in given:
                self._take(each.untyped_storage())
        return made

    def _take(self, storage: torch.UntypedStorage) -> None:
        self._num_bytes += storage.nbytes()
        self.most_bytes = max(self.most_bytes, self._num_bytes)
        weakref.finalize(storage, self._let_go, storage.nbytes())

    def _let_go(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


def _peak_bytes(step: Callable[[], None]) -> int:
    """The most that a step holds at a time beyond what was there before it."""
    held = _Held()
    with held:
        step()
    return held.most_bytes


if __name__ == "__main__":
    main()
