"""Serve /v1/embeddings: one request for each input, and the response. An input that fails fails the call."""

import base64
import json
import struct
from collections.abc import Sequence
from typing import Final

from coordinator.api.http.errors import renamed
from coordinator.api.http.several import each_of
from coordinator.api.preprocess import Preprocessor
from coordinator.api.validation import bad
from protos.inference_pb2 import Complete, EmbedRequest
from serving_core.errors import RequestError

FLOAT, BASE64 = "float", "base64"
FLOAT_BYTES: Final = 4
MAX_NUMBERS: Final = 2**21  # serialized as text, of about 20 bytes each


async def embed_all(preprocessor: Preprocessor, requests: Sequence[EmbedRequest]) -> list[Complete]:
    """Return the Complete messages, with the embeddings, of all inputs in order. Raises RequestError."""

    def named(error: RequestError, index: int) -> RequestError:
        name = "input" if len(requests) == 1 else f"input[{index}]"
        return renamed(error, dict.fromkeys(("text", "tokenized.input_ids", "input"), name))

    return await each_of(preprocessor, requests, preprocessor.embed, named)


def check_size(num: int, size: int, encoding: str) -> None:
    """Raise RequestError when `num` vectors of `size` dimensions are too large to be serialized as text."""
    if encoding == FLOAT and num * size > MAX_NUMBERS:
        too_many = f"{FLOAT} of {num * size} numbers is over the limit of {MAX_NUMBERS}"
        raise bad("encoding_format", f"{too_many}: ask for {BASE64}, or for fewer inputs")


def response_body(embeddings: Sequence[Complete], encoding: str, model: str) -> bytes:
    """Return the response in OpenAI's format."""
    items = [
        {"object": "embedding", "index": index, "embedding": _written(complete.embedding, encoding)}
        for index, complete in enumerate(embeddings)
    ]
    num_tokens = sum(complete.prompt_tokens for complete in embeddings)
    num_cached = sum(complete.cached_tokens for complete in embeddings)
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
