"""Turn requests into vLLM's sampling parameters, and vLLM's outputs into tokens. Imports no vLLM."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.requests import FinishReason, Request, SampledToken

TRANSFER: Final = "kv_transfer_params"
"""The key under which vLLM hands a request's parameters to its KV connector."""


def sampling_fields(request: Request, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for what is left of a request.

    An output that an earlier attempt has begun is part of the prompt here. Raises RequestError, with BAD_PARAM, for
    what vLLM does not do or does otherwise.
    """
    sampling = request.sampling
    _check(request)
    stop_token_ids = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)]
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "seed": sampling.seed if sampling.temperature else None,
        "max_tokens": sampling.max_tokens - request.num_output_tokens,
        "min_tokens": max(0, sampling.min_tokens - request.num_output_tokens),
        "stop_token_ids": stop_token_ids,
        "ignore_eos": True,  # the ids are among the others: vLLM has no tokenizer that would tell it
        "logprobs": sampling.logprobs,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "detokenize": False,
    }


def _check(request: Request) -> None:
    sampling = request.sampling
    refused = {
        "embeddings and scores": request.pooling is not None,
        "LoRA adapters": bool(request.adapter),
        "structured output": bool(sampling.grammar),
        "bad_words": bool(sampling.bad_tokens),
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "logprob_token_ids": bool(sampling.logprob_token_ids),
        "frequency_penalty and presence_penalty for an output that a lost node has begun": bool(
            request.num_output_tokens and (sampling.frequency_penalty or sampling.presence_penalty)
        ),
    }
    if names := [name for name, is_asked in refused.items() if is_asked]:
        raise RequestError(reasons.BAD_PARAM, f"nodes with vLLM do not serve {', '.join(names)}")


def token_of(token_id: int, logprobs: Mapping[int, Any] | None, num_top: int | None) -> SampledToken:
    """Return a token of vLLM's output; `logprobs` are of the tokens at its position, by token id."""
    if not logprobs:
        return SampledToken(token_id)
    by_rank = sorted(logprobs.items(), key=lambda item: item[1].rank)
    top = tuple((each, float(logprob.logprob)) for each, logprob in by_rank[: num_top or 0])
    return SampledToken(token_id, float(logprobs[token_id].logprob), top)


def finish_of(finish_reason: str | None) -> FinishReason | None:
    """Return why an output has ended, by vLLM's word for it; None if it goes on. Raises RequestError for an error."""
    match finish_reason:
        case None:
            return None
        case "stop":
            return FinishReason.STOP
        case "length":
            return FinishReason.LENGTH
    raise RequestError(reasons.STEP_FAILED, f"vLLM has ended the request: {finish_reason}")
