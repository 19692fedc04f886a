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
    """Return into how many micro-batches a step of num_tokens tokens is split, at least 1.

    Each gets LEAST_TOKENS tokens or more, and there are at most MOST_PER_STAGE for each pipeline stage.
    """
    return max(1, min(MOST_PER_STAGE * num_stages, num_tokens // LEAST_TOKENS))


def micro_batches(shares: Sequence[Share], num_stages: int, block_size: int) -> list[list[Share]]:
    """Split the scheduled tokens of a step (`shares`), in order, into micro-batches of about equal numbers of tokens.

    A request may be cut, then only at a block boundary (block_size in tokens): tokens of a block that one step computes
    are always computed together, for any number of stages. Of a request that is cut, only the last part samples.
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
