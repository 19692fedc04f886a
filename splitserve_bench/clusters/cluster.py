"""What one prefill node and one decode node on this machine achieve.

1. Start: from the start of this process to the first token of the first answer.
2. Handoff: answers one after the other. From the first token to the start of the first decode step of the same
   request, as the timeline tells, less the time that a local socket takes for its KV bytes.
3. Streams: several answers at the same time. While all of them decode, the time between two tokens at the client is
   compared with the decode node's own step, and the coordinator's CPU time is divided by the tokens streamed.
"""

import asyncio
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from serving_core.model_config import read_model_config
from splitserve.client.answers import Timeline
from splitserve.client.clients import AsyncClient
from splitserve.launch.cluster import NO_HTTP, ClusterSettings
from splitserve.launch.launcher import Cluster, free_port
from splitserve.launch.models import LocalModel, Report
from splitserve.launch.preflight import process_age_s
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import GREEDY, Prompts

QUESTION: Final = "What is the capital of France?"
STREAM_PROMPT_TOKENS: Final = 32  # short, so that all answers are soon under way
SAMPLE_S: Final = 0.2
NUM_COPIES: Final = 21


@dataclass(frozen=True, slots=True)
class ClusterBench:
    """How much is measured."""

    num_streams: int
    prompt_tokens: int
    output_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """Seconds and bytes; medians where there are several. rss_bytes is by process, after everything else."""

    first_token_s: float
    rss_bytes: dict[str, int]
    handoff_s: float
    kv_bytes: int
    copy_s: float
    client_tpot_s: float
    step_s: float
    coordinator_cpu_s_per_token: float

    @property
    def handoff_beyond_copy_s(self) -> float:
        return self.handoff_s - self.copy_s

    @property
    def tpot_ratio(self) -> float:
        return self.client_tpot_s / self.step_s


@dataclass(frozen=True, slots=True)
class Streams:
    """What was seen while several answers were streamed."""

    client_tpot_s: float
    step_s: float
    coordinator_cpu_s_per_token: float


async def measure_cluster(model: LocalModel, sizes: ClusterBench, report: Report) -> ClusterFigures:
    """Starts a cluster, measures, stops it. The first figure counts from the start of this process."""
    settings = ClusterSettings(grpc_port=free_port(), http_port=NO_HTTP)
    async with Cluster(settings, {}, model, report=report) as cluster, cluster.client() as client:
        await cluster.start(lambda missing: None)
        first_token_s = await _first_token_s(client)
        vocab_size = (await client.model_info()).vocab_size
        report(f"{sizes.repeats} answers, one after the other ...")
        prompts = Prompts(vocab_size, sizes.prompt_tokens)
        handoffs = [await _handoff_s(client, prompts.draw()) for _ in range(sizes.repeats)]
        report(f"{sizes.num_streams} answers at the same time ...")
        streams = await _measure_streams(cluster, client, Prompts(vocab_size, STREAM_PROMPT_TOKENS), sizes)
        fingerprint = (await client.server_info()).nodes[0].fingerprint
        layout = read_model_config(model.folder).kv_layout(int(fingerprint["block_size"]), fingerprint["dtype"])
        kv_bytes = layout.num_blocks_for(sizes.prompt_tokens) * layout.block_bytes
        return ClusterFigures(
            first_token_s=first_token_s,
            rss_bytes={name: psutil.Process(cluster.pid(name)).memory_info().rss for name in cluster.names},
            handoff_s=statistics.median(handoffs),
            kv_bytes=kv_bytes,
            copy_s=copy_s(kv_bytes),
            client_tpot_s=streams.client_tpot_s,
            step_s=streams.step_s,
            coordinator_cpu_s_per_token=streams.coordinator_cpu_s_per_token,
        )


async def _first_token_s(client: AsyncClient) -> float:
    async for chunk in client.generate(QUESTION, temperature=0, max_tokens=8):
        if chunk.token_ids:
            return process_age_s()
    raise AssertionError("an answer without a token")


async def _handoff_s(client: AsyncClient, prompt: Sequence[int]) -> float:
    async for chunk in client.generate(prompt, max_tokens=4, **GREEDY):
        if chunk.completion is not None:
            return handoff_of(chunk.completion.timeline)
    raise AssertionError("an answer without an end")


def handoff_of(timeline: Timeline) -> float:
    """Seconds from the first token, which ends the last prefill step, to the start of the first decode step."""
    return timeline.credit_wait_s + timeline.transfer_s + timeline.decode_queue_s


async def _measure_streams(cluster: Cluster, client: AsyncClient, prompts: Prompts, sizes: ClusterBench) -> Streams:
    steps_s: list[float] = []
    watching = asyncio.create_task(_watch_steps(client, sizes.num_streams, steps_s))
    coordinator = psutil.Process(cluster.pid("coordinator"))
    cpu_before_s = _cpu_s(coordinator)
    questions = [prompts.draw() for _ in range(sizes.num_streams)]
    arrivals = await asyncio.gather(*(arrivals_of(client, prompt, sizes.output_tokens) for prompt in questions))
    cpu_s = _cpu_s(coordinator) - cpu_before_s
    watching.cancel()
    if not steps_s:
        raise BenchError("the answers were never all decoded together: measure longer ones")
    return Streams(
        client_tpot_s=tpot_while_all_stream(arrivals),
        step_s=steps_s[-1],  # its node's median over recent steps: the last is furthest from the start
        coordinator_cpu_s_per_token=cpu_s / sum(map(len, arrivals)),
    )


async def arrivals_of(client: AsyncClient, prompt: Sequence[int], num_tokens: int) -> list[float]:
    """When each token of one answer came."""
    arrivals: list[float] = []
    async for chunk in client.generate(prompt, max_tokens=num_tokens, **GREEDY):
        arrivals += [time.perf_counter()] * len(chunk.token_ids)
    return arrivals


async def _watch_steps(client: AsyncClient, num_running: int, steps_s: list[float]) -> None:
    """Collects the decode node's step time as long as all answers are in its batch."""
    while True:
        loads = await client.loads()
        steps_s += [node.step_s for node in loads.nodes if node.role == "decode" and node.num_running == num_running]
        await asyncio.sleep(SAMPLE_S)


def tpot_while_all_stream(arrivals: Sequence[Sequence[float]]) -> float:
    """Median over the answers of the seconds between two tokens, from when the last answer has begun to decode until
    the first one ends. Raises BenchError when they were never all under way."""
    start = max(answer[1] for answer in arrivals)
    end = min(answer[-1] for answer in arrivals)
    counts = [sum(start <= moment <= end for moment in answer) for answer in arrivals]
    if start >= end or min(counts) < 2:
        raise BenchError("the answers were never all under way together: measure longer ones")
    return statistics.median((end - start) / (count - 1) for count in counts)


def copy_s(num_bytes: int) -> float:
    """Median seconds that a local socket takes to copy that many bytes from one buffer into another."""
    source, target = bytearray(num_bytes), memoryview(bytearray(num_bytes))
    ends = socket.socketpair()
    with ends[0] as sender, ends[1] as receiver:
        return statistics.median(_socket_copy_s(sender, receiver, source, target) for _ in range(NUM_COPIES))


def _socket_copy_s(sender: socket.socket, receiver: socket.socket, source: bytearray, target: memoryview) -> float:
    thread = threading.Thread(target=sender.sendall, args=(source,))
    start, received = time.perf_counter(), 0
    thread.start()
    while received < len(target):
        received += receiver.recv_into(target[received:])
    elapsed_s = time.perf_counter() - start
    thread.join()
    return elapsed_s


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
