"""What one node gains by dividing a model over ranks, on the same CPUs: by layers (stages) and within layers (tensor
parallelism). A cluster for each way, one after the other, of one node that reads and writes; all are asked the same.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from splitserve.client.clients import AsyncClient
from splitserve.launch.cluster import NO_HTTP, ClusterSettings
from splitserve.launch.launcher import Cluster, free_port
from splitserve.launch.models import LocalModel, Report
from splitserve_bench.clusters.cluster import arrivals_of, tpot_while_all_stream
from splitserve_bench.clusters.reuse import ask
from splitserve_bench.prompts import Prompts

SHORT_TOKENS: Final = 16  # of the prompts of what is streamed, so that all answers are soon under way


@dataclass(frozen=True, slots=True)
class Division:
    """So many stages, of so many ranks each."""

    num_stages: int
    tp_size: int

    def __str__(self) -> str:
        if self == ONE:
            return "one process"
        stages = f"{self.num_stages} stages" if self.num_stages > 1 else ""
        ranks = f"{self.tp_size} ranks" if self.tp_size > 1 else ""
        return " of ".join(filter(None, (stages, ranks)))


ONE: Final = Division(1, 1)


@dataclass(frozen=True, slots=True)
class RanksBench:
    """How much is asked. Lengths are in tokens; `num_prompts` are read at once, and as many answers written."""

    prompt_tokens: int
    num_prompts: int
    output_tokens: int
    repeats: int
    dtype: str  # as of --dtype


@dataclass(frozen=True, slots=True)
class RanksFigures:
    """One way. Times are medians, in seconds; tokens per second are of prompts. The tuples are by rank. `num_equal` of
    the answers to lone prompts were those of the first way."""

    division: Division
    start_s: float
    lone_prompt_s: float
    lone_tpot_s: float
    prompt_tokens_per_s: float  # of all prompts at once
    tpot_s: float  # of all answers at once
    weight_bytes: tuple[int, ...]
    rss_bytes: tuple[int, ...]
    num_answers: int
    num_equal: int


async def measure_ranks(
    model: LocalModel, divisions: Sequence[Division], sizes: RanksBench, report: Report
) -> list[RanksFigures]:
    """Starts the clusters, and asks them. Raises LaunchError for a model that cannot be divided so."""
    measured: list[RanksFigures] = []
    expected: list[tuple[int, ...]] = []
    for division in divisions:
        report(f"{division} ...")
        settings = ClusterSettings(
            both=1, both_tp=division.tp_size, both_pp=division.num_stages, grpc_port=free_port(), http_port=NO_HTTP
        )
        passed: dict[str, Any] = {"dtype": sizes.dtype, "enable_prefix_caching": False}
        began_s = time.perf_counter()
        async with Cluster(settings, passed, model, report=report) as cluster, cluster.client() as client:
            await cluster.start(lambda missing: None)
            start_s = time.perf_counter() - began_s
            figures, answers = await _measure(client, division, sizes, start_s, expected)
        measured.append(figures)
        expected = expected or answers
    return measured


async def _measure(
    client: AsyncClient, division: Division, sizes: RanksBench, start_s: float, expected: Sequence[tuple[int, ...]]
) -> tuple[RanksFigures, list[tuple[int, ...]]]:
    vocab_size = (await client.model_info()).vocab_size
    prompts, short = Prompts(vocab_size, sizes.prompt_tokens), Prompts(vocab_size, SHORT_TOKENS)
    await ask(client, prompts.draw(), 2)  # what is made at first use is there from now on
    lone = [await ask(client, prompts.draw(), sizes.output_tokens) for _ in range(sizes.repeats)]
    answers = [each.token_ids for each in lone]
    times = [each.completion.timeline for each in lone]
    rates = [await _prompts_per_s(client, prompts, sizes) for _ in range(sizes.repeats)]
    streams = await asyncio.gather(
        *(arrivals_of(client, short.draw(), sizes.output_tokens) for _ in range(sizes.num_prompts))
    )
    ranks = (await client.loads()).nodes[0].ranks
    return RanksFigures(
        division=division,
        start_s=start_s,
        lone_prompt_s=statistics.median(each.prefill_s for each in times),
        lone_tpot_s=statistics.median((each.e2e_s - each.ttft_s) / (sizes.output_tokens - 1) for each in times),
        prompt_tokens_per_s=statistics.median(rates),
        tpot_s=tpot_while_all_stream(streams),
        weight_bytes=tuple(rank.weight_bytes for rank in ranks),
        rss_bytes=tuple(rank.rss_bytes for rank in ranks),
        num_answers=len(answers),
        num_equal=sum(one == other for one, other in zip(answers, expected or answers, strict=True)),
    ), answers


async def _prompts_per_s(client: AsyncClient, prompts: Prompts, sizes: RanksBench) -> float:
    """Tokens per second of several prompts that are asked at once, until the last one is read."""
    asked = [prompts.draw() for _ in range(sizes.num_prompts)]
    began_s = time.perf_counter()
    await asyncio.gather(*(ask(client, prompt, 1) for prompt in asked))
    return sizes.num_prompts * sizes.prompt_tokens / (time.perf_counter() - began_s)
