import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.backends import StepsApart
from engine.attention.native import NativeAttention
from engine.attention.paged import PortableAttention
from engine.attention.tiled import TiledAttention
from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import build_batch
from serving_core.layout import KVLayout
from serving_core.requests import Share
from tests.effort import few, pairwise
from tests.unit.engine.native_kit import attend_in_float64, needs_library

CPU = torch.device("cpu")
HEAD_DIM = 6
FEW_TOKENS = 2
# Prompts (also longer than one query chunk), chunks that start within a block, and decodes near and far.
SIZES = [(0, 1), (0, 150), (37, 70), (15, 1), (16, 1), (400, 1), (3, 13), (0, 64), (200, 1)]


def apart(*args, **scoring):
    return StepsApart(PortableAttention(*args, **scoring), TiledAttention(*args, **scoring), FEW_TOKENS)


BACKENDS = [PortableAttention, TiledAttention, apart]


def shares_of(sizes, block_size, generator):
    """A Share for each (start, num_tokens), in blocks scattered over the pool; and the number of blocks."""
    counts = [-(-(start + num) // block_size) for start, num in sizes]
    order = torch.randperm(sum(counts), generator=generator).tolist()
    shares = [
        Share([0] * num_tokens, start, [order.pop() for _ in range(count)], samples=True)
        for (start, num_tokens), count in zip(sizes, counts, strict=True)
    ]
    return shares, sum(counts)


def check(backend, sizes, block_size, num_heads, num_kv_heads, window, dtype="float32", scale=None, softcap=None):
    generator = torch.Generator().manual_seed(0)
    shares, num_blocks = shares_of(sizes, block_size, generator)
    pool = PagedKVPool(KVLayout.uniform(2, num_kv_heads, HEAD_DIM, block_size, dtype), num_blocks, CPU)
    slots = torch.arange(num_blocks * block_size)
    tokens = torch.randn(2, len(slots), num_kv_heads, HEAD_DIM, generator=generator)
    pool.store(1, slots, *tokens)
    batch = build_batch(shares, block_size, CPU)
    query = torch.randn(len(batch.token_ids), num_heads, HEAD_DIM, generator=generator)

    attention = backend(pool, num_heads, score_scale=scale, softcap=softcap)
    output = attention.attend(query, 1, attention.plan(batch, window))

    starts = batch.query_starts.tolist()
    for index, share in enumerate(shares):
        rows = slice(starts[index], starts[index + 1])
        caches = pool.gather(1, torch.tensor(share.block_ids))
        parts = (query[rows], *(cache.flatten(0, 1) for cache in caches))
        expected = attend_in_float64(*(part.double().numpy() for part in parts), share.start, window, scale, softcap)
        torch.testing.assert_close(output[rows].double(), torch.from_numpy(expected), rtol=0, atol=1e-5)
    if not pool.layout.is_quantized:
        spoil(pool, shares[:-1])
        again = attention.attend(query, 1, attention.plan(batch, window))
        assert torch.equal(again[: starts[-2]], output[: starts[-2]]), "others' numbers were seen, which are none now"


def spoil(pool, shares):
    """Makes all that is none of theirs not a number, the slots behind their last ones too."""
    block_size = pool.layout.block_size
    theirs = torch.zeros(pool.num_blocks * block_size, dtype=torch.bool)
    for share in shares:
        positions = torch.arange(share.start + share.num_tokens)
        theirs[torch.tensor(share.block_ids)[positions // block_size] * block_size + positions % block_size] = True
    for cache in (pool.keys(1), pool.values(1)):
        cache.flatten(0, 1)[~theirs] = torch.nan


@pairwise(heads=[(4, 4), (6, 2), (3, 1)], window=[None, 1, 5, 64, 1000], backend=BACKENDS)
def test_mixed_batch(heads, window, backend):
    check(backend, SIZES, 16, *heads, window)


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param(NativeAttention, marks=needs_library)])
@pytest.mark.parametrize("softcap", few([1.5, None]))
def test_a_scale_and_a_cap_of_the_models_own(backend, softcap):
    check(backend, SIZES, 16, 6, 2, None, scale=0.9, softcap=softcap)
    check(backend, SIZES, 16, 6, 2, 50, softcap=softcap)


@pairwise(dtype=["int8", "fp8_e4m3"], window=[None, 64], backend=BACKENDS)
def test_mixed_batch_over_a_quantized_pool(dtype, window, backend):
    check(backend, SIZES, 16, 6, 2, window, dtype)


@given(
    backend=st.sampled_from(BACKENDS),
    sizes=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 80) | st.just(1)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 16, 300]),
    window=st.none() | st.integers(1, 100),
)
def test_any_batch(backend, sizes, block_size, window):
    check(backend, sizes, block_size, 4, 2, window)


