"""From what a client sends to the token ids of a prompt."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.doors.authentication import ASKER
from coordinator.doors.truncation import uncut_limit
from coordinator.doors.validation import Limits
from coordinator.text.chat_template import RenderOptions
from coordinator.text.tokenizer import Tokenizer, TokenLimit
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.reasons import DEADLINE_EXCEEDED


async def tokenize(tokenizer: Tokenizer, request: inference_pb2.GenerateRequest, limit: TokenLimit) -> list[int]:
    """The token ids of a request's input. Raises RequestError when there is no way to them, or are too many."""
    if request.HasField("text"):
        return await tokenizer.encode(request.text, limit)
    if request.HasField("chat"):
        return await _tokenize_chat(tokenizer, request.chat, limit)
    return list(request.tokenized.input_ids)


async def _tokenize_chat(tokenizer: Tokenizer, chat: inference_pb2.ChatInput, limit: TokenLimit) -> list[int]:
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
    return await tokenizer.encode_chat(messages, limit, options, ASKER.get())


async def tokenize_cut(
    tokenizer: Tokenizer, question: inference_pb2.GenerateRequest, most: int | None, limits: Limits
) -> list[int]:
    """The token ids of a text, or of a longer one the first so many, those that the tokenizer adds at its end among
    them. Raises RequestError as `tokenize` does."""
    token_ids = await tokenize(tokenizer, question, uncut_limit(question, limits))
    if most is None or len(token_ids) <= most:
        return token_ids
    num_last = min(most, tokenizer.num_end_tokens) if question.HasField("text") else 0
    return token_ids[: most - num_last] + token_ids[len(token_ids) - num_last :]


@asynccontextmanager
async def within(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Around what is made of a request's texts: raises RequestError when it, `what`, is not ready in time."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise RequestError(DEADLINE_EXCEEDED, f"{what} not ready within {timeout_s:g} s") from error
