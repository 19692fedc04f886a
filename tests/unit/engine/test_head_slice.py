"""Shares of a pool's heads against a plain reading of the layout with numpy."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.kv_pool import PagedKVPool
from serving_core.layout import KVLayout
from tests.unit.engine.in_one_test import for_each

CPU = torch.device("cpu")
DTYPES = ["float32", "bfloat16", "int8", "fp8_e4m3"]
NUM_BLOCKS = 9


def random_pool(dtype, num_kv_heads, seed=0, num_layers=2):
    """A pool of random bytes, and the same bytes as [layers, 2, num_blocks, cache_bytes]."""
    layout = KVLayout.uniform(num_layers, num_kv_heads, 4, 3, dtype)
    pool = PagedKVPool(layout, NUM_BLOCKS, CPU)
    shape = (num_layers, 2, NUM_BLOCKS, layout.cache_shape.num_bytes)
    raw = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    for layer in range(num_layers):
        pool.write(layer, range(NUM_BLOCKS), *(memoryview(caches.tobytes()) for caches in raw[layer]))
    return pool, raw


def some_heads(cache, layout, heads):
    """The bytes of these heads of one cache, one head of one token at a time."""
    size = layout.head_dim * {"float32": 4, "bfloat16": 2}.get(layout.dtype, 1)
    parts = []
    for token in range(layout.block_size):
        for head in heads:
            start = (token * layout.num_kv_heads + head) * size
            parts.append(cache[start : start + size])
    if layout.dtype in ("int8", "fp8_e4m3"):
        first_scale = layout.block_size * layout.num_kv_heads * size
        parts += [cache[first_scale + 4 * head : first_scale + 4 * head + 4] for head in heads]
    return b"".join(part.tobytes() for part in parts)


head_ranges = st.integers(1, 6).flatmap(
    lambda num: st.tuples(st.just(num), st.lists(st.integers(1, num), max_size=3).map(sorted))
)
block_lists = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS)


@given(dtype=st.sampled_from(DTYPES), sizes=head_ranges, block_ids=block_lists)
def test_any_slices_read_their_heads_and_put_together_the_whole(dtype, sizes, block_ids):
    num_heads, cuts = sizes
    bounds = [0, *sorted(set(cuts) - {num_heads}), num_heads]
    source, raw = random_pool(dtype, num_heads)
    target, before = random_pool(dtype, num_heads, seed=1)
    for start, stop in itertools.pairwise(bounds):
        heads = range(start, stop)
        mine = source.heads(heads)
        caches = mine.read(1, block_ids)
        expected = [some_heads(raw[1, kind, block], source.layout, heads) for kind in (0, 1) for block in block_ids]
        assert b"".join(caches) == b"".join(expected)
        assert [len(kind) for kind in caches] == [len(block_ids) * mine.layout.cache_shape.num_bytes] * 2
        target.heads(heads).write(1, block_ids, *caches)
    after = np.frombuffer(b"".join(target.read(1, range(NUM_BLOCKS))), np.uint8).reshape(before[1].shape)
    others = [block for block in range(NUM_BLOCKS) if block not in block_ids]
    assert np.array_equal(after[:, block_ids], raw[1][:, block_ids])
    assert np.array_equal(after[:, others], before[1][:, others])
    assert b"".join(target.read(0, range(NUM_BLOCKS))) == before[0].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_whose_scales_together_are_as_wide_as_a_word(dtype):
    layout = KVLayout.uniform(1, 4, 64, 16, dtype)
    pool = PagedKVPool(layout, 3, CPU)
    raw = np.random.default_rng(0).integers(0, 256, (2, 3, layout.cache_shape.num_bytes), np.uint8)
    pool.write(0, range(3), *(memoryview(caches.tobytes()) for caches in raw))
    for heads in (range(2), range(2, 4), range(1, 3)):
        some = pool.heads(heads).read(0, [2, 0])
        for caches, ours in zip(raw, some, strict=True):
            assert bytes(ours) == b"".join(some_heads(caches[block], layout, heads) for block in (2, 0))
        pool.heads(heads).write(0, [2, 0], *some)
    assert [bytes(caches) for caches in pool.read(0, range(3))] == [caches.tobytes() for caches in raw]


@pytest.mark.parametrize("dtype", DTYPES)
def test_writing_a_slice_leaves_the_other_heads_alone(dtype):
    pool, raw = random_pool(dtype, 5)
    layout = pool.layout
    mine = pool.heads(range(1, 3))
    mine.write(0, [4, 2], *[memoryview(bytes(2 * mine.layout.cache_shape.num_bytes))] * 2)
    after = np.frombuffer(b"".join(pool.read(0, range(NUM_BLOCKS))), np.uint8).reshape(raw[0].shape)
    for kind in (0, 1):
        for block in range(NUM_BLOCKS):
            for head in range(5):
                was = some_heads(raw[0, kind, block], layout, [head])
                is_cleared = block in (2, 4) and head in (1, 2)
                assert some_heads(after[kind, block], layout, [head]) == (bytes(len(was)) if is_cleared else was)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_a_slice_read_back_on_a_rank_that_holds_its_heads_alone(dtype):
    whole = PagedKVPool(KVLayout.uniform(1, 4, 4, 3, dtype), 4, CPU)
    rank = PagedKVPool(KVLayout.uniform(1, 2, 4, 3, dtype), 6, CPU)
    whole.store(
        0,
        torch.arange(12),
        *torch.randn(2, 12, 4, 4, generator=torch.Generator().manual_seed(0)).to(whole.compute_dtype),
    )
    rank.write(0, [5, 0, 2], *whole.heads(range(1, 3)).read(0, [3, 1, 0]))
    for ours, theirs in zip(
        rank.gather(0, torch.tensor([5, 0, 2])), whole.gather(0, torch.tensor([3, 1, 0])), strict=True
    ):
        assert torch.equal(ours, theirs[:, :, 1:3])
        assert ours.any()


def test_a_slice_of_a_slice_counts_from_its_own_first_head():
    pool, _ = random_pool("int8", 6)
    inner = pool.heads(range(1, 6)).heads(range(2, 4))
    assert inner.layout == pool.layout.with_heads(2)
    assert b"".join(inner.read(1, [3, 4, 0])) == b"".join(pool.heads(range(3, 5)).read(1, [3, 4, 0]))


def test_all_heads_are_the_pool_itself():
    pool, _ = random_pool("bfloat16", 3)
    assert pool.heads(range(3)) is pool
    some = pool.heads(range(1, 3))
    assert some.heads(range(2)) is some


@for_each(heads=[range(0), range(2, 2), range(-1, 1), range(2, 4), range(0, 3, 2), range(2, 0, -1)])
def test_heads_that_are_not_there_are_refused(heads):
    pool, _ = random_pool("float32", 3)
    with pytest.raises(ValueError, match="are not neighbouring heads of 3"):
        pool.heads(heads)


@for_each(dtype=DTYPES, block_ids=[[], [3], [2, 3, 4], [7, 8, 1, 2, 3, 0]])
def test_tensors_hold_the_bytes_of_the_buffers(dtype, block_ids):
    pool, _ = random_pool(dtype, 3)
    for store in (pool, pool.heads(range(1, 3))):
        buffers, tensors = store.read(1, block_ids), store.read_tensors(1, block_ids)
        assert [bytes(buffer) for buffer in buffers] == [tensor.numpy().tobytes() for tensor in tensors]
        assert all(buffer.readonly for buffer in buffers)
        assert all(tensor.dtype == torch.uint8 and tensor.dim() == 1 for tensor in tensors)
        target, _ = random_pool(dtype, 3, seed=1)
        other = target.heads(range(1, 3)) if store is not pool else target
        received = [torch.cat([torch.zeros(1, dtype=torch.uint8), caches])[1:] for caches in tensors]
        other.write_tensors(1, block_ids, *received)  # which do not start on a multiple of anything
        assert b"".join(other.read(1, block_ids)) == b"".join(buffers)


def test_tensors_of_a_pool_are_views_of_it():
    pool, _ = random_pool("int8", 3)
    for tensor in pool.read_tensors(0, [4, 5]):
        tensor.zero_()
    assert not any(b"".join(pool.read(0, [4, 5])))
    assert all(any(cache) for cache in pool.read(0, [3, 6]))


@pytest.mark.parametrize("extra", [-1, 1])
def test_bytes_of_another_length_are_refused(extra):
    pool, raw = random_pool("int8", 3)
    for store in (pool, pool.heads(range(2))):
        expected = 2 * store.layout.cache_shape.num_bytes
        refusal = f"{expected} and {expected + extra} bytes for 2 blocks of K and V, not {expected} and {expected}"
        buffers = [memoryview(bytes(length)) for length in (expected, expected + extra)]
        with pytest.raises(ValueError, match=refusal):
            store.write(0, [1, 2], *buffers)
        with pytest.raises(ValueError, match=refusal):
            store.write_tensors(0, [1, 2], *(torch.zeros(len(each), dtype=torch.uint8) for each in buffers))
    assert b"".join(pool.read(0, range(NUM_BLOCKS))) == raw[0].tobytes()
