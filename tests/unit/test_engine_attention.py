import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import PortableAttention
from engine.forward_batch import build_batch
from engine.kv_pool import PagedKVPool
from engine.layout import KVLayout
from engine.requests import Request, SamplingParams, Work

CPU = torch.device("cpu")
HEAD_DIM = 6


def naive(query, keys, values, start, window):
    """One request, one query row and one head at a time, in float64."""
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    output = torch.empty(query.shape, dtype=torch.float64)
    for row in range(query.shape[0]):
        position = start + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            seen = slice(first, position + 1), head * num_kv_heads // num_heads
            scores = keys[seen].double() @ query[row, head].double() / HEAD_DIM**0.5
            output[row, head] = scores.softmax(0) @ values[seen].double()
    return output


def works_of(shares, block_size, generator):
    """A Work for each (start, num_tokens), in blocks scattered over the pool; and the number of blocks."""
    counts = [-(-(start + num) // block_size) for start, num in shares]
    order = torch.randperm(sum(counts), generator=generator).tolist()
    works = []
    for (start, num_tokens), count in zip(shares, counts, strict=True):
        request = Request("r", 0, [0] * (start + num_tokens), start + num_tokens, SamplingParams(max_tokens=1))
        works.append(Work(request, start, num_tokens, [order.pop() for _ in range(count)]))
    return works, sum(counts)


def check(shares, block_size, num_heads, num_kv_heads, window):
    generator = torch.Generator().manual_seed(0)
    works, num_blocks = works_of(shares, block_size, generator)
    pool = PagedKVPool(KVLayout(2, num_kv_heads, HEAD_DIM, block_size, "float32"), num_blocks, CPU)
    pool.keys(1).normal_(generator=generator)
    pool.values(1).normal_(generator=generator)
    batch = build_batch(works, block_size, CPU)
    query = torch.randn(len(batch.token_ids), num_heads, HEAD_DIM, generator=generator)

    attention = PortableAttention(pool, num_heads)
    output = attention.attend(query, 1, attention.plan(batch, window))

    starts = batch.query_starts.tolist()
    for index, work in enumerate(works):
        rows = slice(starts[index], starts[index + 1])
        keys, values = (plane[list(work.block_ids)].flatten(0, 1) for plane in (pool.keys(1), pool.values(1)))
        expected = naive(query[rows], keys, values, work.start, window)
        torch.testing.assert_close(output[rows].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 5, 64, 1000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_mixed_batch(num_heads, num_kv_heads, window):
    # Prompts (also longer than one query chunk), chunks that start within a block, and decodes near and far.
    shares = [(0, 1), (0, 150), (37, 70), (15, 1), (16, 1), (400, 1), (3, 13), (0, 64), (200, 1)]
    check(shares, 16, num_heads, num_kv_heads, window)


@settings(max_examples=40, deadline=None)
@given(
    shares=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 80) | st.just(1)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 16]),
    window=st.none() | st.integers(1, 100),
)
def test_any_batch(shares, block_size, window):
    check(shares, block_size, 4, 2, window)
