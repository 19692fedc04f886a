"""Chooses the next token of each request from the model's logits.

For one request, in vLLM's order: grammar, allowed tokens, bad ones, logit_bias, min_tokens, penalties, temperature,
min_p, top_k, top_p, draw.
The draw depends on the seed and the position in the answer alone, and walks the vocabulary in its own order, so the
same request gets the same token in any batch, on any node and after any restart that computes the same logits.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch

from engine.adjusting import adjust, is_adjusted
from engine.logprobs import Beside, with_logprobs
from engine.masks import forbid
from engine.model.draws import Draw
from engine.model.steps import Likeliest, Steps, TorchSteps
from engine.overflow import overflowed
from serving_core.requests import NO_TOKEN, Request, SampledToken

TORCH_STEPS: Final = TorchSteps()
_SEED_MASK: Final = 2**64 - 1
_DOUBLE_STEP: Final = 2.0**-53


def sample(
    logits: torch.Tensor,
    requests: Sequence[Request],
    eos_token_ids: Sequence[int],
    steps: Steps = TORCH_STEPS,
    likeliest: Likeliest | None = None,
) -> list[SampledToken]:
    """The next token of each request from its row of logits [S, vocab_size], in which tokens that a grammar forbids
    become -inf. `likeliest` is what steps find of these logits, where it is known; its tokens are of no use afterwards.
    A row whose grammar goes no further, or whose largest logit is not a finite number, gets an error in place of a
    token."""
    errors = forbid(logits, requests)
    if any(request.guide is not None for request in requests):
        likeliest = None
    as_they_are = {row: request for row, request in enumerate(requests) if not is_adjusted(request)}
    adjusted = [row for row in range(len(requests)) if row not in as_they_are]
    highest, tokens = _choose(logits, as_they_are, steps, likeliest)
    if adjusted:
        rows = torch.tensor(adjusted).to(logits.device, non_blocking=True)
        copies = logits[rows].float()
        for copy, row in zip(copies, adjusted, strict=True):
            adjust(copy, requests[row], eos_token_ids)
        tokens[rows] = _choose(copies, {place: requests[row] for place, row in enumerate(adjusted)}, steps)[1]
    token_ids = tokens.tolist()  # the first to await the device
    failed = {row: overflowed("logits") for row, number in enumerate(highest.tolist()) if not math.isfinite(number)}
    failed |= {row: SampledToken(NO_TOKEN, error=error) for row, error in errors.items()}
    sampled = [SampledToken(token) for token in token_ids]
    wanted = {row: request.sampling for row, request in enumerate(requests) if row not in failed}
    beside = {
        row: Beside(sampling.logprobs, sampling.logprob_token_ids)
        for row, sampling in wanted.items()
        if sampling.logprobs is not None
    }
    if beside:
        ours = [token_ids[row] for row in beside]
        scored = with_logprobs(logits, highest, [*beside], ours, [*beside.values()], steps)
        for row, token in zip(beside, scored, strict=True):
            sampled[row] = token
    for row, token in failed.items():
        sampled[row] = token
    return sampled


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of seed and position alone (Philox, Salmon et al. 2011)."""
    raw = np.random.Philox(key=seed & _SEED_MASK, counter=position).random_raw()
    return (int(raw) >> 11) * _DOUBLE_STEP


def _choose(
    logits: torch.Tensor, requests: Mapping[int, Request], steps: Steps, likeliest: Likeliest | None = None
) -> Likeliest:
    """Of each row of logits its largest number, and its token: the likeliest, or drawn if a request of that row is not
    greedy. Where the likeliest are known, their tensors are given back, changed."""
    highest, tokens = steps.likeliest(logits) if likeliest is None else likeliest
    draws = [_draw(row, request) for row, request in requests.items() if request.sampling.temperature > 0]
    if draws:
        rows = torch.tensor([draw.row for draw in draws]).to(logits.device, non_blocking=True)
        tokens[rows] = steps.draw(logits, highest, draws)
    return highest, tokens


def _draw(row: int, request: Request) -> Draw:
    sampling = request.sampling
    number = uniform(sampling.seed, request.num_output_tokens)
    return Draw(row, number, sampling.temperature, sampling.min_p, sampling.top_p, sampling.top_k)
