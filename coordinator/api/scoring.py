"""Plan Score requests: the prompts that one takes, and the logprobs of its labels from those of single tokens.

Each item is a prompt: the input, which all items share, then the item's own text. A node that only prefills returns
the logprobs of the next token there. For a label of several tokens, each of its beginnings is one more prompt.
"""

import asyncio
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.api.prompts import tokenize_around
from coordinator.api.validation import (
    Limits,
    RequestPlan,
    bad,
    check_count,
    check_prompt_length,
    check_token_ids,
    prompt_limit,
)
from coordinator.text.answers import TextOptions
from coordinator.text.reasoning import TAGS, Thoughts, thoughts_behind
from coordinator.text.tokenizer import Tokenizer, TokenLimit
from protos.inference_pb2 import Complete, LabelLogprobs, ScoreItem, ScoreRequest, ScoreResponse
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM
from serving_core.requests import LOGPROBS, Pooling, SamplingParams

Tokens = tuple[int, ...]

MAX_ITEMS: Final = 1024
MAX_LABELS: Final = 255  # OpenAI's limit of choices
MAX_LABEL_CHARS: Final = 64
MAX_PROMPT_TOKENS: Final = 2**23  # over all prompts of a call, each of which waits in whole until it is prefilled
SCORES: Final = Pooling(LOGPROBS)
CONTEXT_CHARS: Final = 64  # of an item, before a label that is to be tokenized


@dataclass(frozen=True, slots=True)
class Item:
    """An item as tokens: the end of its prompt, and its labels, which follow the prompt."""

    ending: Tokens
    labels: Sequence[Tokens]


def check_items(request: ScoreRequest) -> None:
    """Raise RequestError for items or labels whose number or length exceeds a limit, before any is tokenized."""
    if not request.items:
        raise bad("items", "is empty: at least one is needed")
    check_count("items", len(request.items), MAX_ITEMS)
    for index, item in enumerate(request.items):
        name = f"items[{index}].labels"
        check_count(name, len(item.labels), MAX_LABELS)
        if not item.labels:
            raise bad(name, "is empty: at least one is needed")
        if len(set(item.labels)) < len(item.labels):
            raise bad(name, "has the same text twice")
        for label in item.labels:
            if not 1 <= len(label) <= MAX_LABEL_CHARS:
                raise bad(name, f"must have 1 to {MAX_LABEL_CHARS} characters each, not {len(label)}")


async def tokenize_items(
    tokenizer: Tokenizer, request: ScoreRequest, limits: Limits, reasoning: str
) -> tuple[list[int], list[Item]]:
    """Return the token ids of the input that all items share, and the items.

    Input and items are tokenized apart: a prompt does not depend on the other items. `reasoning` is the format of the
    model's thoughts, with which a reply must not begin. Raises RequestError for too many tokens, and for a label that
    cannot be a reply's beginning.
    """
    limit = prompt_limit(limits)
    if request.HasField("chat"):
        prompt, tail = await tokenize_around(tokenizer, request.chat, limit)
        check_reply_begins(tail, reasoning)
    else:
        prompt, tail = await tokenizer.encode(request.text, limit), ""
        prompt = prompt[: len(prompt) - tokenizer.num_end_tokens]
    labels = _Labels(tokenizer, limit)
    items = []
    for index, item in enumerate(request.items):
        ending = await tokenizer.encode(item.text + tail, limit, add_special_tokens=False)
        context = tail or item.text[-CONTEXT_CHARS:]
        items.append(Item(tuple(ending), await labels.of(item, context, f"items[{index}].labels")))
        await asyncio.sleep(0)  # lets other calls run before the next item
    return prompt, items


def check_reply_begins(tail: str, reasoning: str) -> None:
    """Raise RequestError when a reply behind `tail`, the end of a prompt, begins with anything but a label.

    That is so within the model's thoughts and for a model whose replies begin with markup; `reasoning` is its format.
    """
    tags = TAGS[reasoning]
    if thoughts_behind(tail, reasoning) is Thoughts.BEGUN:
        problem = "ends in the model's thoughts: labels need a template that knows enable_thinking: false"
        raise bad("chat", problem)
    if tags.answer or tags.behind:
        message = f"replies of the model begin with markup ({reasoning}), so that no label can be one"
        raise RequestError(BAD_PARAM, message, field="model")


