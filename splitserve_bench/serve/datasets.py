"""What the requests of a load are: prompts, most of random tokens, and how long the answers are."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Final

from splitserve_bench.errors import BenchError
from splitserve_bench.serve.records import PlannedRequest

SPECIAL_MARGIN_TOKENS: Final = 1024
MOST_IDS: Final = 2**22


@dataclass(frozen=True, slots=True)
class Shape:
    """A prompt, as token ids, and the length of its answer; both have at least one token. A prompt that is text is sent
    as such."""

    prompt: tuple[int, ...]
    output_tokens: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class FittedLoad:
    """A load none of whose requests is longer than the model takes, and how many had to be clipped for that."""

    shapes: tuple[Shape, ...]
    num_clipped: int


def random_load(
    num_requests: int,
    input_tokens: int,
    output_tokens: int,
    range_ratio: float,
    vocab_size: int,
    rng: Random,
    *,
    prefix_tokens: int = 0,
) -> list[Shape]:
    """Requests of random lengths, all lengths equally likely: from floor(n · (1 - range_ratio)) to
    ceil(n · (1 + range_ratio)), both included and at least 1, as in vLLM's `random` data set. range_ratio is in [0, 1).
    All prompts begin with the same prefix_tokens, which are not counted among input_tokens.
    """
    if not 0 <= range_ratio < 1:
        raise BenchError(f"the range ratio must be in [0, 1), not {range_ratio:g}")
    if input_tokens < 1 or output_tokens < 1:
        raise BenchError(f"prompts and answers have at least 1 token, not {min(input_tokens, output_tokens)}")
    ids = ordinary_ids(vocab_size)
    prefix = tuple(rng.choices(ids, k=prefix_tokens))
    shapes = []
    for _ in range(num_requests):
        prompt_length = _length(input_tokens, range_ratio, rng)
        answer_length = _length(output_tokens, range_ratio, rng)
        shapes.append(Shape((*prefix, *rng.choices(ids, k=prompt_length)), answer_length))
    return shapes


@lru_cache(maxsize=1)
def ordinary_ids(vocab_size: int) -> tuple[int, ...]:
    """Ids to draw prompts from. Special tokens are the first or the last ids of a vocabulary, so 1024 at either end are
    left out; of a small vocabulary only an eighth at either end. All prompts have these very ids, so that a token takes
    8 bytes and not 40."""
    if not 1 <= vocab_size <= MOST_IDS:
        raise BenchError(f"a vocabulary has 1 to {MOST_IDS} tokens, not {vocab_size}")
    margin = min(SPECIAL_MARGIN_TOKENS, vocab_size // 8)
    return tuple(range(margin, vocab_size - margin))


def fit(shapes: Iterable[Shape], max_model_len: int) -> FittedLoad:
    """Clips the requests that have more than max_model_len tokens, prompt and answer together, to exactly that many.

    The answer is shortened first, but to no less than half of max_model_len, then the end of the prompt is cut off;
    so the beginnings that prompts share stay shared. Text of which something is cut off is sent as token ids.
    """
    if max_model_len < 2:
        raise BenchError(f"a model of {max_model_len} tokens has no room for a prompt and an answer")
    before = tuple(shapes)
    after = tuple(_clipped(shape, max_model_len) for shape in before)
    return FittedLoad(after, sum(old is not new for old, new in zip(before, after, strict=True)))


def longer_share(lengths: Sequence[int], max_model_len: int) -> float:
    """The share of requests of these lengths, prompts and answers, that `fit` would clip."""
    return sum(length > max_model_len for length in lengths) / len(lengths)


def clipped_words(share: float, max_model_len: int | None) -> str:
    """What is told of that share; nothing of none, as where there is no limit."""
    return (
        f"{share:.1%} of the requests are longer than {max_model_len} tokens, and are clipped to that" if share else ""
    )


def plan(shapes: Sequence[Shape], send_at_s: Sequence[float], *, ignore_eos: bool = True) -> list[PlannedRequest]:
    """One planned request for each shape, to be sent at the time of the same index; the times are in order."""
    pairs = zip(shapes, send_at_s, strict=True)
    return [
        PlannedRequest(i, at_s, shape.prompt, shape.output_tokens, text=shape.text, ignore_eos=ignore_eos)
        for i, (shape, at_s) in enumerate(pairs)
    ]


def _length(mean: int, range_ratio: float, rng: Random) -> int:
    least, most = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
    return rng.randint(max(1, least), most)


def _clipped(shape: Shape, max_model_len: int) -> Shape:
    """The very same shape when it fits."""
    prompt_tokens = len(shape.prompt)
    if prompt_tokens + shape.output_tokens <= max_model_len:
        return shape
    output_tokens = min(shape.output_tokens, max(max_model_len - prompt_tokens, max_model_len // 2))
    kept = shape.prompt[: max_model_len - output_tokens]
    return Shape(kept, output_tokens, shape.text if len(kept) == prompt_tokens else "")
