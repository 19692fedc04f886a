"""From which prompt length it pays to send KV blocks layer by layer while the prompt is computed.

Two clusters at the same time, one that always does and one that never does (`--overlap-min-tokens`), are asked in
turns, one request at a time, so that what disturbs the machine hits both alike. What counts is the time until the
first decode step may start, which is everything before it in the timeline, in the fastest repeat: what overlap saves is
a few milliseconds, and the computation itself varies by more.
"""

import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from splitserve.answers import Timeline
from splitserve.bench.cluster import handoff_of
from splitserve.bench.prompts import GREEDY, Prompts
from splitserve.client import AsyncClient
from splitserve.cluster import NO_HTTP, ClusterSettings
from splitserve.launcher import Cluster, free_port
from splitserve.models import LocalModel, Report

ALWAYS_TOKENS: Final = 0
NEVER_TOKENS: Final = 2**31 - 1
OUTPUT_TOKENS: Final = 4
WARM_UPS: Final = 2


@dataclass(frozen=True, slots=True)
class OverlapTimes:
    """Seconds to the first token and from it to the first decode step, medians; and to the first decode step, the
    fastest."""

    ttft_s: float
    handoff_s: float
    decode_start_s: float


@dataclass(frozen=True, slots=True)
class OverlapFigures:
    """One prompt length."""

    prompt_tokens: int
    always: OverlapTimes
    never: OverlapTimes

    @property
    def pays(self) -> bool:
        return self.always.decode_start_s < self.never.decode_start_s


async def measure_overlap(
    model: LocalModel, prompt_tokens: Sequence[int], repeats: int, report: Report
) -> list[OverlapFigures]:
    """Starts both clusters and asks them in turns. Raises LaunchError."""
    async with AsyncExitStack() as stack:
        always = await _start(stack, model, ALWAYS_TOKENS, report)
        never = await _start(stack, model, NEVER_TOKENS, report)
        vocab_size = (await always.model_info()).vocab_size
        figures = []
        for num_tokens in prompt_tokens:
            report(f"prompts of {num_tokens} tokens ...")
            figures.append(await _measure((always, never), vocab_size, num_tokens, repeats))
        return figures


def pays_from(figures: Sequence[OverlapFigures]) -> int | None:
    """The least of these prompt lengths from which on, at it and at all longer ones, overlap pays."""
    found = None
    for each in sorted(figures, key=lambda figures: figures.prompt_tokens, reverse=True):
        if not each.pays:
            break
        found = each.prompt_tokens
    return found


def times_of(timelines: Sequence[Timeline]) -> OverlapTimes:
    """Of one timeline at least."""
    starts_s = [timeline.prefill_queue_s + timeline.prefill_s + handoff_of(timeline) for timeline in timelines]
    return OverlapTimes(
        ttft_s=statistics.median(timeline.ttft_s for timeline in timelines),
        handoff_s=statistics.median(map(handoff_of, timelines)),
        decode_start_s=min(starts_s),
    )


async def _start(stack: AsyncExitStack, model: LocalModel, min_tokens: int, report: Report) -> AsyncClient:
    report(f"a cluster that {'always' if min_tokens == ALWAYS_TOKENS else 'never'} overlaps ...")
    passed: dict[str, Any] = {"overlap_min_tokens": min_tokens, "enable_prefix_caching": False}
    settings = ClusterSettings(grpc_port=free_port(), http_port=NO_HTTP)
    cluster = await stack.enter_async_context(Cluster(settings, passed, model, report=report))
    await cluster.start(lambda missing: None)
    return await stack.enter_async_context(cluster.client())


async def _measure(
    clients: tuple[AsyncClient, AsyncClient], vocab_size: int, num_tokens: int, repeats: int
) -> OverlapFigures:
    """The client that overlaps comes first of the two; they take turns in being asked first."""
    prompts = Prompts(vocab_size, num_tokens)
    timelines: tuple[list[Timeline], list[Timeline]] = ([], [])
    for number in range(WARM_UPS + repeats):
        prompt = prompts.draw()
        for index in (0, 1) if number % 2 else (1, 0):
            timeline = await _timeline(clients[index], prompt)
            if number >= WARM_UPS:
                timelines[index].append(timeline)
    return OverlapFigures(num_tokens, *map(times_of, timelines))


async def _timeline(client: AsyncClient, prompt: Sequence[int]) -> Timeline:
    async for chunk in client.generate(prompt, max_tokens=OUTPUT_TOKENS, **GREEDY):
        if chunk.completion is not None:
            return chunk.completion.timeline
    raise AssertionError("an answer without an end")
