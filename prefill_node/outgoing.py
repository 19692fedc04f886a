"""Choose the blocks of prompts that leave a rank while the step that computes them runs."""

from collections.abc import Iterable, Sequence

from serving_core.layout import KVLayout
from serving_core.requests import Share


def overlapped(parts: Iterable[tuple[int, Share]], min_tokens: int) -> list[tuple[int, Share]]:
    """Return those parts of a step whose blocks are sent while later layers are computed.

    A part is the epoch of an attempt and its scheduled tokens. The other parts, decode steps and prompts below
    `min_tokens` that are computed as a whole, are sent at the end of the step.
    """
    return [(epoch, share) for epoch, share in parts if not _is_short(share, min_tokens)]


def _is_short(share: Share, min_tokens: int) -> bool:
    return share.num_tokens == 1 or (share.samples and share.start + share.num_tokens < min_tokens)


def final_blocks(share: Share, layout: KVLayout) -> Sequence[int]:
    """Return the leading blocks of a request that no later step writes to, given its scheduled tokens (`share`).

    These are the full blocks, and after the last chunk also the last block. A fixed state comes first and is final
    after the last chunk, so that no block is final before.
    """
    num_tokens = share.start + share.num_tokens
    if share.samples:
        return share.block_ids[: layout.num_blocks_for(num_tokens)]
    return () if layout.state_bytes else share.block_ids[: num_tokens // layout.block_size]
