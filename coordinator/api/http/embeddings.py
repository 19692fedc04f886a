"""Translate /v1/embeddings: OpenAI's JSON to one request for each input, and back. An input that fails fails the
call."""

import asyncio
import base64
import json
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.api.http.errors import renamed
from coordinator.api.http.fields import Fields
from coordinator.api.http.known_fields import EMBEDDINGS, settle
from coordinator.api.http.requests import ids_of
from coordinator.api.preprocess import Embedding, Preprocessor
from coordinator.api.validation import bad
from protos.inference_pb2 import EmbedRequest, TokenizedInput
from serving_core.errors import RequestError

FLOAT, BASE64 = "float", "base64"
FLOAT_BYTES: Final = 4
MAX_INPUTS: Final = 2048  # OpenAI's
MAX_AT_ONCE: Final = 64  # of one call; a node queues at most --max-num-queued requests of all calls
MAX_NUMBERS: Final = 2**21  # serialized as text, of about 20 bytes each


@dataclass(frozen=True, slots=True)
class AskedEmbeddings:
    """One call: a request for each input, and the encoding of the vectors."""

    requests: tuple[EmbedRequest, ...]
    encoding: str

    @property
    def model(self) -> str:
        return self.requests[0].model


def parse_embeddings(fields: Fields, request_id: str) -> AskedEmbeddings:
    """Parse a call of /v1/embeddings. Raises RequestError."""
    settle(fields, EMBEDDINGS)
    inputs = _inputs(fields)
    encoding = fields.text("encoding_format") or FLOAT
    if encoding not in (FLOAT, BASE64):
        raise fields.error("encoding_format", f"{FLOAT} or {BASE64}")
    same: dict[str, Any] = {
        "model": fields.text("model") or "",
        "cache_salt": fields.text("cache_salt") or "",
        "priority": fields.integer("priority"),
        "truncate_prompt_tokens": fields.integer("truncate_prompt_tokens"),
        "dimensions": fields.integer("dimensions", (0, 2**31 - 1)),
        "normalize": fields.boolean("normalize"),
    }
    ids = ids_of(request_id, len(inputs))
    requests = [EmbedRequest(request_id=each, **same, **given) for each, given in zip(ids, inputs, strict=True)]
    return AskedEmbeddings(tuple(requests), encoding)


def _inputs(fields: Fields) -> list[dict[str, Any]]:
    """Return the inputs: a string, token ids, or a list of either."""
    value = fields.raw("input")
    is_list = isinstance(value, list) and bool(value)
    if is_list and isinstance(value[0], list | str) and len(value) > MAX_INPUTS:
        raise fields.problem("input", f"has {len(value)} entries, the limit is {MAX_INPUTS}")
    if is_list and isinstance(value[0], list):
        lists = [each.integers("") for each in fields.lists("input", MAX_INPUTS)]
        return [{"tokenized": TokenizedInput(input_ids=token_ids)} for token_ids in lists]
    if is_list and not isinstance(value[0], str):
        return [{"tokenized": TokenizedInput(input_ids=fields.integers("input"))}]
    texts = fields.texts("input", MAX_INPUTS)
    if not texts:
        raise fields.problem("input", "is missing or empty: send a string, token ids, or a list of either")
    return [{"text": text} for text in texts]


async def embed_all(preprocessor: Preprocessor, asked: AskedEmbeddings) -> list[Embedding]:
    """Return the embeddings of all inputs in order.

    Raises the RequestError of the first input that fails, and cancels the others.
    """
    ends_s = time.monotonic() + preprocessor.request_timeout_s
    found: dict[int, Embedding] = {}
    left = iter(enumerate(asked.requests))

    async def work() -> None:
        for index, request in left:
            try:
                found[index] = await preprocessor.embed(request, ends_s - time.monotonic())
            except RequestError as error:
                raise _named(error, index, asked) from error

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(MAX_AT_ONCE, preprocessor.max_answers, len(asked.requests))):
                group.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [found[index] for index in range(len(asked.requests))]


def _named(error: RequestError, index: int, asked: AskedEmbeddings) -> RequestError:
    name = "input" if len(asked.requests) == 1 else f"input[{index}]"
    return renamed(error, dict.fromkeys(("text", "tokenized.input_ids", "input"), name))


def check_size(asked: AskedEmbeddings, size: int) -> None:
    """Raise RequestError when the vectors, of `size` dimensions by default, are too large to be serialized as text."""
    numbers = len(asked.requests) * (asked.requests[0].dimensions or size)
    if asked.encoding == FLOAT and numbers > MAX_NUMBERS:
        too_many = f"{FLOAT} of {numbers} numbers is over the limit of {MAX_NUMBERS}"
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
