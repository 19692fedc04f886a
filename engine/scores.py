"""Scores of prompts: the logprob of each of their tokens, given those before it."""

from collections.abc import Sequence

import torch

from engine.logprobs import Beside, with_logprobs
from engine.model.steps import Steps
from serving_core.requests import Work


def take_scores(logits: torch.Tensor, works: Sequence[Work], steps: Steps) -> torch.Tensor:
    """Adds to the scores of each request what its share of the step tells, in place of what was known from there on.
    `logits` are those of the batch of these works; gives the rows among them that tokens are sampled from."""
    left: list[int] = []
    row = 0
    for work in works:
        request, first, num_scored = work.request, work.start, work.num_scored
        if num_scored:
            tokens = request.token_ids[first + 1 : first + 1 + num_scored]
            beside = Beside(request.sampling.prompt_logprobs or 0)
            ours = logits[row : row + num_scored]
            highest, _ = steps.likeliest(ours)
            scores = with_logprobs(ours, highest, range(num_scored), tokens, [beside] * num_scored, steps)
            request.scores[first:] = scores
        row += num_scored
        if work.samples:
            num_sampled = 1 + len(work.candidates)
            left += range(row, row + num_sampled)
            row += num_sampled
    return logits[left]
