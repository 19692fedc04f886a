"""Verify draft tokens: find which draft tokens of a step are accepted.

A draft token is accepted if it equals the token sampled before it. Behind each accepted draft token one more token is
sampled, just as a step without drafts samples it: from logits with the same bits, for a request with the same tokens.
So speculation changes only the time, also with penalties, grammars and seeds.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.ops.base import Likeliest, Ops
from engine.sampler import sample
from serving_core.requests import SampledToken, Work


def verify(
    logits: torch.Tensor,
    works: Sequence[Work],
    eos_token_ids: Sequence[int],
    ops: Ops,
    likeliest: Likeliest | None = None,
) -> list[SampledToken]:
    """Sample the tokens of each work, in order, as Work.take consumes them.

    For each work, `logits` has one row for its last known token, then one for each draft token. `likeliest` and errors
    are as in `sample`.
    """
    given: list[list[SampledToken]] = [[] for _ in works]
    going, row = [], 0
    for place, work in enumerate(works):
        going.append((place, row, work.request))
        row += 1 + len(work.draft_tokens)
    while going:
        rows, requests = [row for _, row, _ in going], [request for *_, request in going]
        known = None if likeliest is None else (likeliest[0][rows], likeliest[1][rows])
        tokens = sample(logits[rows], requests, eos_token_ids, ops, known)
        behind = []
        for (place, row, request), token in zip(going, tokens, strict=True):
            draft_tokens = works[place].draft_tokens[len(given[place]) :]
            given[place].append(token)
            if draft_tokens and draft_tokens[0] == token.token_id:
                grown = replace(request, token_ids=[*request.token_ids, token.token_id])
                behind.append((place, row + 1, grown))
        going = behind
    return [token for tokens in given for token in tokens]
