"""Measure the accuracy of quantized weights and of an 8-bit KV cache against the same model without them.

Both engines read the same texts token by token, behind contexts of one length, and each one's log-probability of the
text's next token is compared; then each continues the contexts by itself. The texts are Python's own help.
"""

import dataclasses
import math
import pydoc_data.topics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.markup import escape
from tokenizers import Tokenizer

from engine.engine import Engine
from serving_core.errors import SettingsError
from serving_core.requests import Request, SampledToken, SamplingParams, Work
from serving_core.settings import EngineSettings
from serving_core.units import size_of
from splitserve.launch.models import Report
from splitserve_bench.engine.driver import load_engine, threads
from splitserve_bench.engine.sizes import STEP_TOKENS
from splitserve_bench.report import engine_line, table_of

NUM_TEXTS: Final = 8
NEXT_TOKENS: Final = 64
MAX_CHARACTERS_PER_TOKEN: Final = 12  # more than any tokenizer makes of English
CERTAIN_BIAS: Final = 1e9  # makes a token the likeliest; logprobs are those before it


@dataclass(frozen=True, slots=True)
class ContextAccuracy:
    """One context length compared with the reference, over `num_tokens` tokens of text.

    The errors are differences of the two log-probabilities of the text's tokens (natural logarithm).
    """

    context_tokens: int
    num_tokens: int
    perplexity: float
    reference_perplexity: float
    same_likeliest: float  # share of positions in the text with the same likeliest token
    same_output: float  # share of positions with the same token when each engine goes on by itself
    mean_error: float
    max_error: float


