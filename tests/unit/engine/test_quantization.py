"""8-bit pools against numpy: a second reading of the bytes, and bounds on what rounding may lose."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.kv_pool import PagedKVPool
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout
from tests.unit.engine.in_one_test import for_each

CPU = torch.device("cpu")
DTYPES = ["int8", "fp8_e4m3"]
LARGEST = {"int8": 127, "fp8_e4m3": 448}


def numbers(dtype):
    """The number that each of the 256 bytes stands for."""
    if dtype == "int8":
        return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float64)
    table = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        magnitude = (8 + mantissa) / 8 * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        table.append(-magnitude if byte & 128 else magnitude)
    table[0x7F] = table[0xFF] = np.nan
    return np.array(table)


def step(dtype, magnitude, scale):
    """The distance between neighbouring numbers around a magnitude."""
    if dtype == "int8":
        return np.broadcast_to(scale, magnitude.shape)
    in_scales = np.maximum(magnitude / np.maximum(scale, 1e-300), 2.0**-6)
    return 2.0 ** (np.floor(np.log2(in_scales)) - 3) * scale


def caches_of(pool, block, layer=0):
    """Data [2, block_size, heads, head_dim] uint8 and scales [2, heads] of a block, cut out of its bytes."""
    layout = pool.layout
    raw = np.frombuffer(b"".join(pool.read(layer, [block])), np.uint8).reshape(2, layout.cache_shape.num_bytes)
    num_data = layout.block_size * layout.num_kv_heads * layout.head_dim
    data = raw[:, :num_data].reshape(2, layout.block_size, layout.num_kv_heads, layout.head_dim)
    return data, raw[:, num_data:].copy().view(np.float32)


def gathered(pool, blocks, layer=0):
    return np.stack([cache.double().numpy() for cache in pool.gather(layer, torch.tensor(blocks))])


def random_tokens(num_tokens, layout, seed=0, spread=1.0):
    """[2, T, heads, head_dim]; the magnitude varies from token to token and from head to head."""
    generator = np.random.default_rng(seed)
    shape = (2, num_tokens, layout.num_kv_heads, layout.head_dim)
    sizes = np.exp(generator.normal(0, spread, (2, num_tokens, layout.num_kv_heads, 1)))
    return (generator.normal(0, 1, shape) * sizes).astype(np.float32)


def store(pool, slots, tokens, layer=0):
    pool.store(layer, torch.tensor(slots), *torch.from_numpy(tokens))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_reads_as_the_number_it_stands_for(dtype):
    layout = KVLayout.uniform(1, 2, 32, 8, dtype)
    pool = PagedKVPool(layout, 1, CPU)
    every_byte = bytes(range(256))
    scales = np.array([0.5, 3.0, 0.25, 7.0], np.float32).tobytes()
    cache_k, cache_v = every_byte * 2 + scales[:8], every_byte[::-1] * 2 + scales[8:]
    pool.write(0, [0], memoryview(cache_k), memoryview(cache_v))
    keys, values = gathered(pool, [0])
    table = numbers(dtype)
    finite = ~np.isnan(table)
    bytes_in_k = np.frombuffer(every_byte * 2, np.uint8).reshape(8, 2, 32)
    bytes_in_v = np.frombuffer(every_byte[::-1] * 2, np.uint8).reshape(8, 2, 32)
    for actual, raw, first, second in ((keys[0], bytes_in_k, 0.5, 3.0), (values[0], bytes_in_v, 0.25, 7.0)):
        for head, scale in ((0, first), (1, second)):
            mask = finite[raw[:, head]]
            assert np.array_equal(actual[:, head][mask], (table[raw[:, head]] * scale)[mask])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_is_rounded_to_the_nearest_number_of_its_block_and_head(dtype, compute_dtype):
    layout = KVLayout.uniform(2, 3, 8, 4, dtype)
    pool = PagedKVPool(layout, 6, CPU, compute_dtype)
    tokens = random_tokens(10, layout)
    blocks = [5, 0, 3]
    store(pool, [blocks[at // 4] * 4 + at % 4 for at in range(10)], tokens, layer=1)
    for index, block in enumerate(blocks):
        mine = tokens[:, index * 4 : index * 4 + 4].astype(np.float64)
        data, scales = caches_of(pool, block, layer=1)
        expected_scales = np.abs(mine).max(axis=(1, 3)) / LARGEST[dtype]
        np.testing.assert_allclose(scales, expected_scales, rtol=1e-6)
        restored = numbers(dtype)[data][:, : mine.shape[1]] * scales[:, None, :, None].astype(np.float64)
        bound = step(dtype, np.abs(mine), scales[:, None, :, None].astype(np.float64)) / 2
        assert (np.abs(restored - mine) <= bound * 1.0001).all()
        seen = gathered(pool, [block], layer=1)[:, 0, : mine.shape[1]]
        rounding = 2.0**-24 if compute_dtype == torch.float32 else 2.0**-8
        np.testing.assert_allclose(seen, restored, rtol=rounding)
    assert not np.frombuffer(b"".join(pool.read(0, range(6))), np.uint8).any()
    assert not np.frombuffer(b"".join(pool.read(1, [1, 2, 4])), np.uint8).any()


@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_chunks_lose_at_most_half_a_step_for_each_growth(cuts, dtype, seed):
    layout = KVLayout.uniform(1, 2, 4, 4, dtype)
    num_tokens = sum(cuts)
    num_blocks = layout.num_blocks_for(num_tokens)
    pool = PagedKVPool(layout, num_blocks, CPU)
    tokens = random_tokens(num_tokens, layout, seed)
    budget = np.zeros((2, num_blocks * 4, 2, 1))  # how far each token may be off
    scales, start = np.zeros((2, num_blocks, 2)), 0
    for length in cuts:
        end = start + length
        store(pool, list(range(start, end)), tokens[:, start:end])
        for block in range(start // 4, -(-end // 4)):
            _, new = caches_of(pool, block)
            held = tokens[:, block * 4 : min(end, block * 4 + 4)]
            np.testing.assert_allclose(new, np.abs(held).max(axis=(1, 3)) / LARGEST[dtype], rtol=1e-6)
            grew = (new > scales[:, block]) | (scales[:, block] == 0)
            largest = np.broadcast_to(np.abs(held).max(axis=(1, 3))[:, None, :, None], (2, 4, 2, 1))
            half = step(dtype, largest, new[:, None, :, None].astype(np.float64)) / 2
            is_there = np.arange(block * 4, block * 4 + 4) < end
            is_new = np.arange(block * 4, block * 4 + 4) >= start
            rounded = is_there[None, :, None, None] & (grew[:, None, :, None] | is_new[None, :, None, None])
            budget[:, block * 4 : block * 4 + 4] += half * rounded
            scales[:, block] = new
        start = end
    restored = gathered(pool, list(range(num_blocks))).reshape(2, -1, 2, 4)[:, :num_tokens]
    assert (np.abs(restored - tokens) <= budget[:, :num_tokens] * 1.0001 + 1e-12).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_whole_blocks_give_the_bytes_of_one_prompt(dtype):
    layout = KVLayout.uniform(1, 2, 4, 4, dtype)
    at_once, in_chunks = PagedKVPool(layout, 3, CPU), PagedKVPool(layout, 3, CPU)
    tokens = random_tokens(12, layout)
    store(at_once, list(range(12)), tokens)
    store(in_chunks, list(range(4)), tokens[:, :4])
    store(in_chunks, list(range(4, 12)), tokens[:, 4:])
    assert b"".join(at_once.read(0, range(3))) == b"".join(in_chunks.read(0, range(3)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_smaller_tokens_leave_the_bytes_of_earlier_ones_alone(dtype):
    layout = KVLayout.uniform(1, 2, 4, 8, dtype)
    pool = PagedKVPool(layout, 1, CPU)
    tokens = random_tokens(8, layout)
    tokens[:, 0] *= 100
    store(pool, [0, 1, 2], tokens[:, :3])
    before, scales = caches_of(pool, 0)
    for offset in range(3, 8):
        store(pool, [offset], tokens[:, offset : offset + 1])
    after, scales_after = caches_of(pool, 0)
    assert np.array_equal(after[:, :3], before[:, :3])
    assert np.array_equal(scales_after, scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_in_its_second_life_is_as_good_as_new(dtype):
    layout = KVLayout.uniform(1, 2, 4, 4, dtype)
    used, fresh = PagedKVPool(layout, 2, CPU), PagedKVPool(layout, 2, CPU)
    store(used, list(range(8)), random_tokens(8, layout, seed=1) * 1000)
    small = random_tokens(3, layout, seed=2)
    for pool in (used, fresh):
        store(pool, [4, 5], small[:, :2])
        store(pool, [6], small[:, 2:])
    assert np.array_equal(gathered(used, [1])[:, :, :3], gathered(fresh, [1])[:, :, :3])
    assert np.array_equal(caches_of(used, 1)[1], caches_of(fresh, 1)[1])
    assert np.abs(gathered(used, [0])).max() > 100


@given(
    steps=st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_a_request_gets_the_same_bytes_whoever_else_is_in_the_step(steps, dtype, seed):
    layout = KVLayout.uniform(1, 2, 4, 4, dtype)
    blocks = np.random.default_rng(seed).permutation(4 * 9).reshape(4, 9)
    alone, together = PagedKVPool(layout, 4 * 9, CPU), PagedKVPool(layout, 4 * 9, CPU)
    tokens = [random_tokens(6 * len(steps), layout, seed=seed + request, spread=2.0) for request in range(4)]
    done = [0] * 4
    for counts in steps:
        slots, parts = [], []
        for request, count in enumerate(counts):
            places = range(done[request], done[request] + count)
            mine = [int(blocks[request][at // 4]) * 4 + at % 4 for at in places]
            if mine:
                store(alone, mine, tokens[request][:, places.start : places.stop])
            slots += mine
            parts.append(tokens[request][:, places.start : places.stop])
            done[request] += count
        if slots:
            store(together, slots, np.concatenate(parts, axis=1))
    assert b"".join(alone.read(0, range(4 * 9))) == b"".join(together.read(0, range(4 * 9)))


@for_each(dtype=DTYPES, tiny=[0.0, 1e-44, 1e-38])
def test_nothing_or_almost_nothing_is_stored_as_zero_and_grows_later(dtype, tiny):
    layout = KVLayout.uniform(1, 2, 4, 4, dtype)
    pool = PagedKVPool(layout, 1, CPU)
    tokens = random_tokens(4, layout)
    tokens[:, :2] = tiny
    store(pool, [0, 1], tokens[:, :2])
    assert np.abs(gathered(pool, [0])).max() <= tiny
    assert not caches_of(pool, 0)[0].any()
    store(pool, [2, 3], tokens[:, 2:])
    assert np.abs(gathered(pool, [0])[:, 0, :2]).max() == 0
    np.testing.assert_allclose(gathered(pool, [0])[:, 0, 2:], tokens[:, 2:], atol=np.abs(tokens).max() / 16)


@for_each(dtype=DTYPES, broken=[np.nan, np.inf])
def test_what_is_not_a_number_shows_in_its_own_block_and_head_alone(dtype, broken):
    layout = KVLayout.uniform(1, 2, 4, 4, dtype)
    pool = PagedKVPool(layout, 2, CPU)
    tokens = random_tokens(8, layout)
    tokens[0, 1, 1, 2] = broken
    store(pool, list(range(8)), tokens)
    finite = np.isfinite(gathered(pool, [0, 1]))
    assert not finite[0, 0, 1, 1, 2]
    assert finite[0, :, :, 0].all()
    assert finite[0, 1].all()
    assert finite[1].all()
    store(pool, [0, 1], tokens[:, 4:6])
    assert np.isfinite(gathered(pool, [0])).all()


def test_slots_that_come_again_in_another_tensor_are_looked_at_anew():
    layout = KVLayout.uniform(2, 1, 4, 4, "int8")
    pool = PagedKVPool(layout, 2, CPU)
    tokens = random_tokens(4, layout)
    for slots in ([0, 1, 2, 3], [4, 5, 6, 7]):
        tensor = torch.tensor(slots)
        for layer in range(2):
            pool.store(layer, tensor, *torch.from_numpy(tokens))
    caches = [b"".join(pool.read(layer, [block])) for layer in range(2) for block in range(2)]
    assert len(set(caches)) == 1
    assert any(caches[0])


def test_blocks_whose_scales_would_not_be_aligned_are_refused_with_their_sizes():
    with pytest.raises(SettingsError, match=r"int8 block of 3 tokens, 1 heads and head size 5 takes 15 bytes, .* of 4"):
        PagedKVPool(KVLayout.uniform(1, 1, 5, 3, "int8"), 1, CPU)
    PagedKVPool(KVLayout.uniform(1, 1, 5, 3, "float32"), 1, CPU)


@for_each(dtype=DTYPES, magnitude=[0.1, 1.0, 30.0])
def test_steps_that_are_known_to_go_to_blocks_of_their_own_leave_the_same_bytes(dtype, magnitude):
    layout = KVLayout.uniform(1, 3, 16, 8, dtype)
    pools = [PagedKVPool(layout, 6, CPU) for _ in range(2)]
    before, tokens = random_tokens(24, layout, seed=1), magnitude * random_tokens(4, layout, seed=2)
    slots = torch.tensor([8 + 5, 16 + 0, 40 + 0, 24 + 7])  # two that go on, one over a block's end, and a new one
    for pool, begins in zip(pools, (True, False), strict=True):
        store(pool, range(8, 32), before)
        store(pool, [40], torch.full(tokens[:, :1].shape, torch.inf).numpy())  # of who had that block before
        if begins:
            pool.begin_steps(slots)
        pool.store(0, slots, *torch.from_numpy(tokens))
    for block in range(6):
        assert pools[0].read(0, [block]) == pools[1].read(0, [block])


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
def test_caches_as_they_are_stored_are_numbers_and_scales(dtype):
    layout = KVLayout.uniform(1, 3, 16, 8, dtype)
    pool = PagedKVPool(layout, 4, CPU)
    store(pool, range(5, 29), random_tokens(24, layout))
    for caches, expected in zip(pool.scaled_caches(0), gathered(pool, range(4)), strict=True):
        values = caches.numbers.float() * (1 if dtype == "float32" else caches.scales[:, None, :, None])
        np.testing.assert_allclose(values.numpy(), expected, rtol=1e-6, atol=1e-12)
    pool.clear(0, 4)
    assert not gathered(pool, range(4)).any()
