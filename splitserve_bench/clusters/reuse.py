"""What prefix reuse saves, on real clusters: one without `--enable-prefix-caching`, then one with it, same requests.

1. A chat of two turns: the second prompt is the first one, its answer and new text, as token ids. The second turns
   count.
2. A shared beginning: requests that begin with the same long system prompt and end with text of their own. All of
   them count, also the first one, which can reuse nothing.
3. The same, with another beginning, sent all at once.

The others are sent one after the other, so that nobody's time to first token is somebody else's queue. Answers are
greedy and of one length; they are compared between the clusters, token by token. Reuse changes where the steps of a
prompt begin, and with it the rounding: in bfloat16 an answer may turn where two tokens are as likely as each other, in
float32 hardly ever.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from tokenizers import Tokenizer

from splitserve.client.answers import Completion
from splitserve.client.clients import AsyncClient
from splitserve.launch.cluster import NO_HTTP, ClusterSettings
from splitserve.launch.launcher import Cluster, free_port
from splitserve.launch.models import LocalModel, Report
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import GREEDY, SEED

CHAT, SHARED, AT_ONCE = "second turn of a chat", "shared beginning", "shared beginning, at once"
WARM_UP_TOKENS: Final = 32
WORDS: Final = (
    ("old", "quiet", "young", "famous", "careful", "northern", "wooden", "bright", "narrow", "patient"),
    ("teacher", "river", "market", "engine", "garden", "letter", "harbour", "student", "bridge", "village"),
    ("follows", "remembers", "paints", "crosses", "measures", "repairs", "describes", "visits", "builds", "leaves"),
)


@dataclass(frozen=True, slots=True)
class ReuseBench:
    """How much is asked. Lengths are in tokens."""

    num_conversations: int
    turn_tokens: int  # of new text in each of the two turns
    num_requests: int  # with a shared beginning
    shared_tokens: int
    own_tokens: int
    output_tokens: int
    dtype: str  # as of --dtype


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer: its tokens, and how it ended."""

    token_ids: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class ReuseFigures:
    """One kind of requests, with reuse and without. Shares are of all of them together; seconds to first token are
    medians. `num_equal` answers were the same in both clusters."""

    name: str
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    cached_share: float  # of the prompt tokens: not computed by the prefill node
    kv_bytes: int
    kv_bytes_saved: int
    saved_share: float  # of the KV bytes: not sent to the decode node
    ttft_with_s: float
    ttft_without_s: float
    num_equal: int


async def measure_reuse(model: LocalModel, sizes: ReuseBench, report: Report) -> list[ReuseFigures]:
    """Starts both clusters, one after the other, and asks them the same. Raises BenchError when a model has no
    tokenizer, and LaunchError."""
    texts = Texts(model)
    without = await _ask_cluster(model, sizes, texts, report, is_caching=False)
    with_reuse = await _ask_cluster(model, sizes, texts, report, is_caching=True)
    return [figures_of(name, with_reuse[name], without[name]) for name in with_reuse]


def figures_of(name: str, with_reuse: Sequence[Asked], without: Sequence[Asked]) -> ReuseFigures:
    """The figures of the same requests, one at least, asked with reuse and without."""
    completions = [asked.completion for asked in with_reuse]
    prompt_tokens = sum(completion.prompt_tokens for completion in completions)
    cached_tokens = sum(completion.cached_tokens for completion in completions)
    kv_bytes = sum(completion.kv_bytes for completion in completions)
    kv_bytes_saved = sum(completion.kv_bytes_saved for completion in completions)
    return ReuseFigures(
        name=name,
        num_requests=len(completions),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        cached_share=cached_tokens / prompt_tokens,
        kv_bytes=kv_bytes,
        kv_bytes_saved=kv_bytes_saved,
        saved_share=kv_bytes_saved / max(1, kv_bytes + kv_bytes_saved),
        ttft_with_s=_median_ttft_s(with_reuse),
        ttft_without_s=_median_ttft_s(without),
        num_equal=sum(one.token_ids == other.token_ids for one, other in zip(with_reuse, without, strict=True)),
    )


