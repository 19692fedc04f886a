"""Split a step into micro-batches, so that pipeline stages compute at the same time: while one stage computes a
micro-batch, the next stage computes the one before. Pure.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from serving_core.requests import Share

LEAST_TOKENS: Final = 64  # fewer take about as long, since each micro-batch reads all weights again
MOST_PER_STAGE: Final = 4


def num_micro_batches(num_tokens: int, num_stages: int) -> int:
    """Return the number of micro-batches of a step of num_tokens tokens."""
    return max(1, min(MOST_PER_STAGE * num_stages, num_tokens // LEAST_TOKENS))


def micro_batches(shares: Sequence[Share], num_stages: int, block_size: int) -> list[list[Share]]:
    """Split the shares, in order, into micro-batches of about equal numbers of tokens.

    Prompts are cut only at block boundaries: the tokens of a block that a step computes are always computed together,
    for any number of stages.
    """
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
    """Return the leading tokens of a share, and the rest if any."""
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
