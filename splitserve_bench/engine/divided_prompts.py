"""What it costs or saves to divide a long prompt over nodes, beside one pool that holds it all:

python -m splitserve_bench.engine.divided_prompts

Each host of blocks is a process with an engine of its own, asked over TCP as a node's annexes are.
"""

import dataclasses
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import click
import psutil
import torch

from engine.attention.partial import TILE_KEYS
from engine.engine import Engine
from kv_transfer.annexes.annex import Annex, open_annex
from kv_transfer.annexes.host import AnnexHost
from kv_transfer.annexes.wire import KEY_BYTES, Asker
from serving_core.blocks import BlockAllocator
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from serving_node.claims import Hosting
from splitserve_bench.engine.random_models import SHAPES, shape_of, write_random_model
from splitserve_bench.engine.stopwatch import ATTENTION, watching
from splitserve_bench.prompts import Prompts

VOCAB_SIZE: Final = 4096  # the head is not what is measured
GREEDY: Final = SamplingParams(max_tokens=2, temperature=0, logprobs=1)
END_S: Final = 30.0


@click.command()
@click.option("--shape", default="llama-3.2-1b", show_default=True, type=click.Choice(list(SHAPES)), help="Of a model.")
@click.option("--layers", default=2, show_default=True, type=click.IntRange(1), help="With random weights.")
@click.option("--tokens", default=16384, show_default=True, type=click.IntRange(TILE_KEYS), help="Read before.")
@click.option("--chunk", default=512, show_default=True, type=click.IntRange(1), help="Tokens of the step.")
@click.option("--hosts", default="1,3", show_default=True, help="Beside the node whose prompt it is.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Of each node.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1))
@click.option("--serve", default="", hidden=True, help="Hold blocks for this folder's model.")
def main(shape: str, layers: int, tokens: int, chunk: int, hosts: str, threads: int, repeats: int, serve: str) -> None:
    """Medians of one step of a prompt, of steps that come in turn: over one pool, and with the tokens before it in
    equal parts on so many nodes more. CPU time is that of the node and of the host that takes most."""
    torch.set_num_threads(threads)
    if serve:
        _hold_blocks(Path(serve), tokens)
        return
    counts = [0, *(int(each) for each in hosts.split(","))]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_random_model(Path(folder), dataclasses.replace(shape_of(shape, layers), vocab_size=VOCAB_SIZE))
        node = _engine(Path(folder), tokens + chunk)
        for layer in node.layout.layers:
            node.pool.keys(layer).normal_()
            node.pool.values(layer).normal_()
        arguments = (folder, "--tokens", str(tokens), "--threads", str(threads))
        held = [stack.enter_context(_host(*arguments)) for _ in range(max(counts))]
        cases = [stack.enter_context(_case(node, tokens, chunk, held[:count])) for count in counts]
        click.echo(
            f"{chunk} tokens behind {tokens}, {layers} layers of {shape} in {node.description['dtype']}, "
            f"{threads} thread(s) a node, median of {repeats}\n"
        )
        click.echo("| nodes | step | attention in it | CPU, node | CPU, host | tokens and logprobs |")
        click.echo("|---|---:|---:|---:|---:|---|")
        for line in _lines(node, cases, repeats):
            click.echo(line)


class _Host(NamedTuple):
    """A process that holds blocks."""

    address: str
    key: bytes
    process: psutil.Process


class _Case(NamedTuple):
    step: Callable[[], object]
    hosts: list[_Host]


class _Figures(NamedTuple):
    step_s: float
    attention_s: float
    node_cpu_s: float
    host_cpu_s: float


def _lines(node: Engine, cases: list[_Case], repeats: int) -> Iterator[str]:
    given = [case.step() for case in cases]  # each once, for what comes with the first
    figures: list[list[_Figures]] = [[] for _ in cases]
    for _ in range(repeats):
        for case, measured in zip(cases, figures, strict=True):
            measured.append(_measure(node, case))
    for case, tokens, measured in zip(cases, given, figures, strict=True):
        medians = " | ".join(f"{statistics.median(each) * 1e3:.0f} ms" for each in zip(*measured, strict=True))
        yield f"| {len(case.hosts) + 1} | {medians} | {'equal' if tokens == given[0] else 'UNEQUAL'} |"


def _measure(node: Engine, case: _Case) -> _Figures:
    before, cpu_s, start_s = [_cpu_s(host) for host in case.hosts], time.process_time(), time.perf_counter()
    with watching(node) as stopwatch:
        case.step()
    step_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    hosts_s = [_cpu_s(host) - at for host, at in zip(case.hosts, before, strict=True)]
    return _Figures(step_s, stopwatch.own_s[ATTENTION], cpu_s, max(hosts_s, default=0.0))


def _cpu_s(host: _Host) -> float:
    times = host.process.cpu_times()
    return times.user + times.system


@contextmanager
def _case(node: Engine, num_before: int, chunk: int, hosts: list[_Host]) -> Iterator[_Case]:
    """A step of the node, with the leading tiles on these hosts, as many on each as here."""
    prompt = Prompts(node.config.vocab_size, num_before + chunk).draw()
    request = Request("bench", 0, prompt, len(prompt), GREEDY)
    block_ids = list(range(node.layout.num_blocks_for(len(prompt))))
    num_tiles = num_before // TILE_KEYS // (len(hosts) + 1)
    blocks_each = num_tiles * TILE_KEYS // node.layout.block_size
    with ExitStack() as stack:
        parts = [block_ids[index * blocks_each : (index + 1) * blocks_each] for index in range(len(hosts))]
        request.annexes = [
            stack.enter_context(closing(_annex(node, host, part))) for host, part in zip(hosts, parts, strict=True)
        ]

        def step() -> object:
            tokens = node.step([Work(request, num_before, chunk, block_ids)])
            assert not request.annex_error, request.annex_error
            return tokens

        yield _Case(step, hosts)


def _annex(node: Engine, host: _Host, block_ids: list[int]) -> Annex:
    sizes, num_tiles = node.partial_attention(), len(block_ids) * node.layout.block_size // TILE_KEYS
    annex = open_annex(
        host.address,
        host.key,
        num_tiles,
        node.layout.layers,
        lambda layer, _: node.pool.read(layer, block_ids),
        asker=Asker(0),
        row_bytes=sizes.row_bytes,
        partial_bytes=sizes.partial_bytes,
    )
    assert annex is not None
    assert annex.num_tiles == num_tiles
    return annex


@contextmanager
def _host(*arguments: str) -> Iterator[_Host]:
    command = [sys.executable, "-m", "splitserve_bench.engine.divided_prompts", "--serve", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address, key = process.stdout.readline().split()
            yield _Host(address, bytes.fromhex(key), psutil.Process(process.pid))
        finally:
            process.kill()
            process.wait(END_S)


def _hold_blocks(folder: Path, num_tokens: int) -> None:
    """Until standard input ends. There is room for each step's annex, which are there at the same time."""
    engine, lock = _engine(folder, 4 * num_tokens), threading.Lock()
    hosting = Hosting(BlockAllocator(engine.layout.num_blocks_for(4 * num_tokens)), engine.layout.block_size, TILE_KEYS)

    def lease(number: int, most_tiles: int, asker: Asker) -> list[int]:
        with lock:
            return hosting.lease(number, most_tiles, asker.age)

    def release(number: int) -> None:
        with lock:
            hosting.release(number)

    key = secrets.token_bytes(KEY_BYTES)
    with closing(
        AnnexHost("127.0.0.1", 0, key, engine.pool, engine.partial_attention(), lease, release, TILE_KEYS)
    ) as end:
        click.echo(f"{end.address} {key.hex()}")
        sys.stdin.read()


def _engine(folder: Path, num_tokens: int) -> Engine:
    num_blocks = -(-num_tokens // EngineSettings().block_size)
    return Engine(EngineSettings(model=str(folder), dtype="bfloat16", num_kv_blocks=num_blocks))


if __name__ == "__main__":
    main()
