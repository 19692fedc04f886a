"""8-bit KV pools and shares of heads on CUDA against the same on the CPU, which tests/unit compares with numpy."""

import pytest
import torch

from engine.cache.kv_pool import PagedKVPool
from serving_core.layout import KVLayout

DTYPES = ["int8", "fp8_e4m3"]


def pools(dtype):
    """The same tokens, stored in the same three steps, on both devices."""
    layout = KVLayout.uniform(1, 3, 64, 16, dtype)
    both = [PagedKVPool(layout, 8, torch.device(device), torch.bfloat16) for device in ("cpu", "cuda")]
    tokens = torch.randn(2, 100, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for first, last in ((0, 40), (40, 41), (41, 100)):
        for pool in both:
            slots = torch.arange(16 + first, 16 + last, device=pool.device)
            pool.store(0, slots, *tokens[:, first:last].to(pool.device))
    return both


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_values_are_those_of_the_cpu(dtype):
    on_cpu, on_cuda = pools(dtype)
    blocks = torch.tensor([5, 1, 2, 7, 3, 4, 6])
    for ours, theirs in zip(on_cuda.gather(0, blocks.cuda()), on_cpu.gather(0, blocks), strict=True):
        assert ours.is_cuda
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0.07, atol=0.02)  # a tie may be rounded the other way


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_and_shares_of_heads_travel_byte_for_byte(dtype):
    on_cpu, on_cuda = pools(dtype)
    block_ids = [3, 4, 1]
    for heads in (range(3), range(1, 3)):
        source, target = on_cuda.heads(heads), on_cpu.heads(heads)
        tensors = source.read_tensors(0, block_ids)
        assert all(tensor.is_cuda and tensor.dtype == torch.uint8 for tensor in tensors)
        caches = source.read(0, block_ids)
        assert b"".join(caches) == torch.cat(tensors).cpu().numpy().tobytes()
        target.write_tensors(0, block_ids, *tensors)
        assert target.read(0, block_ids) == caches
        source.write(0, [0, 5, 2], *caches)
        assert source.read(0, [0, 5, 2]) == caches
