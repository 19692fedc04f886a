"""Prompts that their clients let the server cut: how long they may be before, and what is left of them."""

from typing import Final

from coordinator.doors.validation import Limits, bad, check_count, prompt_limit
from coordinator.text.tokenizer import TokenLimit
from protos.inference_pb2 import GenerateRequest

MAX_UNCUT_TOKENS: Final = 2**17  # or what the context holds, if that is more
WHAT_FITS: Final = -1


def check_truncation(request: GenerateRequest, limits: Limits) -> None:
    """Checks what can be told before the prompt is tokenized. Raises RequestError."""
    if not request.HasField("truncate_prompt_tokens"):
        return
    most = request.truncate_prompt_tokens
    if most != WHAT_FITS and most < 1:
        raise bad("truncate_prompt_tokens", f"must be {WHAT_FITS} or at least 1, not {most}")
    check_count("tokenized.input_ids", len(request.tokenized.input_ids), _most_uncut(limits))


def uncut_limit(request: GenerateRequest, limits: Limits) -> TokenLimit:
    """How long the prompt of a request may be as it comes."""
    if not request.HasField("truncate_prompt_tokens"):
        return prompt_limit(limits)
    most = _most_uncut(limits)
    return TokenLimit(
        most, lambda fewest: bad("input", f"has at least {fewest} tokens, the limit is {most} before it is cut")
    )


def cut(prompt: list[int], request: GenerateRequest, limits: Limits, *, keeps_first: bool = False) -> list[int]:
    """Return what the request asks to keep of its prompt: the last tokens, or the first."""
    if not request.HasField("truncate_prompt_tokens"):
        return prompt
    most = request.truncate_prompt_tokens
    if most == WHAT_FITS:
        most = prompt_limit(limits, max(limits.least_answer_tokens, request.sampling_params.max_tokens)).most
    if most <= 0:
        return prompt  # for which there is no room, as will be said
    return prompt[:most] if keeps_first else prompt[-most:]


def _most_uncut(limits: Limits) -> int:
    return max(MAX_UNCUT_TOKENS, limits.max_model_len)
