"""What tests of attention on a device share: pools of random values, requests over them, and a reference in float64."""

import torch

from engine.cache.kv_pool import PagedKVPool
from serving_core.layout import KVLayout
from serving_core.requests import Share

CUDA = torch.device("cuda", 0)


def random_pool(block_size, num_kv_heads, head_dim, dtype, compute_dtype=None):
    layout = KVLayout.uniform(1, num_kv_heads, head_dim, block_size, dtype)
    num_blocks = max(300, 10_000 // block_size)
    pool = PagedKVPool(layout, num_blocks, CUDA, compute_dtype)
    pool.try_values(0, num_blocks)
    return pool


def shares_of(spans, block_size):
    """Of each a request: tokens before, and tokens."""
    shares, first = [], 0
    for start, num_tokens in spans:
        num_blocks = -(-(start + num_tokens) // block_size)
        shares.append(Share([0] * num_tokens, start, range(first, first + num_blocks), samples=True))
        first += num_blocks
    return shares


def random_query(shares, num_heads, pool):
    num_rows = sum(share.num_tokens for share in shares)
    return torch.randn(num_rows, num_heads, pool.layout.head_dim, device=CUDA).to(pool.compute_dtype)


def eager(query, shares, pool, window=None, softcap=None):
    """On the host in float64, by all scores of a request at once: each with the mask, as transformers has it."""
    outputs, queries = [], query.cpu().double().split([share.num_tokens for share in shares])
    for share, rows in zip(shares, queries, strict=True):
        length, group = share.start + share.num_tokens, rows.shape[1] // pool.layout.num_kv_heads
        stored = pool.gather(0, torch.tensor(share.block_ids, device=CUDA))
        caches = (cache.cpu().double().flatten(0, 1)[:length] for cache in stored)
        keys, values = (cache.repeat_interleave(group, dim=1).transpose(0, 1) for cache in caches)
        scores = rows.transpose(0, 1) @ keys.transpose(1, 2) * rows.shape[2] ** -0.5
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        distances = torch.arange(share.start, length)[:, None] - torch.arange(length)
        hidden = (distances < 0) | (distances >= (window or length))
        outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs)
