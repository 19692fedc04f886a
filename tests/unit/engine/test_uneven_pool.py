"""Pools whose layers are of unlike widths, some without V, that hold layers of the middle of a model: against pools of
one layer and one width, and a plain reading of the layout."""

import itertools

import numpy as np
import pytest
import torch

from engine.attention.backends import choose_attention
from engine.attention.native import NativeAttention
from engine.attention.paged import PortableAttention
from engine.attention.tiled import TiledAttention
from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import build_batch
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout, Widths
from serving_core.requests import Share
from tests.unit.engine.in_one_test import for_each
from tests.unit.engine.some_heads import spans_of

CPU = torch.device("cpu")
DTYPES = ["float32", "bfloat16", "int8", "fp8_e4m3"]
WIDTHS = (Widths(4, 4), Widths(12, 8), Widths(20, 0), Widths(4, 12), Widths(4, 4))
FIRST, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS = 5, 7, 3, 4
LAYERS = range(FIRST, FIRST + len(WIDTHS))
SCATTERED = [[], [3], [2, 3, 4], [6, 0, 1, 5]]


def uneven_pool(dtype):
    return PagedKVPool(KVLayout(FIRST, WIDTHS, NUM_HEADS, BLOCK_SIZE, dtype), NUM_BLOCKS, CPU)


def random_pool(dtype, seed=0):
    """A pool of random bytes, and the same bytes: for each layer K and V as [num_blocks, bytes of a cache]."""
    pool, generator, raw = uneven_pool(dtype), np.random.default_rng(seed), {}
    for layer in LAYERS:
        sizes = [(NUM_BLOCKS, cache.num_bytes) for cache in pool.layout.cache_shapes(layer)]
        raw[layer] = [generator.integers(0, 256, size, np.uint8) for size in sizes]
        pool.write(layer, range(NUM_BLOCKS), *(memoryview(caches.tobytes()) for caches in raw[layer]))
    return pool, raw


def tokens_of(widths, num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, NUM_HEADS, width, generator=generator) for width in widths]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_layer_reads_what_a_pool_of_one_width_reads(dtype):
    """Chunks that end within blocks, and single tokens."""
    pool, blocks = uneven_pool(dtype), torch.tensor([4, 0, 6])
    slots = (blocks.repeat_interleave(BLOCK_SIZE) * BLOCK_SIZE).add_(torch.arange(BLOCK_SIZE).repeat(3))
    cuts = list(itertools.pairwise([0, 4, 5, 9]))
    for start, stop in cuts:
        step = slots[start:stop]
        for layer, widths in zip(LAYERS, WIDTHS, strict=True):
            keys, values = tokens_of(widths, len(slots), layer)
            pool.store(layer, step, keys[start:stop].to(pool.compute_dtype), values[start:stop].to(pool.compute_dtype))
    for layer, widths in zip(LAYERS, WIDTHS, strict=True):
        for kind, width in enumerate(widths):
            gathered = pool.gather(layer, blocks)[kind]
            assert gathered.shape == (3, BLOCK_SIZE, NUM_HEADS, width)
            if not width:
                continue
            alone = PagedKVPool(KVLayout.uniform(1, NUM_HEADS, width, BLOCK_SIZE, dtype), NUM_BLOCKS, CPU)
            tokens = tokens_of(widths, len(slots), layer)[kind].to(pool.compute_dtype)
            for start, stop in cuts:
                alone.store(0, slots[start:stop], tokens[start:stop], tokens[start:stop])
            assert torch.equal(gathered, alone.gather(0, blocks)[kind])
            assert bytes(pool.read(layer, [0, 4, 6])[kind]) == bytes(alone.read(0, [0, 4, 6])[kind])
            assert not any(pool.read(layer, [1, 2, 3, 5])[kind])


def test_the_views_of_a_layer_are_of_its_widths():
    pool = uneven_pool("float32")
    for layer, widths in zip(LAYERS, WIDTHS, strict=True):
        shapes = [(NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, width) for width in widths]
        assert [tuple(view.shape) for view in (pool.keys(layer), pool.values(layer))] == shapes
    pool.values(8)[2] = 1.0
    assert bytes(pool.read(8, [2])[1]) == np.ones(BLOCK_SIZE * NUM_HEADS * 12, np.float32).tobytes()


@for_each(dtype=DTYPES, block_ids=SCATTERED)
def test_blocks_are_read_and_written_as_bytes_and_as_tensors(dtype, block_ids):
    pool, raw = random_pool(dtype)
    (by_bytes, before), (by_tensors, _) = random_pool(dtype, seed=1), random_pool(dtype, seed=1)
    for layer in LAYERS:
        caches = pool.read(layer, block_ids)
        assert [bytes(kind) for kind in caches] == [kind[block_ids].tobytes() for kind in raw[layer]]
        by_bytes.write(layer, block_ids, *caches)
        by_tensors.write_tensors(layer, block_ids, *pool.read_tensors(layer, block_ids))
        for kind in (0, 1):
            before[layer][kind][block_ids] = raw[layer][kind][block_ids]
            for target in (by_bytes, by_tensors):
                assert bytes(target.read(layer, range(NUM_BLOCKS))[kind]) == before[layer][kind].tobytes()