@pytest.mark.parametrize(
    ("counts", "divided"),
    [
        ([1, 2, 9, 3], [("portable", 3), ("tiled", 12)]),
        ([1, 2, 9, 1], [("portable", 3), ("tiled", 10)]),  # the last one lies behind a prompt
        ([9, 1, 2], [("tiled", 12)]),
        ([1, 2, 1], [("portable", 4)]),
        ([3, 9], [("tiled", 12)]),
    ],
)
def test_steps_at_the_head_of_a_batch_have_a_backend_of_their_own(counts, divided):
    shares, num_blocks = shares_of([(5, count) for count in counts], 16, torch.Generator().manual_seed(0))
    pool = PagedKVPool(KVLayout.uniform(1, 1, HEAD_DIM, 16, "float32"), num_blocks, CPU)
    plan = apart(pool, 1).plan(build_batch(shares, 16, CPU), None)
    assert [(part.backend.name, len(range(sum(counts))[part.rows])) for part in plan] == divided


IN_GATE = {(16, None), (24, 40), (1024, 300)}


@pytest.mark.parametrize(
    ("block_size", "window"),
    [
        pytest.param(*pair, marks=[] if pair in IN_GATE else pytest.mark.nightly)
        for pair in itertools.product((16, 24, 1024), (None, 40, 300))
    ],
)
def test_in_tiles_the_bits_of_a_row_depend_on_no_other(block_size, window):
    """Among single rows of other lengths, at the end of a chunk, and whatever blocks of others hold."""
    draw = random.Random(0)
    sizes = [(draw.randrange(900), 1) for _ in range(21)] + [(300, 150)]
    generator = torch.Generator().manual_seed(0)
    shares, num_blocks = shares_of(sizes, block_size, generator)
    pool = PagedKVPool(KVLayout.uniform(1, 2, HEAD_DIM, block_size, "bfloat16"), num_blocks + 1, CPU)
    caches = pool.keys(0), pool.values(0)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    attention = TiledAttention(pool, 6)
    batch = build_batch(shares, block_size, CPU)
    query = torch.randn(len(batch.token_ids), 6, HEAD_DIM, generator=generator).bfloat16()
    together = attention.attend(query, 0, attention.plan(batch, window))
    assert any(isinstance(group.rows, torch.Tensor) for group in attention.plan(batch, window))

    for row in (*range(21), len(query) - 1):
        share = shares[min(row, 21)]
        position = share.start + share.num_tokens - 1
        kept = [cache.clone() for cache in caches]
        for cache in caches:
            others = torch.ones(num_blocks + 1, dtype=torch.bool)
            others[share.block_ids] = False
            cache[others] = torch.nan
            cache[share.block_ids[position // block_size], position % block_size + 1 :] = torch.nan
        only = build_batch([Share([0], position, share.block_ids, samples=True)], block_size, CPU)
        alone = attention.attend(query[row : row + 1], 0, attention.plan(only, window))
        assert torch.equal(alone[0], together[row])
        for cache, before in zip(caches, kept, strict=True):
            cache.copy_(before)
