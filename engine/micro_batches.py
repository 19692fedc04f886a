"""A step divided over time, so that the stages of a node compute at once: one stage computes a part while the next one
computes the part before. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from serving_core.requests import Share

LEAST_TOKENS: Final = 64  # fewer would take about as long: what a step reads of the weights each part reads again
MOST_PER_STAGE: Final = 4


def num_micro_batches(num_tokens: int, num_stages: int) -> int:
    """Into how many parts a step of so many tokens is divided."""
    return max(1, min(MOST_PER_STAGE * num_stages, num_tokens // LEAST_TOKENS))


def micro_batches(shares: Sequence[Share], num_stages: int, block_size: int) -> list[list[Share]]:
    """The same shares in order, in parts of about as many tokens each. Prompts are cut between blocks alone: all tokens
    of a block that a step computes are computed together, however many stages there are."""
    num_tokens = sum(share.num_tokens for share in shares)
    num_parts = num_micro_batches(num_tokens, num_stages)
    parts: list[list[Share]] = []
    room = 0
    for share in shares:
        rest: Share | None = share
        while rest is not None:
            if room <= 0:
                parts.append([])
                room = -(-num_tokens // num_parts)
            end = -(-(rest.start + room) // block_size) * block_size
            head, rest = _cut(rest, end - rest.start)
            parts[-1].append(head)
            room -= head.num_tokens
    return parts


def _cut(share: Share, num_tokens: int) -> tuple[Share, Share | None]:
    """The leading tokens of a share, and the others if there are any."""
    if num_tokens >= share.num_tokens:
        return share, None
    head = replace(
        share,
        token_ids=share.token_ids[:num_tokens],
        samples=False,
        num_scored=min(share.num_scored, num_tokens),
    )
    rest = replace(
        share,
        token_ids=share.token_ids[num_tokens:],
        start=share.start + num_tokens,
        num_scored=max(0, share.num_scored - num_tokens),
    )
    return head, rest
