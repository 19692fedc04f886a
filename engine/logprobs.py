"""Logprobs: of a token, and of the likeliest beside it."""

import math
from collections.abc import Sequence
from typing import Final

import torch

from engine.model.steps import Steps
from serving_core.requests import SampledToken

BLOCK: Final = 64  # tokens, of which the likeliest stands for all when the likeliest of a row are sought


def with_logprobs(
    logits: torch.Tensor,
    highest: torch.Tensor,
    rows: Sequence[int],
    tokens: Sequence[int],
    num_top: Sequence[int],
    steps: Steps,
) -> list[SampledToken]:
    """For each of these rows of logits [S, vocab_size], of which `highest` [S], float32, has the largest numbers, its
    token with its logprob and those of its num_top likeliest tokens, of equals the first. Logprobs are rounded to
    float32."""
    totals = steps.log_totals(logits, highest, rows)
    if [*rows] != [*range(len(logits))]:
        logits = logits[[*rows]]
    ids = torch.tensor(tokens).to(logits.device)[:, None]
    if any(num_top):
        ids = torch.cat((ids, _likeliest(logits, min(max(num_top), logits.shape[1]))), 1)
    logprobs = (logits.gather(1, ids).double() - totals[:, None]).float()
    scored = []
    for listed, numbers, count in zip(ids.tolist(), logprobs.tolist(), num_top, strict=True):
        pairs = zip(listed[1 : 1 + count], numbers[1 : 1 + count], strict=True)
        may_come = tuple((each, logprob) for each, logprob in pairs if logprob > -math.inf)
        scored.append(SampledToken(listed[0], numbers[0], may_come))
    return scored


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The ids [S, count] of the likeliest tokens of each row. They are in the first blocks, by their likeliest ones."""
    num_blocks = logits.shape[1] // BLOCK
    if count >= num_blocks:
        return _first(logits, count)
    end, device = num_blocks * BLOCK, logits.device
    blocks = _first(logits[:, :end].view(-1, num_blocks, BLOCK).amax(2), count).sort().values
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten(1)
    ids = torch.cat((ids, torch.arange(end, logits.shape[1], device=device).expand(len(ids), -1)), 1)
    return ids.gather(1, _first(logits.gather(1, ids), count))


def _first(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Where the largest numbers [S, count] of each row are, from the largest on, of equals the first. (topk alone tells
    equals apart by what it likes.)"""
    bits = numbers.float().view(torch.int32)
    in_order = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()  # integers in the order of the numbers
    places = torch.arange(numbers.shape[1], device=numbers.device)
    return (in_order * 2**32 - places).topk(count).indices
