"""What the tokens of a layer see, found out of the mask function that a model of transformers hands over: everything
before them, or a window of it. Anything else is refused."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from serving_core.errors import ModelError

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a batch's index, a head's, and positions of queries and keys; says which see which."""

POSITIONS = (0, 1, 2, 3, 7, 64, 1000, 8191, 8192, 2**20)  # of queries, to try a mask at
NEAR = (-1000, -64, -2, -1, 0, 1, 2, 63, 64)  # distances to keys, likewise


@dataclass(frozen=True, slots=True)
class Sight:
    """What takes the place of a mask: a token sees itself and the tokens before it, or the last `window` of them."""

    window: int | None


def sight_of(mask_function: MaskFunction, window: int | None) -> Sight:
    """What a mask function lets tokens see, tried out at some positions. A window can only be this one. Raises
    ModelError for any other mask."""
    queries, keys = _pairs(window)
    sees = mask_function(0, 0, queries, keys)
    distances = queries - keys
    for candidate in (None, window):
        if torch.equal(sees, (distances >= 0) if candidate is None else (distances >= 0) & (distances < candidate)):
            return Sight(candidate)
    raise ModelError("attention under a mask that is neither causal nor a sliding window is not supported")


@lru_cache(maxsize=16)
def _pairs(window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of queries and keys that tell masks apart."""
    edges = () if window is None else (window - 1, window, window + 1, 2 * window)
    positions = {*POSITIONS, *edges}
    pairs = [
        (query, key)
        for query in sorted(positions)
        for key in sorted({query - distance for distance in (*NEAR, *edges)} | {0, query // 2})
        if key >= 0
    ]
    queries, keys = torch.tensor(pairs, device="cpu").unbind(1)
    return queries, keys
