"""Figures of nodes with vLLM beside vLLM itself, on this machine: `python -m tests.vllm_figures [MODEL] [--parts ...]`.

MODEL is a folder with safetensors files, by default the demo model, written in that format to a temporary folder. Each
vLLM computes with one core. `make vllm` installs vLLM.

tokens     greedy tokens through a prefill and a decode node, and of `vllm serve`: how many of the prompts are equal
idle       requests one after the other, in turn: TTFT, what the first token's KV takes to the decode node, CPU time
goodput    good requests of a trace: 1P+1D, two mixed nodes, two `vllm serve` behind round robin, one after the other
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import grpc.aio
import psutil
from safetensors.torch import save_file

from engine.model.checkpoint import GgufCheckpoint, whole_tensor
from protos import inference_pb2_grpc
from splitserve.launch.launcher import free_port
from splitserve.launch.models import resolve
from tests.system.answers import Answer, request, stream
from tests.system.vllm_nodes import BLOCK, PYTHON, prompts

DEADLINE_S = 900.0
ENV = "/usr/bin/env"
CONCURRENCY = 8
NUM_TOKENS = 24  # of an output that is compared
IDLE_TOKENS = 512  # of a prompt; what is equal in two of them is no block
IDLE_OUTPUT = 32
FLAGS = ["--enforce-eager", f"--block-size={BLOCK}", "--max-model-len=4096", "--num-gpu-blocks-override=256"]
CHUNK = 128  # tokens of a step, where tokens are compared
MEMORY_BYTES = 2**29
TTFT_SCALE, TPOT_SCALE = 6, 2.5  # of what one idle vLLM takes
LENGTH_SCALE = 0.25  # of the trace


@dataclass
class Server:
    """Processes that serve one model, and where."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    http_port: int
    grpc_port: int = 0
    figures: dict[str, list[float]] = field(default_factory=dict)

    def cpu_s(self) -> dict[str, float]:
        """CPU time by now, of the coordinator and of all processes."""
        used = {"coordinator": 0.0, "all": 0.0}
        for first in self.processes:
            for each in (one := psutil.Process(first.pid), *one.children(recursive=True)):
                spent = sum(each.cpu_times()[:2])
                used["all"] += spent
                used["coordinator"] += spent if "coordinator" in each.cmdline() else 0.0
        return used


def vllm_serve(model: Path, dtype: str, cpu: int, log: Path, *flags: str) -> Server:
    port = free_port()
    command = [str(PYTHON.with_name("vllm")), "serve", str(model), f"--port={port}", "--served-model-name=m"]
    command += [f"--dtype={dtype}", f"--kv-cache-memory-bytes={MEMORY_BYTES}", *FLAGS, *flags]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": str(cpu), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return Server("vllm serve", [started(command, log, environment)], port)


def up(model: Path, dtype: str, nodes: Mapping[str, int], log: Path, *flags: str, admission: str = "all") -> Server:
    http_port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "splitserve", "up", str(model), "--engine=vllm", f"--vllm-python={PYTHON}"]
    command += [f"--{role}={nodes.get(role, 0)}" for role in ("prefill", "decode", "mixed")]
    command += [f"--grpc-port={grpc_port}", f"--http-port={http_port}", "--served-model-name=m"]
    command += [f"--admission={admission}", f"--log-dir={log.with_suffix('')}", f"--start-timeout-s={DEADLINE_S:g}"]
    own = ["--", f"--dtype={dtype}", f"--kv-cache-memory-bytes={MEMORY_BYTES}", *FLAGS, *flags]
    name = "+".join(f"{number} {role}" for role, number in nodes.items())
    return Server(name, [started([*command, *own], log, {})], http_port, grpc_port)


