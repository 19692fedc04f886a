"""Logprobs as OpenAI's two endpoints write them, each in a way of its own."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from coordinator.text.detokenizer import Detokenizer
from protos.inference_pb2 import TokenLogprobs, TopLogprob

LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity

TokenBytes = Callable[[int], bytes]
"""The bytes that a token stands for."""


class TextOffsets:
    """Where each token of one answer begins in its text, in characters. Takes a detokenizer of its own."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._num_chars = 0

    def add(self, token_ids: Iterable[int]) -> list[int]:
        """The offsets of the next tokens; a token within a character begins where the character does."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            self._num_chars += len(self._detokenizer.add(token_id))
        return offsets


def chat_logprobs(items: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, Any]:
    """The logprobs of a chat completion's choice."""

    def entry(item: TokenLogprobs | TopLogprob) -> dict[str, Any]:
        of_token = token_bytes(item.token_id)
        text = of_token.decode(errors="replace")
        return {"token": text, "logprob": _logprob(item), "bytes": list(of_token)}

    content = [{**entry(item), "top_logprobs": [entry(top) for top in item.top]} for item in items]
    return {"content": content, "refusal": None}


def completion_logprobs(
    items: Sequence[TokenLogprobs], offsets: Sequence[int], token_bytes: TokenBytes
) -> dict[str, Any]:
    """The logprobs of a completion's choice. The most likely tokens are keys of an object: of two with the same text
    the more likely one stays. The sampled token is among them."""
    tokens = [_unique_text(token_bytes(item.token_id)) for item in items]
    top_logprobs = []
    for token, item in zip(tokens, items, strict=True):
        most_likely: dict[str, float] = {}
        for top in item.top:  # the most likely first
            most_likely.setdefault(_unique_text(token_bytes(top.token_id)), _logprob(top))
        most_likely.setdefault(token, _logprob(item))
        top_logprobs.append(most_likely)
    return {
        "tokens": tokens,
        "token_logprobs": [_logprob(item) for item in items],
        "top_logprobs": top_logprobs,
        "text_offset": list(offsets),
    }


def _unique_text(token_bytes: bytes) -> str:
    """The text of a token; for bytes that are no text, the bytes in OpenAI's spelling."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _logprob(item: TokenLogprobs | TopLogprob) -> float:
    return max(item.logprob, LEAST_LOGPROB)
