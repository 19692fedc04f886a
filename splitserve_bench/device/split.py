"""`python -m splitserve_bench.device.split FOLDER PROMPTS PROMPT_TOKENS OUTPUT_TOKENS BLOCK_SIZE POOL`: a whole
cluster of a prefill and a decode node beside one of a single node, asked the same one after the other. One JSON object.

With several CUDA devices the two nodes are on two of them, else on one. Greedy answers one at a time have steps of the
same shapes in both clusters, so that their tokens must be the same.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from serving_core.units import parse_size
from splitserve.client.clients import AsyncClient
from splitserve.commands.terminal import report
from splitserve.launch.cluster import NO_HTTP, ClusterSettings
from splitserve.launch.launcher import Cluster, free_port
from splitserve.launch.models import LocalModel
from splitserve.launch.preflight import cuda_devices
from splitserve_bench.clusters.cluster import handoff_of
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import GREEDY, Prompts

START_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class SplitBench:
    """What is asked, and what nodes are told."""

    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    block_size: int
    pool_bytes: int


@dataclass(frozen=True, slots=True)
class Times:
    """Of one answer, at the client; or the medians of a cluster's, of which the first one, which pays for first calls,
    does not count."""

    ttft_s: float
    tpot_s: float
    handoff_s: float


@dataclass(frozen=True, slots=True)
class SplitFigures:
    """Both clusters, and how many answers of the split one had the same tokens."""

    num_answers: int
    num_equal: int
    cuda_devices: tuple[str, ...]
    one_node: Times
    split: Times


@dataclass(frozen=True, slots=True)
class _Answer:
    token_ids: tuple[int, ...]
    times: Times


async def measure_split(folder: Path, sizes: SplitBench) -> SplitFigures:
    """Starts both clusters, one after the other. Raises LaunchError where one does not start."""
    together = await _answers(folder, sizes, ClusterSettings(both=1, grpc_port=free_port(), http_port=NO_HTTP))
    apart = await _answers(folder, sizes, ClusterSettings(grpc_port=free_port(), http_port=NO_HTTP))
    num_equal = sum(one.token_ids == other.token_ids for one, other in zip(together, apart, strict=True))
    times = _times(together), _times(apart)
    return SplitFigures(len(together), num_equal, cuda_devices(os.environ), *times)


async def _answers(folder: Path, sizes: SplitBench, settings: ClusterSettings) -> list[_Answer]:
    passed: dict[str, Any] = {"block_size": sizes.block_size, "kv_cache_memory_bytes": sizes.pool_bytes}
    passed["enable_prefix_caching"] = False
    model = LocalModel(folder, folder.name)
    async with Cluster(settings, passed, model, report=report) as cluster, cluster.client() as client:
        async with asyncio.timeout(START_S):
            await cluster.start(lambda missing: None)
        report(f"{', '.join(cluster.nodes)}: {sizes.num_prompts} answers, one after the other ...")
        prompts = Prompts((await client.model_info()).vocab_size, sizes.prompt_tokens)
        await _answer(client, prompts.draw(), sizes.output_tokens)  # pays for first calls
        return [await _answer(client, prompts.draw(), sizes.output_tokens) for _ in range(sizes.num_prompts)]


async def _answer(client: AsyncClient, prompt: Sequence[int], num_tokens: int) -> _Answer:
    token_ids: list[int] = []
    arrivals: list[float] = []
    handoff_s = 0.0
    started_at = time.perf_counter()
    async for chunk in client.generate(prompt, max_tokens=num_tokens, **GREEDY):
        token_ids += chunk.token_ids
        arrivals += [time.perf_counter()] * len(chunk.token_ids)
        if chunk.completion is not None:
            handoff_s = handoff_of(chunk.completion.timeline)
    if len(token_ids) != num_tokens:
        raise BenchError(f"an answer has {len(token_ids)} tokens, and {num_tokens} were asked for")
    tpot_s = (arrivals[-1] - arrivals[0]) / (num_tokens - 1)
    return _Answer(tuple(token_ids), Times(arrivals[0] - started_at, tpot_s, handoff_s))


def _times(answers: Sequence[_Answer]) -> Times:
    return Times(
        ttft_s=statistics.median(answer.times.ttft_s for answer in answers),
        tpot_s=statistics.median(answer.times.tpot_s for answer in answers),
        handoff_s=statistics.median(answer.times.handoff_s for answer in answers),
    )


def main() -> None:
    folder, num_prompts, prompt_tokens, output_tokens, block_size, pool = sys.argv[1:]
    counts = int(num_prompts), int(prompt_tokens), int(output_tokens), int(block_size)
    sizes = SplitBench(*counts, parse_size(pool))
    print(json.dumps(asdict(asyncio.run(measure_split(Path(folder), sizes)))))


if __name__ == "__main__":
    main()
