import mmap

import pytest
import torch

from engine.cache.kv_pool import PagedKVPool
from engine.native.huge_memory import PAGE_BYTES
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout
from tests.unit.engine.in_one_test import for_each

CPU = torch.device("cpu")


def filled_pool(dtype="bfloat16", num_blocks=10):
    pool = PagedKVPool(KVLayout.uniform(2, 3, 4, 5, dtype), num_blocks, CPU)
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        pool.keys(layer).normal_(generator=generator)
        pool.values(layer).normal_(generator=generator)
    return pool


def cache(tensor, block):
    return tensor[block].contiguous().view(torch.uint8).numpy().tobytes()


@for_each(dtype=["float32", "bfloat16", "float16"], block_ids=[[3], [2, 3, 4], [4, 3, 2], [7, 8, 1, 2, 3, 0], []])
def test_read_gives_the_k_planes_and_the_v_caches_in_order(dtype, block_ids):
    pool = filled_pool(dtype)
    for buffer, tensor in zip(pool.read(1, block_ids), (pool.keys(1), pool.values(1)), strict=True):
        assert bytes(buffer) == b"".join(cache(tensor, block) for block in block_ids)
        assert buffer.readonly


@pytest.mark.parametrize("num_blocks", [10, 2000])
def test_large_pools_are_zero_at_first_too_and_start_with_a_huge_page(num_blocks):
    pool = PagedKVPool(KVLayout.uniform(2, 3, 64, 16, "bfloat16"), num_blocks, CPU)
    for layer in range(2):
        assert not pool.keys(layer).any()
        assert not pool.values(layer).any()
        if hasattr(mmap, "MADV_HUGEPAGE") and 2 * pool.keys(layer).nbytes >= PAGE_BYTES:
            assert pool.keys(layer).data_ptr() % PAGE_BYTES == 0
    pool.values(1)[-1] = 1.0
    assert set(bytes(pool.read(1, [num_blocks - 1])[1])) == {0x80, 0x3F}


def test_neighbours_are_read_as_views():
    pool = filled_pool()
    keys, _ = pool.read(0, [4, 5])
    before = bytes(keys)
    pool.keys(0)[4] += 1
    assert bytes(keys) != before


@for_each(block_ids=[[0], [5, 6, 7], [9, 1, 2, 0]])
def test_write_is_the_inverse_of_read(block_ids):
    source, target = filled_pool(), PagedKVPool(KVLayout.uniform(2, 3, 4, 5, "bfloat16"), 12, CPU)
    target.write(1, block_ids, *source.read(1, [3, 7, 8, 2][: len(block_ids)]))
    for block, origin in zip(block_ids, [3, 7, 8, 2], strict=False):
        assert torch.equal(target.keys(1)[block], source.keys(1)[origin])
        assert torch.equal(target.values(1)[block], source.values(1)[origin])
    untouched = [block for block in range(12) if block not in block_ids]
    assert not target.keys(1)[untouched].any()
    assert not target.values(1)[untouched].any()
    assert not target.keys(0).any()


@for_each(lengths=[(-1, 0), (0, 1), (1, -1)])
def test_write_of_another_length_is_refused(lengths):
    pool = filled_pool()
    before = pool.keys(0).clone()
    expected = 2 * pool.layout.cache_shape.num_bytes
    keys, values = (expected + extra for extra in lengths)
    refusal = f"{keys} and {values} bytes for 2 blocks of K and V, not {expected} and {expected}"
    with pytest.raises(ValueError, match=refusal):
        pool.write(0, [1, 2], memoryview(bytes(keys)), memoryview(bytes(values)))
    assert torch.equal(pool.keys(0), before)


def test_store_writes_tokens_at_their_slots():
    pool = PagedKVPool(KVLayout.uniform(2, 3, 4, 5, "float32"), 4, CPU)
    keys, values = torch.randn(3, 3, 4), torch.randn(3, 3, 4)
    pool.store(1, torch.tensor([0, 7, 19]), keys, values)
    assert torch.equal(pool.keys(1)[[0, 1, 3], [0, 2, 4]], keys)
    assert torch.equal(pool.values(1)[[0, 1, 3], [0, 2, 4]], values)
    assert int(pool.keys(1).count_nonzero()) == keys.numel()


def test_a_pool_larger_than_memory_is_refused_with_both_values():
    layout = KVLayout.uniform(100, 100, 128, 1024, "float32")
    gib = layout.block_bytes * 10**6 / 2**30
    with pytest.raises(SettingsError, match=rf"needs {gib:.1f} GiB, and [\d.]+ [KMG]iB of memory are free"):
        PagedKVPool(layout, 10**6, CPU)