def started(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        assignments = [f"{name}={value}" for name, value in environment.items()]
        ends_with_this = [sys.executable, "-m", "serving_core.process.child", str(os.getpid())]
        argv = [*ends_with_this, ENV, *assignments, *command]
        return subprocess.Popen(argv, stdout=output, stderr=output, process_group=0)


@contextlib.asynccontextmanager
async def serving(*servers: Server) -> AsyncIterator[None]:
    """Waits until all serve, and stops them."""
    try:
        for each in servers:
            await wait_for(each)
        yield
    finally:
        everyone = [one for each in servers for one in each.processes]
        for process in everyone:
            process.send_signal(signal.SIGINT)
        for process in everyone:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


async def wait_for(server: Server) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            assert all(each.poll() is None for each in server.processes), f"{server.name} has ended"
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                if (await complete(server.http_port, [1, 2, 3], 1))[0]:
                    return
            await asyncio.sleep(0.5)


async def complete(port: int, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """The greedy tokens of a prompt over HTTP, and the seconds from the request to each event."""
    asked = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**asked, "stream": True, "return_token_ids": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    began = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    tokens: list[int] = []
    times = []
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        for choice in event.get("choices", ()):
            tokens += choice.get("token_ids") or []
            times.append(time.perf_counter() - began)
    writer.close()
    return tokens, times


# ---- tokens ----


async def compare_tokens(model: Path, folder: Path, number: int, dtype: str) -> None:
    chunked = f"--max-num-batched-tokens={CHUNK}"
    split = up(model, dtype, {"prefill": 1, "decode": 1}, folder / "tokens.log", chunked)
    alone = vllm_serve(model, dtype, 0, folder / "tokens-vllm.log", chunked)
    asked = prompts(number)  # below a block, of several chunks, with a common beginning
    async with serving(split, alone):
        ours, theirs = [await all_tokens(server, asked) for server in (split, alone)]
    equal = [one == other for one, other in zip(ours, theirs, strict=True)]
    click.echo(f"tokens, {dtype}: {sum(equal)} of {number} outputs of {NUM_TOKENS} tokens equal to vLLM's alone")
    for index in itertools.islice((i for i, same in enumerate(equal) if not same), 5):
        click.echo(f"  prompt {index} of {len(asked[index])} tokens: {ours[index]} and {theirs[index]}")


async def all_tokens(server: Server, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    limit = asyncio.Semaphore(CONCURRENCY)

    async def one(prompt: Sequence[int]) -> list[int]:
        async with limit:
            return (await complete(server.http_port, prompt, NUM_TOKENS))[0]

    return await asyncio.gather(*map(one, asked))


# ---- idle ----


async def measure_idle(model: Path, folder: Path, number: int, dtype: str) -> dict[str, float]:
    """Prints the figures of idle servers; returns the limits of the goodput in ms."""
    split = up(model, dtype, {"prefill": 1, "decode": 1}, folder / "idle.log")
    alone = vllm_serve(model, dtype, 0, folder / "idle-vllm.log")
    rng = random.Random(1)
    async with serving(split, alone):
        before: dict[str, float] = {}
        answers = []
        for turn in range(-3, number):  # the first three are not counted
            if not turn:
                before = split.cpu_s()
            for server in (split, alone) if turn % 2 else (alone, split):
                prompt = [rng.randrange(1000) for _ in range(IDLE_TOKENS)]
                tokens, times = await complete(server.http_port, prompt, IDLE_OUTPUT)
                assert len(tokens) == IDLE_OUTPUT
                note(server, turn, ttft=times[0], tpot=(times[-1] - times[0]) / (IDLE_OUTPUT - 1))
        after = split.cpu_s()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{split.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for _ in range(number):
                prompt = [rng.randrange(1000) for _ in range(IDLE_TOKENS)]
                asked = request(prompt, max_tokens=IDLE_OUTPUT, temperature=0, ignore_eos=True)
                answers.append(await stream(stub, asked).complete())
    say_idle(split, alone, answers)
    used = {name: (after[name] - before[name]) / number for name in after}
    click.echo(
        f"idle: the coordinator's CPU time is {1e3 * used['coordinator']:.1f} ms of a request's "
        f"{1e3 * used['all']:.0f} ms, {used['coordinator'] / used['all']:.1%}"
    )
    ttft, tpot = (1e3 * statistics.median(alone.figures[name]) for name in ("ttft", "tpot"))
    return {"ttft": TTFT_SCALE * ttft, "tpot": TPOT_SCALE * tpot}


def note(server: Server, turn: int, **seconds: float) -> None:
    if turn >= 0:
        for name, value in seconds.items():
            server.figures.setdefault(name, []).append(value)


def say_idle(split: Server, alone: Server, answers: Sequence[Answer]) -> None:
    for name in ("ttft", "tpot"):
        ours, theirs = (1e3 * statistics.median(each.figures[name]) for each in (split, alone))
        click.echo(f"idle, {name} of {IDLE_TOKENS} tokens: {ours:.1f} ms, vLLM {theirs:.1f} ms, {ours / theirs:.3f}")
    ended = [answer.complete for answer in answers]
    behind = [1e3 * (each.timeline.kv_alloc_s + each.timeline.kv_transfer_s) for each in ended]
    num_bytes = int(statistics.median(each.kv_bytes for each in ended))
    click.echo(
        f"idle: KV is at the decode node {statistics.median(behind):.1f} ms (median; best {min(behind):.1f}) "
        f"behind the first token; to copy its {num_bytes / 2**20:.1f} MiB once takes {1e3 * copy_s(num_bytes):.1f} ms"
    )


def copy_s(num_bytes: int) -> float:
    source, seconds = bytearray(num_bytes), []
    for _ in range(9):
        began = time.perf_counter()
        bytes(source)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


# ---- goodput ----


class RoundRobin:
    """Gives each request to the next server."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = itertools.cycle(ports)

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            lines = [each for each in head[:-4].split(b"\r\n") if not each.lower().startswith(b"connection:")]
            length = next((int(each[15:]) for each in lines if each.lower().startswith(b"content-length:")), 0)
            body = await reader.readexactly(length)
            answers, asks = await asyncio.open_connection("127.0.0.1", next(self._ports))
            asks.write(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body)
            while data := await answers.read(2**16):
                writer.write(data)
                await writer.drain()
            asks.close()
        writer.close()


async def measure_goodput(
    model: Path, folder: Path, given: argparse.Namespace, limits: Mapping[str, float], dtype: str = "bfloat16"
) -> None:
    click.echo(f"goodput: limits {', '.join(f'{name} {value:.0f} ms' for name, value in limits.items())}")
    goodput = [f"{name}:{value:.1f}" for name, value in limits.items()]
    shape = ["--dataset-name=azure", f"--dataset-path={given.trace}", f"--length-scale={LENGTH_SCALE}"]
    common = [*shape, f"--num-prompts={given.num_prompts}", "--num-warmups=4", "--json"]
    common += ["--goodput", *goodput]
    for nodes in ({"prefill": 1, "decode": 1}, {"mixed": 2}):
        server = up(model, dtype, nodes, folder / "goodput.log", admission="timely")
        async with serving(server):
            where = [f"--server=127.0.0.1:{server.grpc_port}", "--send-limits"]
            await load_all(server.name, [*where, *common], given.rates)
    first, second = (vllm_serve(model, dtype, cpu, folder / f"goodput-{cpu}.log") for cpu in range(2))
    async with serving(first, second):
        balancer = RoundRobin([first.http_port, second.http_port])
        front = await asyncio.start_server(balancer.relay, "127.0.0.1", 0, limit=2**24)
        port = front.sockets[0].getsockname()[1]
        where = [f"--server=http://127.0.0.1:{port}", "--backend=openai", f"--tokenizer={model}"]
        await load_all("two vllm serve behind round robin", [*where, *common], given.rates)
        front.close()


async def load_all(name: str, options: Sequence[str], rates: Sequence[float]) -> None:
    for rate in rates:
        command = ["-m", "splitserve", "bench", "serve", *options, f"--request-rate={rate:g}"]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=subprocess.PIPE)
        output, _ = await process.communicate()
        found: dict[str, Any] = json.loads(output)
        low, high = found["slo_attainment_interval"]
        click.echo(
            f"goodput, {rate:g} requests/s, {name}: {found['slo_attainment']:.1%} ({low:.1%} to {high:.1%}) good, "
            f"{found['request_goodput']:.2f}/s; {found['completed']} complete in {found['duration']:.0f} s"
        )


# ---- the model ----


def demo_model(folder: Path) -> Path:
    """The demo model with its weights in a safetensors file, as vLLM reads them."""
    source = resolve("", click.echo).folder
    checkpoint = GgufCheckpoint(source)
    tensors = {}
    for name in checkpoint.names():
        shape, kind = checkpoint.describe(name)
        tensors[name] = checkpoint.read_all(whole_tensor(name, shape, (kind,))).clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    return folder


async def measure(given: argparse.Namespace, folder: Path) -> None:
    model = given.model or demo_model(folder / "model")
    if "tokens" in given.parts:
        for dtype in given.dtypes:
            await compare_tokens(model, folder, given.num_compared, dtype)
    if {"idle", "goodput"} & set(given.parts):
        limits = await measure_idle(model, folder, given.num_idle, "bfloat16")
    if "goodput" in given.parts:
        await measure_goodput(model, folder, given, limits)


def absolute(text: str) -> Path:
    return Path(text).resolve()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", type=absolute)
    parser.add_argument("--parts", nargs="*", default=["tokens", "idle"])
    parser.add_argument("--num-compared", type=int, default=200)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="of the tokens")
    parser.add_argument("--num-idle", type=int, default=20)
    parser.add_argument("--trace", type=absolute, help="Azure's CSV of conversations, for goodput")
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0, 2.0])
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--log-dir", help="keep logs here")
    given = parser.parse_args()
    if given.log_dir:
        Path(given.log_dir).mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext(given.log_dir) if given.log_dir else tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(given, Path(folder).resolve()))


if __name__ == "__main__":
    main()
