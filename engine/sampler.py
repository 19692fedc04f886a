"""Chooses the next token of each request from the model's logits.

For one request, in vLLM's order: grammar, allowed tokens, logit_bias, min_tokens, penalties, temperature, min_p, top_k,
top_p, draw.
The draw depends on the seed and the position in the answer alone, and walks the vocabulary in its own order, so the
same request gets the same token in any batch, on any node and after any restart that computes the same logits.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from engine.masks import forbid
from engine.model.steps import Steps, TorchSteps
from serving_core.errors import ModelError
from serving_core.requests import NO_TOKEN, Request, SampledToken

NUCLEUS_GUESS: Final = 256  # top_p is first sought among so many tokens, and among all only if these do not reach it
TORCH_STEPS: Final = TorchSteps()
_SEED_MASK: Final = 2**64 - 1
_DOUBLE_STEP: Final = 2.0**-53


def sample(
    logits: torch.Tensor, requests: Sequence[Request], eos_token_ids: Sequence[int], steps: Steps = TORCH_STEPS
) -> list[SampledToken]:
    """The next token of each request from its row of logits [S, vocab_size], in which tokens that a grammar forbids
    become -inf. Raises ModelError when a row's largest logit is not a finite number: the model is broken or
    overflows."""
    errors = forbid(logits, requests)
    highest, likeliest = steps.likeliest(logits)
    tokens = likeliest.tolist()  # the first to await the device
    if not all(map(math.isfinite, highest.tolist())):
        raise ModelError("the model's logits are not finite numbers")
    sampled = [
        SampledToken(token) if _is_plain(request) else _sample_row(logits[row].float(), request, eos_token_ids)
        for row, (token, request) in enumerate(zip(tokens, requests, strict=True))
    ]
    for row, error in errors.items():
        sampled[row] = SampledToken(NO_TOKEN, error=error)
    return sampled


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of seed and position alone (Philox, Salmon et al. 2011)."""
    raw = np.random.Philox(key=seed & _SEED_MASK, counter=position).random_raw()
    return (int(raw) >> 11) * _DOUBLE_STEP


def _is_plain(request: Request) -> bool:
    """Greedy, and nothing but the likeliest token is asked for."""
    sampling = request.sampling
    return (
        sampling.temperature == 0
        and sampling.logprobs is None
        and not sampling.logit_bias
        and not sampling.allowed_token_ids
        and request.num_output_tokens >= sampling.min_tokens
        and sampling.repetition_penalty == 1
        and sampling.frequency_penalty == 0
        and sampling.presence_penalty == 0
    )


def _sample_row(logits: torch.Tensor, request: Request, eos_token_ids: Sequence[int]) -> SampledToken:
    sampling = request.sampling
    adjusted = _only(logits, sampling.allowed_token_ids) if sampling.allowed_token_ids else logits.clone()
    for token, bias in sampling.logit_bias:
        adjusted[token] += bias
    if request.num_output_tokens < sampling.min_tokens:
        adjusted[[*eos_token_ids, *sampling.stop_token_ids]] = -torch.inf
    _penalize(adjusted, request)
    if sampling.temperature == 0:
        token = int(adjusted.argmax())
    else:
        weights = torch.exp((adjusted - adjusted.max()) / sampling.temperature)
        weights = weights * (weights >= _least_weight(weights, request))
        token = _draw(weights, uniform(sampling.seed, request.num_output_tokens))
    if sampling.logprobs is None:
        return SampledToken(token)
    return with_logprobs(token, logits, sampling.logprobs)


def _only(logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """The logits of these tokens; -inf for all others."""
    allowed = torch.tensor(token_ids, device=logits.device)
    only = torch.full_like(logits, -torch.inf)
    only[allowed] = logits[allowed]
    return only


def _penalize(logits: torch.Tensor, request: Request) -> None:
    """Repetition over prompt and output: divides positive logits and multiplies negative ones (CTRL, arXiv 1909.05858).
    Frequency and presence over the output alone: subtracts for each occurrence, and once."""
    sampling = request.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.unique(torch.tensor(request.token_ids, device=logits.device))
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (sampling.frequency_penalty != 0 or sampling.presence_penalty != 0) and request.num_output_tokens:
        output = torch.tensor(request.token_ids[request.num_prompt_tokens :], device=logits.device)
        seen, counts = torch.unique(output, return_counts=True)
        logits[seen] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _least_weight(weights: torch.Tensor, request: Request) -> float:
    """The weight a token needs to stay; weights are relative to the likeliest token's, which is 1. Tokens as likely
    as the last one that stays, stay too."""
    sampling = request.sampling
    least = sampling.min_p
    if 0 < sampling.top_k < len(weights):
        least = max(least, float(weights.topk(sampling.top_k).values[-1]))
    if sampling.top_p < 1:
        least = max(least, _nucleus_edge(weights[weights >= least], sampling.top_p))
    return least


def _nucleus_edge(weights: torch.Tensor, top_p: float) -> float:
    """The smallest weight in the smallest set of likeliest tokens that holds top_p of the mass."""
    target = top_p * weights.cumsum(0, dtype=torch.float64)[-1]  # unlike sum, in one order with any number of threads
    highest = weights.topk(min(NUCLEUS_GUESS, len(weights))).values
    masses = highest.cumsum(0, dtype=torch.float64)
    if masses[-1] < target:
        highest = weights.sort(descending=True).values
        masses = highest.cumsum(0, dtype=torch.float64)
    edge = int(torch.searchsorted(masses, target))
    return float(highest[min(edge, len(highest) - 1)])


def _draw(weights: torch.Tensor, number: float) -> int:
    """Inverse transform sampling: the first token whose cumulative weight exceeds number of the whole."""
    masses = weights.cumsum(0, dtype=torch.float64)
    token = int(torch.searchsorted(masses, number * masses[-1], right=True))
    return token if token < len(weights) else int(weights.nonzero()[-1])  # number * whole was rounded up to the whole


def with_logprobs(token: int, logits: torch.Tensor, num_top: int) -> SampledToken:
    """The token with its logprob and those of the num_top most likely, by the row of logits [vocab_size] in float32."""
    logprobs = logits.clone().log_softmax(-1)  # on CUDA the order of its sum depends on where a row begins
    top = logprobs.topk(min(num_top, len(logprobs)))
    likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return SampledToken(
        token,
        float(logprobs[token]),
        tuple((each, logprob) for each, logprob in likeliest if logprob > -math.inf),  # of those that may come
    )