class Texts:
    """Sentences that a model finds easier to go on with than random tokens, so that a rounding error seldom changes
    an answer. The same ones for the same number in every run."""

    def __init__(self, model: LocalModel) -> None:
        """Raises BenchError when the model has no tokenizer.json."""
        path = model.folder / "tokenizer.json"
        if not path.is_file():
            raise BenchError(f"{model.name} has no tokenizer.json")
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))

    def draw(self, number: int, num_tokens: int) -> list[int]:
        """Exactly so many tokens of text number `number`."""
        random, token_ids = Random(SEED * 1_000_003 + number), list[int]()
        while len(token_ids) < num_tokens:
            adjective, noun, verb = (random.choice(words) for words in WORDS)
            sentence = f" Number {random.randrange(1000)}: the {adjective} {noun} {verb} the {random.choice(WORDS[1])}."
            token_ids += self._tokenizer.encode(sentence, add_special_tokens=False).ids
        return token_ids[:num_tokens]


async def _ask_cluster(
    model: LocalModel, sizes: ReuseBench, texts: Texts, report: Report, *, is_caching: bool
) -> dict[str, list[Asked]]:
    report(f"a cluster {'with' if is_caching else 'without'} prefix caching ...")
    passed = {"enable_prefix_caching": is_caching, "dtype": sizes.dtype}
    settings = ClusterSettings(grpc_port=free_port(), http_port=NO_HTTP)
    async with Cluster(settings, passed, model, report=report) as cluster, cluster.client() as client:
        await cluster.start(lambda missing: None)
        await ask(client, texts.draw(0, WARM_UP_TOKENS), sizes.output_tokens)
        report(f"{sizes.num_conversations} chats of two turns ...")
        chat = await _chat(client, sizes, texts)
        report(f"{sizes.num_requests} requests with a shared beginning of {sizes.shared_tokens} tokens ...")
        first = 1 + 2 * sizes.num_conversations
        shared = [await ask(client, each, sizes.output_tokens) for each in _alike(sizes, texts, first)]
        report(f"{sizes.num_requests} more of them, all at once ...")
        prompts = _alike(sizes, texts, first + 1 + sizes.num_requests)
        at_once = await asyncio.gather(*(ask(client, each, sizes.output_tokens) for each in prompts))
        return {CHAT: chat, SHARED: shared, AT_ONCE: at_once}


async def _chat(client: AsyncClient, sizes: ReuseBench, texts: Texts) -> list[Asked]:
    """The second turns. All first turns come before them."""
    numbers = range(1, 1 + 2 * sizes.num_conversations, 2)
    beginnings = []
    for number in numbers:
        prompt = texts.draw(number, sizes.turn_tokens)
        first = await ask(client, prompt, sizes.output_tokens)
        beginnings.append([*prompt, *first.token_ids])
    return [
        await ask(client, [*beginning, *texts.draw(number + 1, sizes.turn_tokens)], sizes.output_tokens)
        for number, beginning in zip(numbers, beginnings, strict=True)
    ]


def _alike(sizes: ReuseBench, texts: Texts, first: int) -> list[list[int]]:
    """Prompts that begin with the text of that number."""
    beginning = texts.draw(first, sizes.shared_tokens)
    return [
        [*beginning, *texts.draw(number, sizes.own_tokens)]
        for number in range(first + 1, first + 1 + sizes.num_requests)
    ]


async def ask(client: AsyncClient, prompt: Sequence[int], max_tokens: int) -> Asked:
    """One answer, of that many tokens."""
    token_ids: list[int] = []
    async for chunk in client.generate(prompt, max_tokens=max_tokens, **GREEDY):
        token_ids += chunk.token_ids
        if chunk.completion is not None:
            return Asked(tuple(token_ids), chunk.completion)
    raise AssertionError("an answer without an end")


def _median_ttft_s(answers: Sequence[Asked]) -> float:
    return statistics.median(asked.completion.timeline.ttft_s for asked in answers)
