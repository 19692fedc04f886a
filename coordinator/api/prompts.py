"""Turn the input of a request into the token ids of its prompt."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from coordinator.api.authentication import ASKER
from coordinator.api.validation import Limits, bad, check_count, prompt_limit
from coordinator.text.chat_template import RenderOptions
from coordinator.text.constraints import NO_LEEWAY, Leeway
from coordinator.text.tokenizer import Tokenizer, TokenLimit
from protos import inference_pb2
from protos.inference_pb2 import EmbedRequest, GenerateRequest, ScoreRequest
from serving_core.errors import RequestError
from serving_core.reasons import DEADLINE_EXCEEDED


def question_of(request: EmbedRequest | ScoreRequest) -> GenerateRequest:
    """Return a GenerateRequest with the fields that are set in this request and have the same name in both messages."""
    question = GenerateRequest()
    for field, value in request.ListFields():
        if field.name not in GenerateRequest.DESCRIPTOR.fields_by_name:
            continue
        if field.message_type is None:
            setattr(question, field.name, value)
        else:
            getattr(question, field.name).CopyFrom(value)
    return question


async def tokenize(tokenizer: Tokenizer, request: inference_pb2.GenerateRequest, limit: TokenLimit) -> list[int]:
    """Return the token ids of a request's text, chat or tokenized input.

    Raises RequestError when a chat cannot be rendered, or the input has more tokens than `limit`.
    """
    if request.HasField("text"):
        return await tokenizer.encode(request.text, limit)
    if request.HasField("chat"):
        return await _tokenize_chat(tokenizer, request.chat, limit)
    return list(request.tokenized.input_ids)


async def _tokenize_chat(tokenizer: Tokenizer, chat: inference_pb2.ChatInput, limit: TokenLimit) -> list[int]:
    messages, options = _conversation(chat)
    return await tokenizer.encode_chat(messages, limit, options, ASKER.get())


async def tokenize_around(
    tokenizer: Tokenizer, chat: inference_pb2.ChatInput, limit: TokenLimit
) -> tuple[list[int], str]:
    """Return the token ids of a conversation up to the end of its last message's content, and the text behind it.

    Raises RequestError when the chat template refuses the conversation or does not write that content exactly once, and
    when the input has more tokens than `limit`.
    """
    messages, options = _conversation(chat)
    return await tokenizer.encode_around(messages, limit, options, ASKER.get())


def _conversation(chat: inference_pb2.ChatInput) -> tuple[list[dict[str, Any]], RenderOptions]:
    messages = [
        {
            "role": message.role,
            "content": message.content,
            "content_parts": list(message.content_parts),
            "extra_json": message.extra_json,
        }
        for message in chat.messages
    ]
    options = RenderOptions(
        tools_json=chat.tools_json,
        template_kwargs_json=chat.template_kwargs_json,
        add_generation_prompt=chat.add_generation_prompt
        if chat.HasField("add_generation_prompt")
        else not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
    )
    return messages, options


async def tokenize_cut(
    tokenizer: Tokenizer, question: inference_pb2.GenerateRequest, most: int | None, limits: Limits
) -> list[int]:
    """Return the token ids of the input of `question`, truncated to the first `most`; None: not truncated.

    The tokens that the tokenizer appends to a text are kept at the end. Raises RequestError as `tokenize` does.
    """
    token_ids = await tokenize(tokenizer, question, uncut_limit(question, limits))
    if most is None or len(token_ids) <= most:
        return token_ids
    num_last = min(most, tokenizer.num_end_tokens) if question.HasField("text") else 0
    return token_ids[: most - num_last] + token_ids[len(token_ids) - num_last :]


@asynccontextmanager
async def within(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Limit the time of the block to `timeout_s`; after that, cancel the block and raise RequestError.

    `what` begins the error's message, followed by "not ready within ... s". The reason is DEADLINE_EXCEEDED.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise RequestError(DEADLINE_EXCEEDED, f"{what} not ready within {timeout_s:g} s") from error


# ---- Truncated prompts: the limit before truncation, and the tokens that are kept ----

MAX_UNCUT_TOKENS: Final = 2**17  # or max_model_len, if larger
WHAT_FITS: Final = -1


def check_truncation(request: GenerateRequest, limits: Limits) -> None:
    """Raise RequestError when truncate_prompt_tokens is no valid number, or a tokenized input is too long to truncate.

    Does nothing when the request asks for no truncation. For use before the prompt is tokenized.
    """
    if not request.HasField("truncate_prompt_tokens"):
        return
    most = request.truncate_prompt_tokens
    if most != WHAT_FITS and most < 1:
        raise bad("truncate_prompt_tokens", f"must be {WHAT_FITS} or at least 1, not {most}")
    check_count("tokenized.input_ids", len(request.tokenized.input_ids), _most_uncut(limits))


def uncut_limit(request: GenerateRequest, limits: Limits) -> TokenLimit:
    """Return the limit of the prompt's length before truncation, for the tokenizer; a prompt beyond it is refused."""
    if not request.HasField("truncate_prompt_tokens"):
        return prompt_limit(limits)
    most = _most_uncut(limits)
    return TokenLimit(
        most, lambda fewest: bad("input", f"has at least {fewest} tokens, the limit is {most} before it is cut")
    )


def cut(prompt: list[int], request: GenerateRequest, limits: Limits, *, keeps_first: bool = False) -> list[int]:
    """Return the prompt truncated as the request asks: its last tokens, or with `keeps_first` its first.

    Returned unchanged without a truncation, and when no length would leave room for output: a later check refuses it.
    """
    if not request.HasField("truncate_prompt_tokens"):
        return prompt
    most = request.truncate_prompt_tokens
    if most == WHAT_FITS:
        most = prompt_limit(limits, max(limits.min_output_tokens, request.sampling_params.max_tokens)).most
    if most <= 0:
        return prompt  # too long for the context; a later check refuses the prompt
    return prompt[:most] if keeps_first else prompt[-most:]


def _most_uncut(limits: Limits) -> int:
    return max(MAX_UNCUT_TOKENS, limits.max_model_len)


# ---- properties of a request that an API server sets and that have no field ----


@dataclass(frozen=True, slots=True)
class Terms:
    """Properties of one request that its message has no field for."""

    default_max_tokens: int | None = None  # replaces the model's own default
    num_prompts_behind: int = 0  # further prompts of the same call
    drops_answers: bool = False  # the outputs are not wanted, so that the prompt may fill the context
    keeps_first: bool = False  # truncation keeps the first tokens instead of the last
    leeway: Leeway = NO_LEEWAY


USUAL: Final = Terms()
