"""What a streamed token costs the coordinator: `python -m tests.door_costs [--doors N] [--http] [--streams N ...]`.

A fake node writes 1, 100 and 1000 answers at once, a step of all of them every 20 ms; gRPC or HTTP clients read them.
Told is the CPU time of each kind of process, divided by the tokens. Other flags go to the coordinator.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc.aio
import psutil

from protos import inference_pb2
from tests.system.cluster import Cluster
from tests.tiny_models import write_fake_model

STEP_S = 0.02
NUM_CHANNELS = 8
DEADLINE_S = 300.0
LENGTHS = {1: 500, 100: 200, 1000: 60}  # tokens of each answer, by how many there are
PROMPT = [5, 6, 7]
GENERATE = "/splitserve.v1.Inference/Generate"


async def read_over_grpc(cluster: Cluster, number: int, length: int) -> int:
    """Messages that came."""
    params = inference_pb2.SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
    request = inference_pb2.GenerateRequest(sampling_params=params)
    request.tokenized.input_ids.extend(PROMPT)
    asked = request.SerializeToString()
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(cluster.target, options=options) for _ in range(min(number, NUM_CHANNELS))]

    async def one(channel: grpc.aio.Channel) -> int:
        call = channel.unary_stream(GENERATE)(asked, timeout=DEADLINE_S)
        return sum([1 async for _ in call])

    counts = await asyncio.gather(*(one(channels[index % len(channels)]) for index in range(number)))
    for channel in channels:
        await channel.close()
    return sum(counts)


async def read_over_http(cluster: Cluster, number: int, length: int) -> int:
    """Events that came."""
    asked = {"prompt": PROMPT, "max_tokens": length, "ignore_eos": True, "temperature": 0, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {cluster.host}\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def one() -> int:
        reader, writer = await asyncio.open_connection(cluster.host, cluster.http_port)
        writer.write(head + body)
        num_events, read = -1, b""  # the last one is the end
        while not read.endswith(b"0\r\n\r\n"):
            read = await reader.read(2**16)
            assert read, "the answer broke off"
            num_events += read.count(b"data: ")
        writer.close()
        return num_events

    return sum(await asyncio.gather(*(one() for _ in range(number))))


def cpu_s(cluster: Cluster) -> Counter[str]:
    """By kind of process: the coordinator, which is control where there are doors, and its doors."""
    coordinator = psutil.Process(cluster.children["coordinator"].process.pid)
    doors = [each for each in coordinator.children() if "coordinator.doors" in " ".join(each.cmdline())]
    kinds = Counter[str]()
    for kind, processes in (("control" if doors else "coordinator", [coordinator]), ("doors", doors)):
        for process in processes:
            times = process.cpu_times()
            kinds[kind] += times.user + times.system
    return kinds


def measure(cluster: Cluster, number: int, *, http: bool) -> None:
    length = LENGTHS[number]
    read = read_over_http if http else read_over_grpc
    asyncio.run(read(cluster, min(number, 20), 5))  # what is made once
    before, began_s = cpu_s(cluster), time.monotonic()
    num_messages = asyncio.run(read(cluster, number, length))
    wall_s, after = time.monotonic() - began_s, cpu_s(cluster)
    num_tokens = number * length
    costs = ", ".join(f"{kind} {1e6 * (after[kind] - before[kind]) / num_tokens:.1f} us" for kind in after)
    rate = f"{num_tokens / wall_s:.0f} tokens/s, {num_tokens / num_messages:.1f} tokens a message"
    print(f"{number:5} streams of {length}: {costs} of CPU time a token; {rate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--doors", type=int, default=1)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--streams", type=int, nargs="*", default=list(LENGTHS))
    given, others = parser.parse_known_args()
    flags = dict(zip(others[::2], others[1::2], strict=True))
    coordinator = {name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()}
    if given.doors > 1:
        coordinator["doors"] = given.doors
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_fake_model(folder / "model", step_s=STEP_S)
        node = {"max_num_seqs": 1000, "max_num_batched_tokens": 4000, "num_kv_blocks": 20_000, "max_num_queued": 2000}
        cluster = Cluster(
            model,
            folder,
            num_prefill=0,
            num_decode=0,
            num_both=1,
            http=given.http,
            coordinator=coordinator,
            node=node,
        )
        cluster.start()
        try:
            for number in given.streams:
                measure(cluster, number, http=given.http)
        finally:
            cluster.kill_everything()


if __name__ == "__main__":
    main()
