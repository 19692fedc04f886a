"""Logprobs as OpenAI's two endpoints write them, each in a way of its own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.text.detokenizer import Detokenizer
from protos.inference_pb2 import TokenLogprobs, TopLogprob

LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity

TokenBytes = Callable[[int], bytes]
"""The bytes that a token stands for."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """What tokens are called: by their text, or where that was asked for by their ids."""

    token_bytes: TokenBytes
    as_ids: bool = False

    def text(self, token_id: int) -> str:
        """Bytes that are no text become U+FFFD."""
        return _id_text(token_id) if self.as_ids else self.token_bytes(token_id).decode(errors="replace")

    def unique_text(self, token_id: int) -> str:
        """For bytes that are no text, the bytes in OpenAI's spelling."""
        if self.as_ids:
            return _id_text(token_id)
        token_bytes = self.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class TextOffsets:
    """Where each token of one answer begins in its text, in characters. Takes a detokenizer of its own; before the
    answer there may be characters."""

    def __init__(self, detokenizer: Detokenizer, num_chars: int = 0) -> None:
        self._detokenizer = detokenizer
        self._num_chars = num_chars

    def add(self, token_ids: Iterable[int]) -> list[int]:
        """The offsets of the next tokens; a token within a character begins where the character does."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars + self._detokenizer.num_chars_before(token_id))
            self._num_chars += len(self._detokenizer.add(token_id))
        return offsets


def chat_logprobs(items: Sequence[TokenLogprobs], names: TokenNames, *, tells_sampled: bool) -> dict[str, Any]:
    """The logprobs of a chat completion's choice. With `tells_sampled` the top_logprobs have the sampled token too,
    where those of named tokens were asked for instead of the most likely ones'."""

    def entry(item: TokenLogprobs | TopLogprob) -> dict[str, Any]:
        of_token = list(names.token_bytes(item.token_id))
        return {"token": names.text(item.token_id), "logprob": _logprob(item), "bytes": of_token}

    def listed(item: TokenLogprobs) -> list[TokenLogprobs | TopLogprob]:
        if not tells_sampled or any(top.token_id == item.token_id for top in item.top):
            return [*item.top]
        return sorted([*item.top, item], key=lambda each: -each.logprob)

    content = [{**entry(item), "top_logprobs": [entry(each) for each in listed(item)]} for item in items]
    return {"content": content, "refusal": None}


def completion_logprobs(
    items: Sequence[TokenLogprobs], offsets: Sequence[int], names: TokenNames, unscored: Sequence[int] = ()
) -> dict[str, Any]:
    """The logprobs of a completion's choice. The most likely tokens are keys of an object: of two with the same text
    the more likely one stays. The sampled token is among them. Before the items come tokens that have none."""
    first = [names.unique_text(token_id) for token_id in unscored]
    tokens = [names.unique_text(item.token_id) for item in items]
    top_logprobs: list[dict[str, float] | None] = [None for _ in first]
    for token, item in zip(tokens, items, strict=True):
        most_likely: dict[str, float] = {}
        for top in item.top:  # the most likely first
            most_likely.setdefault(names.unique_text(top.token_id), _logprob(top))
        most_likely.setdefault(token, _logprob(item))
        top_logprobs.append(most_likely)
    return {
        "tokens": first + tokens,
        "token_logprobs": [*(None for _ in first), *map(_logprob, items)],
        "top_logprobs": top_logprobs,
        "text_offset": list(offsets),
    }


def prompt_logprobs(scores: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """The logprobs of a prompt as vLLM writes them: for each token an object of it and of the most likely ones there,
    by their ids; null for the first. The rank of a token that is not among these is not known."""

    def entry(item: TokenLogprobs | TopLogprob, rank: int | None) -> dict[str, Any]:
        text = token_bytes(item.token_id).decode(errors="replace")
        return {"logprob": _logprob(item), "rank": rank, "decoded_token": text}

    listed: list[dict[str, Any] | None] = [None]
    for score in scores:
        entries = {str(top.token_id): entry(top, rank) for rank, top in enumerate(score.top, start=1)}
        listed.append({str(score.token_id): entry(score, None)} | entries)
    return listed


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _logprob(item: TokenLogprobs | TopLogprob) -> float:
    return max(item.logprob, LEAST_LOGPROB)
