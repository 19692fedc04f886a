"""What quantized weights cost in accuracy: the same text as models with and without them see it.

Every engine is given a text token by token and asked how likely the token that comes next is; and it continues the
beginnings of the texts by itself. Text is what Python's own help says. Figures are of one engine at a time in this
process; nothing else is started.
"""

import math
import pydoc_data.topics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tokenizers import Tokenizer

from serving_core.errors import SettingsError
from serving_core.requests import Request, SampledToken, SamplingParams, Work
from serving_core.settings import EngineSettings

if TYPE_CHECKING:
    from engine.engine import Engine  # imports torch, which commands that measure nothing can do without

NUM_TEXTS: Final = 8
START_TOKENS: Final = 64
NEXT_TOKENS: Final = 64
CHARACTERS_PER_TOKEN: Final = 12  # more than any tokenizer makes of English
REFERENCE: Final = "none"
_CERTAIN: Final = 1e9  # as a bias it makes a token the likeliest; logprobs are those before it


@dataclass(frozen=True, slots=True)
class WeightsAccuracy:
    """One value of --quantization against `none`, over num_tokens tokens.

    Errors are of the natural logarithms of the probabilities of the text's tokens.
    """

    quantization: str
    num_tokens: int
    perplexity: float
    same_choice: float  # share of positions in the text with the same likeliest token
    same_answer: float  # share of positions with the same token when left alone
    mean_error: float
    largest_error: float
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one engine makes of the texts, in order."""

    logprobs: list[float]  # of each next token of the texts
    choices: list[int]
    answers: list[int]
    weight_bytes: int


def measure_weights_accuracy(
    folder: Path, quantizations: Sequence[str], report: Callable[[str], None], num_texts: int = NUM_TEXTS
) -> list[WeightsAccuracy]:
    """A row for `none` and one for each value of --quantization, in order, over num_texts texts.

    Raises SettingsError when the text is too short or the model cannot be quantized, ModelError when it cannot be
    loaded.
    """
    texts = texts_of(folder, num_texts)
    report("weights as they are")
    reference = _see(folder, REFERENCE, texts)
    rows = [_compare(REFERENCE, reference, reference)]
    for quantization in quantizations:
        report(f"weights in {quantization}")
        rows.append(_compare(quantization, _see(folder, quantization, texts), reference))
    return rows


def texts_of(folder: Path, num_texts: int) -> list[list[int]]:
    """Return the token ids of texts that do not overlap. Raises SettingsError where there is too little text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    num_tokens, stride = START_TOKENS + NEXT_TOKENS, len(text) // num_texts
    if num_tokens * CHARACTERS_PER_TOKEN > stride:
        raise SettingsError(f"there is text for {len(text) // num_tokens // CHARACTERS_PER_TOKEN}, not {num_texts}")
    starts = range(0, num_texts * stride, stride)
    texts = [tokenizer.encode(text[at : at + num_tokens * CHARACTERS_PER_TOKEN]).ids[:num_tokens] for at in starts]
    if any(len(token_ids) < num_tokens for token_ids in texts):
        raise SettingsError(f"a text gives fewer than {num_tokens} tokens with this tokenizer")
    return texts


def _see(folder: Path, quantization: str, texts: Sequence[Sequence[int]]) -> _Seen:
    from engine.engine import Engine

    num_tokens = START_TOKENS + NEXT_TOKENS
    blocks_per_text = -(-num_tokens // EngineSettings().block_size)
    engine = Engine(
        EngineSettings(
            model=str(folder),
            quantization=quantization,
            max_model_len=num_tokens,
            num_kv_blocks=blocks_per_text * len(texts),
        )
    )
    read = [token for step in _steps(engine, texts, blocks_per_text, given=True) for token in step]
    answers = [token.token_id for step in _steps(engine, texts, blocks_per_text, given=False) for token in step]
    logprobs = [token.logprob for token in read if token.logprob is not None]
    return _Seen(logprobs, [token.top_logprobs[0][0] for token in read], answers, engine.weight_bytes)


def _steps(
    engine: "Engine", texts: Sequence[Sequence[int]], blocks_per_text: int, given: bool
) -> Iterator[list[SampledToken]]:
    """After the beginnings one token of each text a step: the text's own when it is given, else the likeliest."""
    requests = [Request(str(i), 0, list(text[:START_TOKENS]), START_TOKENS, _greedy()) for i, text in enumerate(texts)]
    blocks = [range(i * blocks_per_text, (i + 1) * blocks_per_text) for i in range(len(texts))]
    for place in range(START_TOKENS, START_TOKENS + NEXT_TOKENS):
        works = []
        for request, text, own in zip(requests, texts, blocks, strict=True):
            start = 0 if place == START_TOKENS else place - 1
            if given:
                request.sampling = _greedy(logit_bias=((text[place], _CERTAIN),), logprobs=1)
            works.append(Work(request, start, place - start, own))
        tokens = engine.step(works)
        for request, token in zip(requests, tokens, strict=True):
            request.token_ids.append(token.token_id)
        yield tokens


def _greedy(logit_bias: tuple[tuple[int, float], ...] = (), logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(
        max_tokens=NEXT_TOKENS, temperature=0, logit_bias=logit_bias, logprobs=logprobs, ignore_eos=True
    )


def _compare(quantization: str, ours: _Seen, reference: _Seen) -> WeightsAccuracy:
    errors = [abs(one - other) for one, other in zip(ours.logprobs, reference.logprobs, strict=True)]
    return WeightsAccuracy(
        quantization=quantization,
        num_tokens=len(ours.logprobs),
        perplexity=math.exp(-sum(ours.logprobs) / len(ours.logprobs)),
        same_choice=_share_of_equal(ours.choices, reference.choices),
        same_answer=_share_of_equal(ours.answers, reference.answers),
        mean_error=sum(errors) / len(errors),
        largest_error=max(errors),
        weight_bytes=ours.weight_bytes,
    )


def _share_of_equal(ours: Sequence[int], theirs: Sequence[int]) -> float:
    return sum(one == other for one, other in zip(ours, theirs, strict=True)) / len(ours)
