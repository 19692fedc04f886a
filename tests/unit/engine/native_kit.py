"""What the tests of the native kernels share: pools with requests in scattered blocks, and a reference in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import build_batch
from engine.native.library import ENVIRONMENT, OFF, VARIANTS, native_library
from serving_core.layout import KVLayout
from serving_core.requests import Share
from tests.effort import effort, few

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


def thread_counts():
    """Have torch and the native kernels compute with one thread, then with several, and yield each number of threads.
    `restore_threads` of conftest.py restores the number afterwards."""
    for num_threads in effort((1, 3), (1, 2, 3), (1, 2, 3)):
        torch.set_num_threads(num_threads)
        yield num_threads


def choose_native(monkeypatch, is_native):
    """Have engines compute with the native kernels of this machine from now on, or with torch alone."""
    if is_native:
        monkeypatch.delenv(ENVIRONMENT, raising=False)
    else:
        monkeypatch.setenv(ENVIRONMENT, OFF)


def few_variants(pool_dtype="float32", query_dtype="float32"):
    """Return the same parameters, of which the gate runs the best variant that this CPU has."""
    params = runnable_variants(pool_dtype, query_dtype)
    return few(params, next((param for param in params if not param.marks[0].args[0]), params[0]))


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
            keys, values = (cache.flatten(0, 1).double().numpy() for cache in self.pool.gather(LAYER, blocks))
            query = self.query[self.rows(index)].double().numpy()
            outputs.append(attend_in_float64(query, keys, values, share.start, window, softcap=softcap))
        return torch.from_numpy(np.concatenate(outputs))


def attend_in_float64(query, keys, values, start, window, scale=None, softcap=None):
    """Compute the attention of one request by numpy, one head at a time."""
    num_tokens, num_heads, head_dim = query.shape
    length, num_kv_heads = start + num_tokens, keys.shape[1]
    distances = start + np.arange(num_tokens)[:, None] - np.arange(length)
    hidden = (distances < 0) | (distances >= (window or length + 1))
    output = np.empty_like(query)
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        scores = query[:, head] @ keys[:length, kv_head].T * (scale or head_dim**-0.5)
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        output[:, head] = weights @ values[:length, kv_head] / weights.sum(axis=1, keepdims=True)
    return output
