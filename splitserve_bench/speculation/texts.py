"""What is asked of a model to see how much of its answers a look at the text foretells. The texts are Python's own: its
library, and what its help says."""

import asyncio
import calendar
import fractions
import heapq
import inspect
import pydoc_data.topics
import shlex
import statistics
import textwrap
from pathlib import Path
from random import Random
from typing import Any, Final

from coordinator.text.tokenizer import TokenLimit, read_tokenizer
from serving_core.errors import RequestError
from serving_core.model_config import read_model_config
from serving_core.reasons import PROMPT_TOO_LONG
from serving_core.requests import SamplingParams

EDIT, SUMMARY, CHAT, RANDOM = "code edit", "summary with quotes", "chat", "random"
KINDS: Final = (EDIT, SUMMARY, CHAT, RANDOM)
MODULES: Final = (textwrap, heapq, statistics, fractions, calendar, shlex)
CODE_CHARS: Final = (400, 1400)
TEXT_CHARS: Final = 1500
RANDOM_TOKENS: Final = 300
LIMIT: Final = TokenLimit(2**20, lambda num: RequestError(PROMPT_TOO_LONG, f"the text has {num} tokens"))
SUBJECTS: Final = (
    *("the sea", "a bicycle", "bread", "the moon", "a library", "rain", "a violin", "the heart"),
    *("a volcano", "chess", "honey", "a glacier", "paper", "the wind", "a lighthouse", "copper"),
)


def prompts_of(kind: str, folder: Path, count: int) -> list[list[int]]:
    """So many prompts of a kind for the model of a folder, the same ones in every run. Raises RequestError where the
    model has no chat template."""
    if kind == RANDOM:
        draw, vocab_size = Random(0), read_model_config(folder).vocab_size
        return [draw.choices(range(vocab_size), k=RANDOM_TOKENS) for _ in range(count)]
    texts = {EDIT: _edits, SUMMARY: _summaries, CHAT: _questions}[kind]()
    tokenizer = read_tokenizer(folder)

    async def encode() -> list[list[int]]:
        messages = [[{"role": "user", "content": texts[index % len(texts)]}] for index in range(count)]
        return [await tokenizer.encode_chat(each, LIMIT) for each in messages]

    return asyncio.run(encode())


def sampling_of(kind: str, max_tokens: int) -> SamplingParams:
    """What is random is so in its answers, too."""
    return SamplingParams(max_tokens=max_tokens, temperature=float(kind == RANDOM), ignore_eos=kind == RANDOM)


def _edits() -> list[str]:
    ask = "Write this code again with a comment at its top. Change nothing else.\n\n```python\n{}\n```"
    return [ask.format(source) for module in MODULES for source in _functions(module)]


def _functions(module: Any) -> list[str]:
    """The source of each of a module's functions that is neither short nor long."""
    found = [inspect.getsource(each) for _, each in inspect.getmembers(module, inspect.isfunction)]
    return [source for source in found if CODE_CHARS[0] <= len(source) <= CODE_CHARS[1]]


def _summaries() -> list[str]:
    ask = "Sum this text up in its own words: quote its three most important sentences.\n\n{}"
    texts = [text.strip() for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > TEXT_CHARS]
    return [ask.format(text[:TEXT_CHARS]) for text in texts]


def _questions() -> list[str]:
    return [f"What is special about {subject}? Answer in a few sentences." for subject in SUBJECTS]