@for_each(dtype=DTYPES, block_ids=SCATTERED)
def test_slices_of_heads_read_their_share_of_every_layer_and_put_together_the_whole(dtype, block_ids):
    source, raw = random_pool(dtype)
    target, before = random_pool(dtype, seed=1)
    for heads in (range(1), range(1, 3), range(3, 4)):
        ours, theirs = source.heads(heads), target.heads(heads)
        assert ours.layout == source.layout.with_heads(len(heads))
        for layer in LAYERS:
            caches = ours.read(layer, block_ids)
            for kind, cache, read in zip(raw[layer], source.layout.cache_shapes(layer), caches, strict=True):
                spans = list(spans_of(cache, heads))
                cut = [kind[block][start:stop].tobytes() for block in block_ids for start, stop in spans]
                assert bytes(read) == b"".join(cut)
            theirs.write(layer, block_ids, *caches)
    for layer in LAYERS:
        for kind in (0, 1):
            before[layer][kind][block_ids] = raw[layer][kind][block_ids]
            assert bytes(target.read(layer, range(NUM_BLOCKS))[kind]) == before[layer][kind].tobytes()


@pytest.mark.parametrize("heads", [range(NUM_HEADS), range(1, 3)])
def test_caches_of_another_layer_are_refused_with_both_sizes(heads):
    pool, raw = random_pool("float32")
    store = pool.heads(heads)
    keys, values = (2 * cache.num_bytes for cache in store.layout.cache_shapes(6))
    expected = 2 * store.layout.cache_shapes(7)[0].num_bytes
    with pytest.raises(ValueError, match=f"{keys} and {values} bytes for 2 blocks of K and V, not {expected} and 0"):
        store.write(7, [1, 2], *store.read(6, [1, 2]))
    assert bytes(pool.read(7, range(NUM_BLOCKS))[0]) == raw[7][0].tobytes()


@for_each(layer=[0, 4, 10])
def test_layers_that_the_pool_does_not_hold_are_not_there(layer):
    pool = uneven_pool("float32")
    for store in (pool, pool.heads(range(2))):
        with pytest.raises((KeyError, ValueError)):
            store.read(layer, [0])
        with pytest.raises((KeyError, ValueError)):
            store.write(layer, [0], memoryview(b""), memoryview(b""))


def test_quantized_blocks_of_an_odd_size_are_refused_whichever_layer_has_them():
    layout = KVLayout(0, (Widths(4, 4), Widths(4, 5)), 1, 3, "int8")
    with pytest.raises(SettingsError, match=r"int8 block of 3 tokens, 1 heads and head size 5 takes 15 bytes, .* of 4"):
        PagedKVPool(layout, 1, CPU)


# ---- attention ----

REFUSAL = r"K and V must be of one width in all layers to be computed with: .*in layer"


@for_each(
    backend=[choose_attention, NativeAttention, TiledAttention],
    widths=[WIDTHS, (Widths(16, 0),) * 2, (Widths(16, 16), Widths(32, 32))],
)
def test_attention_refuses_unlike_widths_when_it_is_made(backend, widths):
    pool = PagedKVPool(KVLayout(0, widths, 2, 16, "float32"), 2, CPU)
    with pytest.raises(SettingsError, match=REFUSAL):
        backend(pool, 4)


@pytest.mark.parametrize("backend", [choose_attention, PortableAttention])
def test_attention_takes_layers_of_the_middle_of_a_model(backend):
    """They are those of a model of these layers alone."""
    layout = KVLayout.uniform(9, 2, 16, 16, "float32").with_layers(range(5, 8))
    pools = [PagedKVPool(layout, 3, CPU), PagedKVPool(KVLayout.uniform(3, 2, 16, 16, "float32"), 3, CPU)]
    generator = torch.Generator().manual_seed(0)
    keys, values, query = (torch.randn(40, num_heads, 16, generator=generator) for num_heads in (2, 2, 4))
    outputs = []
    for pool, layer in zip(pools, (6, 1), strict=True):
        attention = backend(pool, 4)
        pool.store(layer, torch.arange(40), keys, values)
        batch = build_batch([Share([0] * 40, 0, [0, 1, 2], samples=True)], 16, CPU)
        outputs.append(attention.attend(query, layer, attention.plan(batch, None)))
    assert torch.equal(*outputs)
    assert outputs[0].any()
