"""What a smaller KV cache costs in accuracy: the same text, answered with the KV in the compute dtype and in others.

The reference continues each text with its likeliest tokens. The others are given the same text and the same tokens of
the reference one by one, so that every position can be compared, and each is also left to continue by itself. Text is
what Python's own help says. Figures are of one engine in this process; nothing else is started.
"""

import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tokenizers import Tokenizer

from serving_core.errors import SettingsError
from serving_core.requests import Request, SampledToken, SamplingParams, Work
from serving_core.settings import EngineSettings

if TYPE_CHECKING:
    from engine.engine import Engine  # imports torch, which commands that measure nothing can do without

NUM_ANSWERS: Final = 4
OUTPUT_TOKENS: Final = 64
CHUNK_TOKENS: Final = 512
CHARACTERS_PER_TOKEN: Final = 12  # more than any tokenizer makes of English
NUM_LOGPROBS: Final = 20
REFERENCE: Final = "auto"


@dataclass(frozen=True, slots=True)
class KVAccuracy:
    """One KV dtype at one context against the reference, over num_tokens answer tokens.

    Errors are of the natural logarithms of the probabilities of the tokens that are among the likeliest of both, given
    the same tokens before.
    """

    kv_cache_dtype: str
    context_tokens: int
    num_tokens: int
    same_choice: float  # share of positions with the same likeliest token, given the same tokens before
    same_answer: float  # share of positions with the same token when left alone
    mean_error: float
    largest_error: float
    kv_bytes_per_token: int


def measure_accuracy(
    folder: Path,
    dtypes: Sequence[str],
    contexts: Sequence[int],
    report: Callable[[str], None],
    num_answers: int = NUM_ANSWERS,
) -> list[KVAccuracy]:
    """A row for each dtype (values of --kv-cache-dtype) and context, in order, over num_answers texts each.

    Raises SettingsError when the model or the text is too short for a context, ModelError when the model cannot be
    loaded.
    """
    prompts = {context: _prompts(folder, context, num_answers) for context in contexts}
    engine = _engine(folder, REFERENCE, contexts)
    report(f"answers with the KV cache in {engine.layout.dtype}")
    expected = {context: [_answer(engine, prompt) for prompt in prompts[context]] for context in contexts}
    rows = []
    for dtype in dtypes:
        del engine  # before the next takes its memory
        engine = _engine(folder, dtype, contexts)
        for context in contexts:
            report(f"answers with the KV cache in {engine.layout.dtype}, {context} tokens of context")
            rows.append(_compare(engine, context, prompts[context], expected[context]))
    return rows


def _engine(folder: Path, dtype: str, contexts: Sequence[int]) -> "Engine":
    from engine.engine import Engine

    settings = EngineSettings(model=str(folder), kv_cache_dtype=dtype)
    num_tokens = max(contexts) + OUTPUT_TOKENS
    num_blocks = -(-num_tokens // settings.block_size)
    return Engine(
        EngineSettings(model=str(folder), kv_cache_dtype=dtype, num_kv_blocks=num_blocks, max_model_len=num_tokens)
    )


def _prompts(folder: Path, num_tokens: int, num_prompts: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    stride = len(text) // num_prompts
    if num_tokens * CHARACTERS_PER_TOKEN > stride:
        raise SettingsError(
            f"a context of {num_tokens} tokens is more than the {stride // CHARACTERS_PER_TOKEN} of text"
        )
    prompts = []
    for start in range(0, num_prompts * stride, stride):
        token_ids = tokenizer.encode(text[start : start + num_tokens * CHARACTERS_PER_TOKEN]).ids[:num_tokens]
        if len(token_ids) < num_tokens:
            raise SettingsError(f"the text gives {len(token_ids)} tokens with this tokenizer, not {num_tokens}")
        prompts.append(token_ids)
    return prompts


def _answer(engine: "Engine", prompt: Sequence[int], given: Sequence[int] = ()) -> list[SampledToken]:
    """The likeliest token at each position of the answer; continued with `given` where there are any, else with it."""
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
    request = Request("text", 0, list(prompt), len(prompt), sampling)
    blocks = range(engine.num_blocks)
    for start in range(0, len(prompt), CHUNK_TOKENS):
        tokens = engine.step([Work(request, start, min(CHUNK_TOKENS, len(prompt) - start), blocks)])
    answer = list(tokens)
    while len(answer) < OUTPUT_TOKENS:
        position = len(answer) - 1
        request.token_ids.append(given[position] if given else answer[-1].token_id)
        answer += engine.step([Work(request, len(request.token_ids) - 1, 1, blocks)])
    return answer


def _compare(
    engine: "Engine", context: int, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[SampledToken]]
) -> KVAccuracy:
    same_choice = same_answer = 0
    errors: list[float] = []
    for prompt, reference in zip(prompts, expected, strict=True):
        token_ids = [token.token_id for token in reference]
        led = _answer(engine, prompt, token_ids)
        alone = led if [token.token_id for token in led] == token_ids else _answer(engine, prompt)
        same_choice += sum(ours.token_id == token_id for ours, token_id in zip(led, token_ids, strict=True))
        same_answer += sum(ours.token_id == token_id for ours, token_id in zip(alone, token_ids, strict=True))
        for ours, theirs in zip(led, reference, strict=True):
            errors += _errors(ours, theirs)
    num_tokens = len(prompts) * OUTPUT_TOKENS
    return KVAccuracy(
        kv_cache_dtype=engine.layout.dtype,
        context_tokens=context,
        num_tokens=num_tokens,
        same_choice=same_choice / num_tokens,
        same_answer=same_answer / num_tokens,
        mean_error=sum(errors) / len(errors),
        largest_error=max(errors),
        kv_bytes_per_token=engine.model_layout.token_bytes,
    )


def _errors(ours: SampledToken, theirs: SampledToken) -> list[float]:
    """Of the tokens that are among the likeliest of both."""
    known = dict(ours.top_logprobs)
    return [abs(known[token] - logprob) for token, logprob in theirs.top_logprobs if token in known]
