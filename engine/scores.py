"""Scores of prompts: the logprob of each of their tokens, given those before it."""

from collections.abc import Sequence

import torch

from engine.sampler import with_logprobs
from serving_core.requests import Work


def take_scores(logits: torch.Tensor, works: Sequence[Work]) -> torch.Tensor:
    """Adds to the scores of each request what its share of the step tells, in place of what was known from there on.
    `logits` are those of the batch of these works; gives the rows among them that tokens are sampled from."""
    left: list[int] = []
    row = 0
    for work in works:
        request, first, num_scored = work.request, work.start, work.num_scored
        num_top = request.sampling.prompt_logprobs or 0
        scored = zip(request.token_ids[first + 1 : first + 1 + num_scored], logits[row : row + num_scored], strict=True)
        if num_scored:
            request.scores[first:] = [with_logprobs(token, of_token.float(), num_top) for token, of_token in scored]
        row += num_scored
        if work.samples:
            num_sampled = 1 + len(work.candidates)
            left += range(row, row + num_sampled)
            row += num_sampled
    return logits[left]
