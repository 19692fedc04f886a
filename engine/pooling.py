"""Pool embeddings from the hidden states of their tokens, step by step."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.sampler import overflowed
from serving_core.requests import MEAN, NO_TOKEN, Pooling, SampledToken, Work


def pool(hidden: torch.Tensor, works: Sequence[Work]) -> list[SampledToken]:
    """Pool the hidden states of a step; return the embedding of each request whose last token is among them.

    `hidden` [S, E] holds the wanted rows of the batch of these works; embeddings are in their order. A mean is summed
    over steps in Request.pooled, which a request that starts at token 0 starts anew. An embedding that is not finite
    becomes a SampledToken with an error.
    """
    done: list[SampledToken] = []
    row = 0
    for work in works:
        request, pooling = work.request, work.request.pooling
        assert pooling is not None, "an embedder gets no other requests"
        rows = hidden[row : row + work.num_scored + work.samples]
        row += len(rows)
        if pooling.kind == MEAN:
            # In float64 the sum does not depend visibly on how the tokens were divided.
            total = rows.sum(0, dtype=torch.float64)
            request.pooled = total if work.start == 0 else request.pooled + total
        if work.samples:
            pooled = request.pooled / len(request.token_ids) if pooling.kind == MEAN else rows[-1]
            done.append(_embedding(pooled.float(), pooling))
    return done


def _embedding(pooled: torch.Tensor, pooling: Pooling) -> SampledToken:
    if pooling.num_dimensions:
        pooled = pooled[: pooling.num_dimensions]
    if pooling.normalizes:
        pooled = functional.normalize(pooled, dim=0)
    if not bool(pooled.isfinite().all()):
        return overflowed("hidden states")
    return SampledToken(NO_TOKEN, embedding=pooled.cpu().numpy().astype("<f4").tobytes())