class _Labels:
    """Tokenize labels behind the end of a prompt, each once."""

    def __init__(self, tokenizer: Tokenizer, limit: TokenLimit) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._known: dict[tuple[str, str], Tokens] = {}

    async def of(self, item: ScoreItem, context: str, name: str) -> list[Tokens]:
        """Return the tokens of an item's labels. Raises RequestError when a label has none of its own."""
        labels = []
        for label in item.labels:
            tokens = self._known.get((context, label))
            if tokens is None:
                before, whole = [await self._encode(text) for text in (context, context + label)]
                tokens = tuple(whole[len(before) :])
                if whole[: len(before)] != before or not tokens:
                    raise bad(name, f"has {label[:80]!r}, which becomes one token with the end of the prompt")
                self._known[context, label] = tokens
            labels.append(tokens)
        if len(set(labels)) < len(labels):
            raise bad(name, "has two texts of the same tokens")
        return labels

    async def _encode(self, text: str) -> list[int]:
        return await self._tokenizer.encode(text, self._limit, add_special_tokens=False)


def plan_scores(
    request: ScoreRequest, prompt: list[int], items: Sequence[Item], limits: Limits, max_sequences: int
) -> RequestPlan:
    """Return the plan of a tokenized request, with one sequence for each prompt that it needs.

    That is one for each item, and one for each beginning of a label of several tokens. Raises RequestError for more
    than `max_sequences` prompts, too many tokens, or a token outside the vocabulary.
    """
    prompts: list[tuple[Tokens, Tokens]] = []
    for item in items:
        prompts += [(item.ending + before, tokens) for before, tokens in next_tokens(item).items()]
        if len(prompts) > max_sequences:
            what = f"take at least {len(prompts)} prompts with the beginnings of their labels"
            raise bad("items", f"{what}, the limit is {max_sequences} in flight")
    num_tokens = len(prompts) * len(prompt) + sum(len(ending) for ending, _ in prompts)
    if num_tokens > MAX_PROMPT_TOKENS:
        problem = f"take {len(prompts)} prompts of {num_tokens} tokens in all, the limit is {MAX_PROMPT_TOKENS}"
        raise bad("items", f"{problem}: send fewer at a time")
    check_token_ids("input", prompt, limits)
    for ending, tokens in prompts:
        if not prompt and not ending:
            raise bad("input", "is empty: a prompt needs at least one token")
        check_prompt_length(len(prompt) + len(ending), limits)
        check_token_ids("items", (*ending, *tokens), limits)
    return RequestPlan(
        request_id=request.request_id,
        prompt=prompt,
        cache_salt=request.cache_salt,
        samplings=tuple(
            SamplingParams(max_tokens=0, temperature=0.0, logprobs=0, logprob_token_ids=tokens) for _, tokens in prompts
        ),
        text=TextOptions(),
        adapter="" if request.model in limits.served_model_names else request.model,
        pooling=SCORES,
        endings=tuple(ending for ending, _ in prompts),
    )


def next_tokens(item: Item) -> dict[Tokens, Tokens]:
    """Return by each beginning of the item's labels the tokens that may follow there.

    The sum of a label's logprobs is that of each of its tokens behind the beginning before it.
    """
    found: dict[Tokens, dict[int, None]] = {}
    for label in item.labels:
        for index, token in enumerate(label):
            found.setdefault(label[:index], {})[token] = None
    return {before: tuple(tokens) for before, tokens in found.items()}


def response_of(
    request_id: str, plan: RequestPlan, items: Sequence[Item], completes: Sequence[Complete]
) -> ScoreResponse:
    """Return the response from the ends of all prompts of a plan, in its order: each label's logprob."""
    results = iter(completes)
    num_tokens = plan.num_prompt_tokens
    num_computed = sum(each.prompt_tokens - each.cached_tokens for each in completes)
    return ScoreResponse(
        request_id=request_id,
        items=[LabelLogprobs(logprobs=_logprobs(item, results)) for item in items],
        prompt_tokens=num_tokens,
        cached_tokens=max(0, num_tokens - num_computed),
        timeline=max((each.timeline for each in completes), key=lambda timeline: timeline.e2e_s),
    )


def _logprobs(item: Item, results: Iterator[Complete]) -> list[float]:
    """Return the logprob of each label of an item, whose results come next."""
    found: dict[Tokens, Mapping[int, float]] = {}
    for before, tokens in next_tokens(item).items():
        numbers = struct.unpack(f"<{len(tokens)}f", next(results).embedding)
        found[before] = dict(zip(tokens, numbers, strict=True))
    return [sum(found[label[:index]][token] for index, token in enumerate(label)) for label in item.labels]