@dataclass(frozen=True, slots=True)
class AccuracyFigures:
    """The quantized engine against the reference: the same model without quantization, its KV in the compute dtype."""

    model: str
    engine: dict[str, str]
    weight_bytes: int
    reference_weight_bytes: int
    kv_bytes_per_token: int
    reference_kv_bytes_per_token: int
    contexts: tuple[ContextAccuracy, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """One engine's results over all texts, in their order."""

    logprobs: list[float]
    likeliest: list[int]
    output: list[int]


def measure_accuracy(
    folder: Path, settings: EngineSettings, contexts: Sequence[int], num_threads: int, report: Report
) -> AccuracyFigures:
    """Load the model without quantization, then with these settings, and compare the two at each context length.

    `folder` holds the model, `contexts` are lengths in tokens, `num_threads` is 0 for torch's own number, and `report`
    gets progress. Raises SettingsError when the texts are too short for a context or the model cannot be quantized, and
    ModelError when it cannot be loaded.
    """
    texts = {context: texts_of(folder, context + NEXT_TOKENS) for context in contexts}
    plain = dataclasses.replace(settings, quantization="none", kv_cache_dtype="auto")
    with threads(num_threads):
        report("without quantization ...")
        reference = _load(folder, plain, max(contexts))
        expected = {context: _see(reference, texts[context]) for context in contexts}
        sizes = reference.weight_bytes, reference.model_layout.token_bytes
        del reference  # before the next one takes its memory
        report("with it ...")
        engine = _load(folder, settings, max(contexts))
        rows = tuple(_compare(context, _see(engine, texts[context]), expected[context]) for context in contexts)
    token_bytes = engine.model_layout.token_bytes
    return AccuracyFigures(folder.name, engine.description, engine.weight_bytes, sizes[0], token_bytes, sizes[1], rows)


def accuracy_view(figures: AccuracyFigures) -> RenderableType:
    """Return a table with a row for each context, and a line with the bytes that the quantization saves."""
    table = table_of(
        figures.contexts,
        {
            "context tokens": lambda row: str(row.context_tokens),
            "tokens": lambda row: str(row.num_tokens),
            "perplexity": lambda row: f"{row.perplexity:.2f}",
            "of the reference": lambda row: f"{row.reference_perplexity:.2f}",
            "same likeliest token": lambda row: f"{row.same_likeliest:.1%}",
            "same output": lambda row: f"{row.same_output:.1%}",
            "mean error of logprobs": lambda row: f"{row.mean_error:.4f}",
            "max": lambda row: f"{row.max_error:.3f}",
        },
    )
    saved = (
        f"weights {size_of(figures.weight_bytes)}, of the reference {size_of(figures.reference_weight_bytes)}; KV of a "
        f"token {size_of(figures.kv_bytes_per_token)}, of the reference {size_of(figures.reference_kv_bytes_per_token)}"
    )
    return Group(escape(engine_line(figures.model, figures.engine)), table, saved)


def texts_of(folder: Path, num_tokens: int) -> list[list[int]]:
    """Return NUM_TEXTS texts that do not overlap, each as the first `num_tokens` token ids of the folder's tokenizer.

    Raises SettingsError when there is too little text for so many tokens.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    stride = len(text) // NUM_TEXTS
    if num_tokens * MAX_CHARACTERS_PER_TOKEN > stride:
        most = stride // MAX_CHARACTERS_PER_TOKEN - NEXT_TOKENS
        raise SettingsError(f"a context of {num_tokens - NEXT_TOKENS} tokens is more than the {most} of text")
    parts = [text[at : at + num_tokens * MAX_CHARACTERS_PER_TOKEN] for at in range(0, NUM_TEXTS * stride, stride)]
    texts = [tokenizer.encode(part).ids[:num_tokens] for part in parts]
    if any(len(token_ids) < num_tokens for token_ids in texts):
        raise SettingsError(f"a text gives fewer than {num_tokens} tokens with this tokenizer")
    return texts


def _load(folder: Path, settings: EngineSettings, context_tokens: int) -> Engine:
    blocks = -(-(context_tokens + NEXT_TOKENS) // settings.block_size)
    return load_engine(folder, settings, blocks * NUM_TEXTS)


def _see(engine: Engine, texts: Sequence[Sequence[int]]) -> _Seen:
    given = [token for step in _steps(engine, texts, is_given=True) for token in step]
    output = [token.token_id for step in _steps(engine, texts, is_given=False) for token in step]
    logprobs = [token.logprob for token in given if token.logprob is not None]
    return _Seen(logprobs, [token.top_logprobs[0][0] for token in given], output)


def _steps(engine: Engine, texts: Sequence[Sequence[int]], *, is_given: bool) -> Iterator[list[SampledToken]]:
    """Yield for each place behind the contexts the next token of every text.

    It is the text's own when `is_given`, else the likeliest.
    """
    start, blocks = len(texts[0]) - NEXT_TOKENS, engine.layout.num_blocks_for(len(texts[0]))
    requests = [Request(str(i), 0, list(text[:start]), start, _greedy()) for i, text in enumerate(texts)]
    owned = [range(i * blocks, (i + 1) * blocks) for i in range(len(texts))]
    for request, own in zip(requests, owned, strict=True):
        for first in range(0, start - 1, STEP_TOKENS):
            engine.step([Work(request, first, min(STEP_TOKENS, start - 1 - first), own)])
    for place in range(start, len(texts[0])):
        for request, text in zip(requests, texts, strict=True):
            request.sampling = _greedy(((text[place], CERTAIN_BIAS),), logprobs=1) if is_given else _greedy()
        tokens = engine.step([Work(each, place - 1, 1, own) for each, own in zip(requests, owned, strict=True)])
        for request, token in zip(requests, tokens, strict=True):
            request.token_ids.append(token.token_id)
        yield tokens


def _greedy(logit_bias: tuple[tuple[int, float], ...] = (), logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(
        max_tokens=NEXT_TOKENS, temperature=0, logit_bias=logit_bias, logprobs=logprobs, ignore_eos=True
    )


def _compare(context_tokens: int, ours: _Seen, reference: _Seen) -> ContextAccuracy:
    errors = [abs(one - other) for one, other in zip(ours.logprobs, reference.logprobs, strict=True)]
    num_tokens = len(errors)
    return ContextAccuracy(
        context_tokens=context_tokens,
        num_tokens=num_tokens,
        perplexity=math.exp(-sum(ours.logprobs) / num_tokens),
        reference_perplexity=math.exp(-sum(reference.logprobs) / num_tokens),
        same_likeliest=_share_of_equal(ours.likeliest, reference.likeliest),
        same_output=_share_of_equal(ours.output, reference.output),
        mean_error=sum(errors) / num_tokens,
        max_error=max(errors),
    )


def _share_of_equal(ours: Sequence[int], theirs: Sequence[int]) -> float:
    return sum(one == other for one, other in zip(ours, theirs, strict=True)) / len(ours)
