"""What the tests of the native kernels share: pools with requests in scattered blocks, and a reference in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import build_batch
from engine.native.library import VARIANTS, native_library
from serving_core.layout import KVLayout
from serving_core.requests import Share

CPU = torch.device("cpu")
NOT_A_BLOCK = 2**28  # its address would be far outside the pool
LAYER = 1

needs_library = pytest.mark.skipif(native_library() is None, reason="the native kernels were not built")


def runnable_variants(pool_dtype="float32", query_dtype="float32"):
    """Those that this CPU has, as parameters; the others are skipped with a reason."""
    library = native_library()
    params = []
    for variant in VARIANTS:
        runs = library is not None and library.kernel(variant, pool_dtype, query_dtype) is not None
        mark = pytest.mark.skipif(not runs, reason=f"this CPU or library has no {variant} for {pool_dtype}")
        params.append(pytest.param(variant, marks=mark))
    return params


class Scene:
    """Requests (start, num_tokens) whose blocks lie scattered over a pool, and a query.

    What the requests do not use is filled with NaN in the pool, and with numbers of no block in the block tables.
    """

    def __init__(self, sizes, num_heads, num_kv_heads, head_dim, block_size=16, dtype="float32", compute_dtype=None):
        generator = torch.Generator().manual_seed(0)
        counts = [-(-(start + num_tokens) // block_size) for start, num_tokens in sizes]
        order = torch.randperm(sum(counts) + 1, generator=generator).tolist()
        layout = KVLayout.uniform(2, num_kv_heads, head_dim, block_size, dtype)
        self.num_heads, self.sizes = num_heads, sizes
        self.pool = PagedKVPool(layout, sum(counts) + 1, CPU, compute_dtype)
        self.shares = [
            Share([0] * num_tokens, start, [order.pop() for _ in range(count)], samples=True)
            for (start, num_tokens), count in zip(sizes, counts, strict=True)
        ]
        if not layout.is_quantized:
            self.pool.keys(LAYER).fill_(torch.nan)
            self.pool.values(LAYER).fill_(torch.nan)
        for share in self.shares:
            length = share.start + share.num_tokens
            slots = torch.tensor(
                [share.block_ids[at // block_size] * block_size + at % block_size for at in range(length)]
            )
            tokens = torch.randn(2, length, num_kv_heads, head_dim, generator=generator)
            self.pool.store(LAYER, slots, *tokens.to(self.pool.compute_dtype))
        self.batch = self.batch_of(self.shares)
        # The query is a part of wider rows, as in the model.
        rows = torch.randn(sum(num for _, num in sizes), num_heads + 2, head_dim, generator=generator)
        self.query = rows.to(self.pool.compute_dtype)[:, :num_heads]

    def batch_of(self, shares):
        batch = build_batch(shares, self.pool.layout.block_size, CPU)
        tables = batch.block_tables.clone()
        for row, share in zip(tables, shares, strict=True):
            row[len(share.block_ids) :] = NOT_A_BLOCK
        return replace(batch, block_tables=tables)

    def rows(self, index):
        """The query rows of one request."""
        starts = self.batch.query_starts.tolist()
        return slice(starts[index], starts[index + 1])

    def expected(self, window, softcap=None):
        """Attention in float64, one request and head at a time."""
        outputs = []
        for index, share in enumerate(self.shares):
            blocks = torch.tensor(share.block_ids)
            keys, values = (plane.flatten(0, 1).double().numpy() for plane in self.pool.gather(LAYER, blocks))
            query = self.query[self.rows(index)].double().numpy()
            outputs.append(_attend(query, keys, values, share.start, window, softcap))
        return torch.from_numpy(np.concatenate(outputs))


def _attend(query, keys, values, start, window, softcap):
    num_tokens, num_heads, head_dim = query.shape
    length, num_kv_heads = start + num_tokens, keys.shape[1]
    distances = start + np.arange(num_tokens)[:, None] - np.arange(length)
    hidden = (distances < 0) | (distances >= (window or length + 1))
    output = np.empty_like(query)
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        scores = query[:, head] @ keys[:length, kv_head].T / head_dim**0.5
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        output[:, head] = weights @ values[:length, kv_head] / weights.sum(axis=1, keepdims=True)
    return output
