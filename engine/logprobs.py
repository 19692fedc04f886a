"""Logprobs: of a token, and of the likeliest beside it."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from engine.model.steps import Steps
from serving_core.requests import SampledToken

BLOCK: Final = 64  # tokens, of which the likeliest stands for all when the likeliest of a row are sought


class Beside(NamedTuple):
    """Whose logprobs are told beside a token's: the likeliest, so many, or where some are named, these."""

    num_top: int
    named: Sequence[int] = ()


def with_logprobs(
    logits: torch.Tensor,
    highest: torch.Tensor,
    rows: Sequence[int],
    tokens: Sequence[int],
    beside: Sequence[Beside],
    steps: Steps,
) -> list[SampledToken]:
    """For each of these rows of logits [S, vocab_size], of which `highest` [S], float32, has the largest numbers, its
    token with its logprob and those of the tokens beside it, the likeliest first, of equals the first. Logprobs are
    rounded to float32."""
    totals = steps.log_totals(logits, highest, rows)
    if [*rows] != [*range(len(logits))]:
        logits = logits[[*rows]]
    ids = torch.tensor(tokens).to(logits.device)[:, None]
    num_named = max(len(each.named) for each in beside)
    if num_named:
        named = [[*each.named, *[0] * (num_named - len(each.named))] for each in beside]
        ids = torch.cat((ids, torch.tensor(named).to(logits.device)), 1)
    if num_top := min(max(0 if each.named else each.num_top for each in beside), logits.shape[1]):
        ids = torch.cat((ids, _likeliest(logits, num_top)), 1)
    logprobs = (logits.gather(1, ids).double() - totals[:, None]).float()
    scored = []
    for listed, numbers, (count, names) in zip(ids.tolist(), logprobs.tolist(), beside, strict=True):
        told = slice(1, 1 + len(names)) if names else slice(1 + num_named, 1 + num_named + count)
        may_come = [pair for pair in zip(listed[told], numbers[told], strict=True) if pair[1] > -math.inf]
        may_come.sort(key=lambda pair: -pair[1])
        scored.append(SampledToken(listed[0], numbers[0], tuple(may_come)))
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
