"""Takes from the logits of a step what the grammars of its requests do not allow of."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from serving_core.errors import RequestError
from serving_core.requests import Request


def forbid(logits: torch.Tensor, requests: Sequence[Request]) -> dict[int, RequestError]:
    """Makes the logits [S, vocab_size] of tokens that may not come next -inf, each row by its request. Tells the rows,
    unchanged, whose grammar goes no further, and why."""
    masks: dict[int, bytes] = {}
    errors: dict[int, RequestError] = {}
    for row, request in enumerate(requests):
        if request.guide is not None:
            try:
                masks[row] = request.guide.allowed(request.output)
            except RequestError as error:
                errors[row] = error
    if masks:  # at one go: each operation on the logits may wait for all threads
        logits.masked_fill_(_forbidden(masks, *logits.shape).to(logits.device), -torch.inf)
    return errors


def _forbidden(masks: Mapping[int, bytes], num_rows: int, vocab_size: int) -> torch.Tensor:
    """[num_rows, vocab_size], of bools; what the mask of a row does not reach to is forbidden, too."""
    forbidden = np.zeros((num_rows, vocab_size), dtype=np.bool_)
    for row, mask in masks.items():
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab_size]
        forbidden[row, : len(bits)] = bits == 0
        forbidden[row, len(bits) :] = True
    return torch.from_numpy(forbidden)
