"""Serve /v1/embeddings: one request for each input, and the response. An input that fails fails the call."""

import asyncio
import base64
import json
import struct
import time
from collections.abc import Sequence
from typing import Final

from coordinator.api.http.errors import renamed
from coordinator.api.preprocess import Embedding, Preprocessor
from coordinator.api.validation import bad
from protos.inference_pb2 import EmbedRequest
from serving_core.errors import RequestError

FLOAT, BASE64 = "float", "base64"
FLOAT_BYTES: Final = 4
MAX_AT_ONCE: Final = 64  # of one call; a node queues at most --max-num-queued requests of all calls
MAX_NUMBERS: Final = 2**21  # serialized as text, of about 20 bytes each


async def embed_all(preprocessor: Preprocessor, requests: Sequence[EmbedRequest]) -> list[Embedding]:
    """Return the embeddings of all inputs in order.

    Raises the RequestError of the first input that fails, and cancels the others.
    """
    ends_s = time.monotonic() + preprocessor.request_timeout_s
    found: dict[int, Embedding] = {}
    left = iter(enumerate(requests))

    async def work() -> None:
        for index, request in left:
            try:
                found[index] = await preprocessor.embed(request, ends_s - time.monotonic())
            except RequestError as error:
                raise _named(error, index, len(requests)) from error

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(MAX_AT_ONCE, preprocessor.max_sequences, len(requests))):
                group.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [found[index] for index in range(len(requests))]


def _named(error: RequestError, index: int, num: int) -> RequestError:
    name = "input" if num == 1 else f"input[{index}]"
    return renamed(error, dict.fromkeys(("text", "tokenized.input_ids", "input"), name))


def check_size(num: int, size: int, encoding: str) -> None:
    """Raise RequestError when `num` vectors of `size` dimensions are too large to be serialized as text."""
    if encoding == FLOAT and num * size > MAX_NUMBERS:
        too_many = f"{FLOAT} of {num * size} numbers is over the limit of {MAX_NUMBERS}"
        raise bad("encoding_format", f"{too_many}: ask for {BASE64}, or for fewer inputs")


def response_body(embeddings: Sequence[Embedding], encoding: str, model: str) -> bytes:
    """Return the response in OpenAI's format."""
    items = [
        {"object": "embedding", "index": index, "embedding": _written(embedding.vector, encoding)}
        for index, embedding in enumerate(embeddings)
    ]
    num_tokens = sum(embedding.complete.prompt_tokens for embedding in embeddings)
    num_cached = sum(embedding.complete.cached_tokens for embedding in embeddings)
    usage = {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    # Serialized item by item, so that other threads run in between.
    data = ",".join(json.dumps(item, separators=(",", ":")) for item in items)
    rest = json.dumps({"model": model, "usage": usage})
    return f'{{"object":"list","data":[{data}],{rest[1:]}'.encode()


def _written(vector: bytes, encoding: str) -> str | tuple[float, ...]:
    if encoding == BASE64:
        return base64.b64encode(vector).decode()
    return struct.unpack(f"<{len(vector) // FLOAT_BYTES}f", vector)
