"""What requests ask to be made of their logits before a token is chosen.

In vLLM's order, behind the grammar: allowed tokens, bad ones, logit_bias, min_tokens, penalties.
"""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from serving_core.requests import Request


def is_adjusted(request: Request) -> bool:
    """Whether its next token is chosen by other logits than the model's own."""
    sampling = request.sampling
    return (
        bool(sampling.logit_bias)
        or bool(sampling.allowed_token_ids)
        or bool(sampling.bad_tokens)
        or request.num_output_tokens < sampling.min_tokens
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )


def adjust(logits: torch.Tensor, request: Request, eos_token_ids: Sequence[int]) -> None:
    """Changes a row of logits [vocab_size], float32, in place."""
    sampling = request.sampling
    if sampling.allowed_token_ids:
        _keep(logits, sampling.allowed_token_ids)
    if sampling.bad_tokens:
        logits.index_fill_(0, _on(logits.device, list(_last_of_bad(request))), -torch.inf)
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if request.num_output_tokens < sampling.min_tokens:
        logits.index_fill_(0, _on(logits.device, (*eos_token_ids, *sampling.stop_token_ids)), -torch.inf)
    if sampling.repetition_penalty != 1:
        _penalize_repetition(logits, request.token_ids, sampling.repetition_penalty)
    if (sampling.frequency_penalty != 0 or sampling.presence_penalty != 0) and request.num_output_tokens:
        _penalize_output(logits, request.output, sampling.frequency_penalty, sampling.presence_penalty)


def _keep(logits: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Makes the logits of all other tokens -inf."""
    allowed = _on(logits.device, token_ids)
    kept = logits[allowed]
    logits.fill_(-torch.inf)[allowed] = kept


def _last_of_bad(request: Request) -> Iterator[int]:
    """The last tokens of runs that the answer ends with but for these."""
    token_ids = request.token_ids
    for *before, last in request.sampling.bad_tokens:
        if len(before) <= request.num_output_tokens and token_ids[len(token_ids) - len(before) :] == before:
            yield last


def _penalize_repetition(logits: torch.Tensor, token_ids: Sequence[int], penalty: float) -> None:
    """Over prompt and output: divides positive logits and multiplies negative ones (CTRL, arXiv 1909.05858)."""
    seen = _on(logits.device, token_ids)
    values = logits[seen]  # a token that comes twice is written twice, with the same number
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalize_output(logits: torch.Tensor, output: Sequence[int], frequency: float, presence: float) -> None:
    """Over the output alone: subtracts for each occurrence, and once."""
    seen, counts = np.unique(_packed(output), return_counts=True)
    penalties = frequency * torch.from_numpy(counts) + presence
    logits[_on(logits.device, seen)] -= penalties.to(logits.device, non_blocking=True)


def _on(device: torch.device, token_ids: Sequence[int] | np.ndarray) -> torch.Tensor:
    """Tokens as an index there, without awaiting what the device computes."""
    packed = token_ids if isinstance(token_ids, np.ndarray) else _packed(token_ids)
    return torch.from_numpy(packed).to(device, non_blocking=True)


def _packed(token_ids: Sequence[int]) -> np.ndarray:
    """As int64; several times as fast as torch and numpy read a list, which may have thousands."""
    return np.array(array("q", token_ids))
