"""Draft tokens with a second, smaller model. Drafts affect only the time: a token is accepted only if the target model
gives it.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from engine.engine import Engine
from serving_core.requests import DraftWork, Share

MEASURED_STEPS: Final = 8
ALL_WANTED_TOKENS: Final = 2  # tokens of a share, up to which computing all logits costs less than selecting


class Drafter:
    """Runs a draft model: computes the draft tokens that decode_node/speculation.py plans, all sequences in one batch.

    Call it from the thread that computes steps, between two steps.
    """

    def __init__(self, engine: Engine) -> None:
        """Wrap the engine of the draft model, which has one rank and a KV pool of its own."""
        self.engine: Final = engine

    def measure_step_s(self) -> float:
        """Return the median seconds of a draft model's step for one token of one sequence, over MEASURED_STEPS steps.

        Writes to block 0, so call it before the pool holds data.
        """
        taken_s, work = [], DraftWork(Share([0], 0, [0], samples=True), 1)
        for _ in range(MEASURED_STEPS):
            started_at = time.perf_counter()
            self.propose([work])
            taken_s.append(time.perf_counter() - started_at)
        return statistics.median(taken_s)

    def propose(self, works: Sequence[DraftWork]) -> list[list[int]]:
        """Compute each work in the draft model's pool; return the greedy draft tokens of each, in order.

        A work gets num_draft_tokens of them, which follow the tokens of its share. Without any, only the KV of its
        tokens is computed, and its list is empty.
        """
        if chunks := [work.share for work in works if not work.num_draft_tokens]:
            self.engine.likeliest(chunks)
        written: list[list[int]] = [[] for _ in works]
        going = [(place, _all_wanted(work.share)) for place, work in enumerate(works) if work.num_draft_tokens]
        while going:
            token_ids = self.engine.likeliest([share for _, share in going])
            for (place, _), token_id in zip(going, token_ids, strict=True):
                written[place].append(token_id)
            going = [
                (place, _behind(share, written[place][-1]))
                for place, share in going
                if len(written[place]) < works[place].num_draft_tokens
            ]
        return written


def _all_wanted(share: Share) -> Share:
    """Return the share with the logits of all its tokens wanted, as a decode program computes them, if it has few
    tokens.
    """
    return replace(share, num_scored=share.num_tokens - 1) if share.num_tokens <= ALL_WANTED_TOKENS else share


def _behind(share: Share, token_id: int) -> Share:
    """Return the share of the one token that follows `share`."""
    return Share([token_id], share.start + share.num_tokens, share.block_ids, samples=True)
