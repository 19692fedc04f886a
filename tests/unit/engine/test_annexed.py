"""Tiles that other pools hold: the bits are those of one pool."""

import pytest
import torch

from engine.attention.annexed import TILE_KEYS, AnnexedAttention, PartialAttention
from engine.attention.native import NativeAttention
from engine.cache.kv_pool import PagedKVPool
from tests.unit.engine.native_kit import CPU, LAYER, Scene, needs_library, runnable_variants

pytestmark = needs_library

# A single token far behind, at the borders of tiles, and chunks over several tiles.
SIZES = [(1100, 1), (1023, 1), (1024, 1), (1000, 90), (1024, 300)]
ANNEXES = [(1,), (2, 1), (1, 1, 1), (3,), (1, 2)]  # tiles of each, request by request


class PoolAnnex:
    """Tiles in another pool of this process."""

    def __init__(self, attention, num_tiles, block_ids):
        self.partial, self.num_tiles, self._block_ids = PartialAttention(attention), num_tiles, block_ids

    def ask(self, layer, queries):
        self._answer = self.partial.partials(bytearray(queries), layer, self._block_ids)

    def answer(self):
        return memoryview(self._answer).cast("B")


def move_tiles(scene, variant, request, sizes):
    """Annexes of a request's leading tiles, each in a pool of its own; its own blocks of them are overwritten."""
    layout, own = scene.pool.layout, scene.shares[request].block_ids
    blocks_each, annexes, at = TILE_KEYS // layout.block_size, [], 0
    for num_tiles in sizes:
        moved = own[at : at + num_tiles * blocks_each]
        pool = PagedKVPool(layout, len(moved) + 3, CPU, scene.pool.compute_dtype)
        there = list(range(len(moved) + 2, 2, -1))  # in another order
        pool.write(LAYER, there, *scene.pool.read(LAYER, moved))
        annexes.append(PoolAnnex(NativeAttention(pool, scene.num_heads, variant), num_tiles, there))
        at += len(moved)
    for block in own[:at]:
        for plane in (scene.pool.keys(LAYER), scene.pool.values(LAYER)):
            plane[block] = float("nan")
    return annexes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("variant", runnable_variants())
def test_bits_are_those_of_one_pool(variant, num_threads, dtype):
    scene = Scene(SIZES, 9, 3, 64, 16, dtype)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = NativeAttention(scene.pool, scene.num_heads, variant)
        expected = whole.attend(scene.query, LAYER, whole.plan(scene.batch, None))
        annexes = [move_tiles(scene, variant, request, sizes) for request, sizes in enumerate(ANNEXES)]
        annexed = AnnexedAttention(NativeAttention(scene.pool, scene.num_heads, variant), annexes)
        plan = annexed.plan(scene.batch, None)
        for _ in range(2):  # as for two layers
            assert torch.equal(annexed.attend(scene.query, LAYER, plan), expected)
    finally:
        torch.set_num_threads(threads_before)
