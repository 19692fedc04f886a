"""Finds which candidates of a step have come: those that its requests would have been given without them.

Behind each candidate that equals the token chosen before it, one more token is chosen, as the step that would have
computed it alone would choose: from logits of the same bits, for a request that has the same tokens. So nothing depends
on candidates but time. What penalties, grammars and seeds make of a token needs no word here.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.model.steps import Likeliest, Steps
from engine.sampler import sample
from serving_core.requests import SampledToken, Work


def sample_with_candidates(
    logits: torch.Tensor,
    works: Sequence[Work],
    eos_token_ids: Sequence[int],
    steps: Steps,
    likeliest: Likeliest | None = None,
) -> list[SampledToken]:
    """The tokens that each of these works gets, in order, as Work.take takes them. `logits` has of each one row for its
    last known token, then one for each candidate; `likeliest` is as in `sample`, and so are errors."""
    given: list[list[SampledToken]] = [[] for _ in works]
    going, row = [], 0
    for place, work in enumerate(works):
        going.append((place, row, work.request))
        row += 1 + len(work.candidates)
    while going:
        rows, requests = [row for _, row, _ in going], [request for *_, request in going]
        known = None if likeliest is None else (likeliest[0][rows], likeliest[1][rows])
        tokens = sample(logits[rows], requests, eos_token_ids, steps, known)
        behind = []
        for (place, row, request), token in zip(going, tokens, strict=True):
            candidates = works[place].candidates[len(given[place]) :]
            given[place].append(token)
            if candidates and candidates[0] == token.token_id:
                grown = replace(request, token_ids=[*request.token_ids, token.token_id])
                behind.append((place, row + 1, grown))
        going = behind
    return [token for tokens in given for token in tokens]
