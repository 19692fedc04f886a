"""What a streamed token costs the coordinator: `python -m tests.api_server_costs [--api {grpc,sse}]
[--api-server-count N] [--streams N ...]`.

A fake node writes many answers at once, in steps of 20 ms and what they take beyond, and clients read them as gRPC's
messages or as server-sent events, in another process. Told is the CPU time of each kind of process, in user and in
system mode, divided by the tokens, from when every answer has begun until the first one ends. Other flags go to the
coordinator: `--stream-interval 8` has 8 tokens in a message.
"""

import argparse
import asyncio
import json
import re
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import click
import grpc.aio
import psutil

from protos import inference_pb2
from tests.system.cluster import Cluster
from tests.tiny_models import write_fake_model

STEP_S = 0.02
NUM_CHANNELS = 16
DEADLINE_S = 300.0
MOST_STREAMS = 1000
PROMPT = [5, 6, 7]
GENERATE = "/splitserve.v1.Inference/Generate"
TOKENS = re.compile(r"^splitserve_generation_tokens_total (\S+)", re.MULTILINE)


def length_of(number: int) -> int:
    """Tokens of each of so many answers."""
    return 60 if number > 100 else 200


def cpu_s(cluster: Cluster) -> Counter[str]:
    """By kind of process, the coordinator, or control and its API servers, and by user and system time."""
    coordinator = psutil.Process(cluster.children["coordinator"].process.pid)
    api_servers = [each for each in coordinator.children() if "coordinator.api" in each.cmdline()]
    kinds = Counter[str]()
    for kind, processes in (("control" if api_servers else "coordinator", [coordinator]), ("api_servers", api_servers)):
        for process in processes:
            times = process.cpu_times()
            kinds[f"{kind} user"] += times.user
            kinds[f"{kind} system"] += times.system
    return kinds


def num_tokens(cluster: Cluster) -> float:
    """Tokens that nodes have written so far."""
    with urlopen(f"{cluster.url}/metrics") as answer:
        found = TOKENS.search(answer.read().decode())
    assert found is not None, "the coordinator does not count tokens"
    return float(found[1])


async def grpc_messages(channel: grpc.aio.Channel, length: int) -> AsyncIterator[int]:
    """Yields 1 for each message of an answer."""
    params = inference_pb2.SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
    request = inference_pb2.GenerateRequest(sampling_params=params)
    request.tokenized.input_ids.extend(PROMPT)
    async for _ in channel.unary_stream(GENERATE)(request.SerializeToString(), timeout=DEADLINE_S):
        yield 1


async def sse_events(port: int, length: int) -> AsyncIterator[int]:
    """Yields the number of events of an answer in each piece that arrives."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": PROMPT, "max_tokens": length, "ignore_eos": True, "temperature": 0, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
    assert b" 200 " in await reader.readline(), "the server has refused a call"
    while data := await reader.read(2**16):
        yield data.count(b'"finish_reason"')
    writer.close()


@dataclass
class Reading:
    """What has been read while all answers were under way."""

    cluster: Cluster
    number: int
    num_begun: int = 0
    num_messages: int = 0
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)

    async def all(self, api: str) -> None:
        length, most = length_of(self.number), min(self.number, NUM_CHANNELS)
        options = (("grpc.use_local_subchannel_pool", 1),)
        channels = [grpc.aio.insecure_channel(self.cluster.target, options=options) for _ in range(most)]
        answers: list[Any] = [
            sse_events(self.cluster.http_port, length) if api == "sse" else grpc_messages(channels[i % most], length)
            for i in range(self.number)
        ]
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*map(self._one, answers))
        for channel in channels:
            await channel.close()

    async def _one(self, answer: Any) -> None:
        has_begun = False
        async with aclosing(answer) as messages:
            async for number in messages:
                if self.before and not self.after:
                    self.num_messages += number
                if number and not has_begun:
                    has_begun = True
                    self.num_begun += 1
                    if self.num_begun == self.number:
                        self.before["tokens"] += num_tokens(self.cluster)
                        self.before += cpu_s(self.cluster)
        if self.before and not self.after:
            self.after += cpu_s(self.cluster)
            self.after["tokens"] += num_tokens(self.cluster)

    def __str__(self) -> str:
        used = {kind: value - self.before[kind] for kind, value in self.after.items()}
        tokens = used.pop("tokens")
        costs = [f"{kind} {1e6 * seconds / tokens:.1f} us" for kind, seconds in used.items()]
        joined = tokens / self.num_messages
        return f"{self.number:5} streams: {', '.join(costs)} of CPU time a token; {joined:.1f} tokens a message"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api", choices=["grpc", "sse"], default="grpc")
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 100, MOST_STREAMS])
    given, others = parser.parse_known_args()
    flags = {name.removeprefix("--"): value for name, value in zip(others[::2], others[1::2], strict=True)}
    with tempfile.TemporaryDirectory() as name:
        model = write_fake_model(Path(name) / "model", step_s=STEP_S)
        most = {"max_num_seqs": MOST_STREAMS, "max_num_queued": 2 * MOST_STREAMS}
        node = {**most, "max_num_batched_tokens": 4 * MOST_STREAMS, "num_kv_blocks": 20 * MOST_STREAMS}
        numbers = {"num_prefill": 0, "num_decode": 0, "num_mixed": 1}
        coordinator = {"api_server_count": given.api_server_count, **flags}
        cluster = Cluster(model, Path(name), **numbers, http=True, coordinator=coordinator, node=node).start()
        try:
            for number in given.streams:
                reading = Reading(cluster, number)
                asyncio.run(reading.all(given.api))
                click.echo(str(reading))
        finally:
            cluster.kill_everything()


if __name__ == "__main__":
    main()
