"""What a second tier saves, on real clusters whose pools are too small for their chats: one without a tier, then with
each kind of it, same requests.

Chats begin with the same system prompt and go on by turns: in each round every chat asks once, with all that it has
said and been told so far and new text, as token ids. So between two turns of a chat the pool has given up what it had
of it. Requests are sent one after the other. Answers are greedy and of one length; they are compared token by token.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from splitserve.client.answers import TierLoad
from splitserve.client.clients import AsyncClient
from splitserve.launch.cluster import NO_HTTP, ClusterSettings
from splitserve.launch.launcher import Cluster, free_port
from splitserve.launch.models import LocalModel, Report
from splitserve_bench.clusters.reuse import WARM_UP_TOKENS, Asked, Texts, ask

WITHOUT: Final = "the pool alone"


@dataclass(frozen=True, slots=True)
class TiersBench:
    """How much is asked. Lengths are in tokens."""

    num_chats: int
    num_turns: int
    system_tokens: int  # that all chats begin with
    turn_tokens: int  # of new text
    output_tokens: int
    pool_blocks: int
    tier_bytes: int
    dtype: str  # as of --dtype


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One cluster. The share of cached tokens is of all prompts together, seconds to first token are of the turns after
    the first; `tier` is the prefill node's. `num_equal` answers were the same as with the pool alone."""

    name: str
    num_requests: int
    prompt_tokens: int
    cached_share: float
    later_ttft_s: float  # median
    all_ttft_s: float  # sum over all requests
    tier: TierLoad | None
    num_equal: int

    @property
    def hit_rate(self) -> float:
        """Of the full blocks that the pool did not hold, those read back."""
        if self.tier is None:
            return 0.0
        return self.tier.num_hits / max(1, self.tier.num_hits + self.tier.num_misses)


async def measure_tiers(model: LocalModel, sizes: TiersBench, report: Report) -> list[TierFigures]:
    """Starts the clusters, one after the other, and asks them the same. Raises BenchError when a model has no
    tokenizer, and LaunchError."""
    texts = Texts(model)
    kinds: dict[str, dict[str, Any]] = {
        WITHOUT: {},
        "host memory": {"kv_host_bytes": sizes.tier_bytes},
        "a file": {"kv_disk_bytes": sizes.tier_bytes},
    }
    measured: list[TierFigures] = []
    expected: list[list[Asked]] = []
    for name, flags in kinds.items():
        rounds, tier = await _ask_cluster(model, sizes, texts, report, name, flags)
        expected = expected or rounds
        measured.append(figures_of(name, rounds, expected, tier))
    return measured


def figures_of(
    name: str, rounds: Sequence[Sequence[Asked]], expected: Sequence[Sequence[Asked]], tier: TierLoad | None
) -> TierFigures:
    """Of the answers of each round, at least two, beside those of the pool alone."""
    answers = [asked for each in rounds for asked in each]
    others = [asked for each in expected for asked in each]
    prompt_tokens = sum(asked.completion.prompt_tokens for asked in answers)
    later = [asked.completion.timeline.ttft_s for each in rounds[1:] for asked in each]
    return TierFigures(
        name=name,
        num_requests=len(answers),
        prompt_tokens=prompt_tokens,
        cached_share=sum(asked.completion.cached_tokens for asked in answers) / prompt_tokens,
        later_ttft_s=statistics.median(later),
        all_ttft_s=sum(asked.completion.timeline.ttft_s for asked in answers),
        tier=tier,
        num_equal=sum(one.token_ids == other.token_ids for one, other in zip(answers, others, strict=True)),
    )


async def _ask_cluster(
    model: LocalModel, sizes: TiersBench, texts: Texts, report: Report, name: str, flags: Mapping[str, Any]
) -> tuple[list[list[Asked]], TierLoad | None]:
    report(f"{sizes.num_chats} chats of {sizes.num_turns} turns: {name} ...")
    passed = {"dtype": sizes.dtype, "num_kv_blocks": sizes.pool_blocks, **flags}
    settings = ClusterSettings(grpc_port=free_port(), http_port=NO_HTTP)
    async with Cluster(settings, passed, model, report=report) as cluster, cluster.client() as client:
        await cluster.start(lambda missing: None)
        await ask(client, texts.draw(0, WARM_UP_TOKENS), sizes.output_tokens)
        rounds = await _chat(client, sizes, texts)
        loads = await client.loads()
        return rounds, next(node.tier for node in loads.nodes if node.role == "prefill")


async def _chat(client: AsyncClient, sizes: TiersBench, texts: Texts) -> list[list[Asked]]:
    """The answers of each round."""
    chats = [texts.draw(1, sizes.system_tokens) for _ in range(sizes.num_chats)]
    rounds: list[list[Asked]] = []
    for number in range(sizes.num_turns):
        rounds.append([])
        for index, chat in enumerate(chats):
            chat += texts.draw(2 + number * sizes.num_chats + index, sizes.turn_tokens)
            answer = await ask(client, chat, sizes.output_tokens)
            chat += answer.token_ids
            rounds[-1].append(answer)
    return rounds
