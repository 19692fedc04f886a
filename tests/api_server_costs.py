"""What a streamed token costs the coordinator: `python -m tests.api_server_costs [--api-server-count N] [--streams N
...]`.

A fake node writes 1, 100 and 1000 answers at once, in steps of 20 ms and what they take beyond, and gRPC clients read
them. Told is the CPU time of each kind of process, divided by the tokens, from when every answer has begun
until the first one ends. Other flags go to the coordinator.
"""

import argparse
import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import click
import grpc.aio
import psutil

from protos import inference_pb2
from tests.system.cluster import Cluster
from tests.tiny_models import write_fake_model

STEP_S = 0.02
NUM_CHANNELS = 16
DEADLINE_S = 300.0
LENGTHS = {1: 200, 100: 200, 1000: 60}  # tokens of each answer, by how many there are
GENERATE = "/splitserve.v1.Inference/Generate"


def cpu_s(cluster: Cluster) -> Counter[str]:
    """By kind of process: the coordinator, or control and its API servers."""
    coordinator = psutil.Process(cluster.children["coordinator"].process.pid)
    api_servers = [each for each in coordinator.children() if "coordinator.api" in each.cmdline()]
    kinds = Counter[str]()
    for kind, processes in (("control" if api_servers else "coordinator", [coordinator]), ("api_servers", api_servers)):
        for process in processes:
            times = process.cpu_times()
            kinds[kind] += times.user + times.system
    return kinds


@dataclass
class Reading:
    """What has been read while all answers were under way."""

    cluster: Cluster
    number: int
    num_begun: int = 0
    num_tokens: int = 0
    num_messages: int = 0
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)

    async def all(self, length: int) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        num_channels = min(self.number, NUM_CHANNELS)
        channels = [grpc.aio.insecure_channel(self.cluster.target, options=options) for _ in range(num_channels)]
        await asyncio.gather(*(self._one(channels[i % num_channels], length) for i in range(self.number)))
        for channel in channels:
            await channel.close()

    async def _one(self, channel: grpc.aio.Channel, length: int) -> None:
        params = inference_pb2.SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
        request = inference_pb2.GenerateRequest(sampling_params=params)
        request.tokenized.input_ids.extend([5, 6, 7])
        call = channel.unary_stream(GENERATE)(request.SerializeToString(), timeout=DEADLINE_S)
        has_begun = False
        async for message in call:
            response = inference_pb2.GenerateResponse.FromString(message)
            if not has_begun:
                has_begun = True
                self.num_begun += 1
                if self.num_begun == self.number:
                    self.before = cpu_s(self.cluster)
            elif self.before and not self.after:
                self.num_tokens += len(response.chunk.token_ids)
                self.num_messages += 1
            if response.HasField("complete") and not self.after:
                self.after = cpu_s(self.cluster)

    def __str__(self) -> str:
        used_us = {kind: 1e6 * (self.after[kind] - self.before[kind]) / self.num_tokens for kind in self.after}
        costs = [f"{kind} {us:.1f} us" for kind, us in used_us.items()]
        joined = self.num_tokens / self.num_messages
        return f"{self.number:5} streams: {', '.join(costs)} of CPU time a token; {joined:.1f} tokens a message"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="*", default=list(LENGTHS))
    given, others = parser.parse_known_args()
    flags = {name.removeprefix("--"): value for name, value in zip(others[::2], others[1::2], strict=True)}
    with tempfile.TemporaryDirectory() as name:
        model = write_fake_model(Path(name) / "model", step_s=STEP_S)
        node = {"max_num_seqs": 1000, "max_num_batched_tokens": 4000, "num_kv_blocks": 20_000, "max_num_queued": 2000}
        numbers = {"num_prefill": 0, "num_decode": 0, "num_mixed": 1}
        coordinator = {"api_server_count": given.api_server_count, **flags}
        cluster = Cluster(model, Path(name), **numbers, coordinator=coordinator, node=node).start()
        try:
            for number in given.streams:
                reading = Reading(cluster, number)
                asyncio.run(reading.all(LENGTHS[number]))
                click.echo(str(reading))
        finally:
            cluster.kill_everything()


if __name__ == "__main__":
    main()
