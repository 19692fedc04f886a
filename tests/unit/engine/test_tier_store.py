"""The bytes of blocks in the KV offload, beside what the pool held."""

import asyncio
import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

from engine.cache import tier_store
from engine.cache.kv_pool import PagedKVPool
from engine.cache.tier_store import TierStore
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout, Widths
from serving_core.node.tiers import Copies
from tests.unit.engine.unnamed_file import unnamed_file

LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
LAYOUTS = {
    "float32": LAYOUT,
    "bfloat16": KVLayout.uniform(2, 2, 8, 4, "bfloat16"),
    "int8": KVLayout.uniform(2, 2, 8, 4, "int8"),
    "uneven": KVLayout(2, (Widths(8, 0), Widths(6, 4)), 3, 4, "float32"),
}
NUM_BLOCKS = 10
DEADLINE_S = 60.0


def filled_pool(layout=LAYOUT):
    pool = PagedKVPool(layout, NUM_BLOCKS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    for layer in layout.layers:
        sizes = [NUM_BLOCKS * each for each in layout.cache_bytes(layer)]
        caches = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
        pool.write_tensors(layer, range(NUM_BLOCKS), *caches)
    return pool


def content(pool, block_id):
    return [bytes(cache) for layer in pool.layout.layers for cache in pool.read(layer, [block_id])]


def wipe(pool):
    for layer in pool.layout.layers:
        caches = [torch.zeros(NUM_BLOCKS * each, dtype=torch.uint8) for each in pool.layout.cache_bytes(layer)]
        pool.write_tensors(layer, range(NUM_BLOCKS), *caches)


async def load(store, slots, block_ids):
    """How many of them came."""
    done = asyncio.get_running_loop().create_future()
    store.load(1, slots, block_ids, lambda load_id, num_good: done.set_result((load_id, num_good)))
    load_id, num_good = await asyncio.wait_for(done, DEADLINE_S)
    assert load_id == 1
    return num_good


def told_lost(store):
    """The slots that it tells of from now on."""
    lost = []
    store.on_lost = lost.extend
    return lost


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("num_host", "num_disk"), [(4, 0), (0, 4), (2, 2)])
async def test_blocks_come_back_as_they_were(tmp_path, monkeypatch, name, num_host, num_disk):
    monkeypatch.setattr(tier_store, "CHUNK_BYTES", 1)  # so that each block is read by itself
    pool = filled_pool(LAYOUTS[name])
    expected = [content(pool, block_id) for block_id in range(NUM_BLOCKS)]
    with closing(TierStore(pool, num_host, num_disk, str(tmp_path))) as store:
        store.probe()
        store.offload(Copies([], [7, 2, 3, 9], [0, 3, 1, 2]))
        wipe(pool)
        assert await load(store, [2, 0, 3], [1, 8, 5]) == 3
        assert [content(pool, block_id) for block_id in (1, 8, 5)] == [expected[9], expected[7], expected[2]]
        assert store.num_unwritten == 0
    assert list(tmp_path.iterdir()) == []


async def test_what_leaves_host_memory_for_the_file(tmp_path):
    pool = filled_pool()
    old, new = content(pool, 4), content(pool, 5)
    with closing(TierStore(pool, 1, 1, str(tmp_path))) as store:
        store.offload(Copies([], [4], [0]))
        store.offload(Copies([(0, 1)], [5], [0]))
        wipe(pool)
        assert await load(store, [0, 1], [0, 1]) == 2
    assert (content(pool, 0), content(pool, 1)) == (new, old)


@pytest.mark.parametrize("damage", ["a bit", "an end"])
async def test_a_damaged_file_gives_what_is_before_the_damage(tmp_path, damage):
    pool = filled_pool()
    expected, row = content(pool, 0), LAYOUT.block_bytes
    with closing(TierStore(pool, 0, 4, str(tmp_path))) as store:
        store.offload(Copies([], [0, 1, 2], [0, 1, 2]))
        assert await load(store, [0, 1, 2], [5, 6, 7]) == 3
        file = unnamed_file(tmp_path)
        if damage == "a bit":
            byte = os.pread(file, 1, row + 17)[0]
            os.pwrite(file, bytes([byte ^ 4]), row + 17)
        else:
            os.ftruncate(file, 2 * row - 1)
        wipe(pool)
        blank = content(pool, 6)
        assert await load(store, [0, 1, 2], [5, 6, 7]) == 1
    assert content(pool, 5) == expected
    assert content(pool, 6) == content(pool, 7) == blank


async def test_loads_come_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tier_store, "CHUNK_BYTES", 1)
    ended, both = [], asyncio.Event()

    def note(load_id, num_good):
        ended.append((load_id, num_good))
        if len(ended) == 2:
            both.set()

    with closing(TierStore(filled_pool(), 8, 0, str(tmp_path))) as store:
        store.offload(Copies([], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]))
        store.load(1, [0, 1, 2, 3], [5, 6, 7, 8], note)
        store.load(2, [4], [9], note)
        await asyncio.wait_for(both.wait(), DEADLINE_S)
    assert ended == [(1, 4), (2, 1)]


async def test_a_slot_that_holds_nothing_is_no_block(tmp_path):
    with closing(TierStore(filled_pool(), 1, 1, str(tmp_path))) as store:
        assert await load(store, [0], [0]) == 0
        assert await load(store, [1], [0]) == 0


async def test_what_cannot_be_written_in_time_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(tier_store, "STAGED_BYTES", 2 * LAYOUT.block_bytes)
    with closing(TierStore(filled_pool(), 0, 4, str(tmp_path))) as store:
        lost = told_lost(store)
        store.offload(Copies([], [0, 1, 2], [3, 1, 2]))
        assert (store.num_unwritten, lost) == (1, [3])  # what was given up first
        assert await load(store, [1, 2, 3], [5, 6, 7]) == 2


async def test_no_more_is_copied_into_host_memory_at_once_than_there_is_time_for(monkeypatch):
    monkeypatch.setattr(tier_store, "OFFLOADED_BYTES", 2 * LAYOUT.block_bytes)
    with closing(TierStore(filled_pool(), 4, 1)) as store:
        lost = told_lost(store)
        store.offload(Copies([], [0, 1, 2], [3, 1, 2]))
        assert (store.num_unwritten, lost) == (1, [3])
        assert await load(store, [1, 2, 3], [5, 6, 7]) == 2
        store.offload(Copies([(3, 4)], [3], [3]))  # what holds nothing cannot go to the file either
        assert (store.num_unwritten, lost) == (2, [3, 4])
        assert await load(store, [3, 4], [8, 9]) == 1


async def test_a_file_that_cannot_be_written_to_holds_nothing(tmp_path):
    with closing(TierStore(filled_pool(), 0, 2, str(tmp_path))) as store:
        readable = os.open("/dev/null", os.O_RDONLY)
        os.dup2(readable, unnamed_file(tmp_path))
        os.close(readable)
        lost = told_lost(store)
        store.offload(Copies([], [0, 1], [0, 1]))
        assert await load(store, [0, 1], [5, 6]) == 0
        assert (store.num_unwritten, lost) == (2, [0, 1])


async def test_nothing_is_written_after_a_cancel(tmp_path):
    pool, told = filled_pool(), []
    with closing(TierStore(pool, 1, 1, str(tmp_path))) as store:
        store.offload(Copies([], [0, 1], [0, 1]))
        before = content(pool, 5)
        store.load(1, [0], [5], lambda *each: told.append(each))
        await asyncio.sleep(0)
        store.cancel(1)
        store.cancel(2)  # which nobody knows
        assert await load(store, [1], [6]) == 1  # the thread has done all that came before
    assert content(pool, 5) == before
    assert told == []


def test_a_file_takes_up_its_space_and_has_no_name(tmp_path):
    with closing(TierStore(filled_pool(), 0, 100, str(tmp_path))):
        stat = os.fstat(unnamed_file(tmp_path))
        assert stat.st_size == 100 * LAYOUT.block_bytes
        assert stat.st_blocks * 512 >= stat.st_size
        assert stat.st_nlink == 0
        assert stat.st_mode & 0o777 == 0o600


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system in memory that refuses at once")
def test_a_file_larger_than_its_disk_is_refused():
    folder = "/dev/shm"
    stat = os.statvfs(folder)
    num_slots = stat.f_blocks * stat.f_frsize // LAYOUT.block_bytes + 1
    with pytest.raises(SettingsError, match=r"--kv-disk-bytes asks for a file of .*: No space left on device"):
        TierStore(filled_pool(), 0, num_slots, folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="--kv-disk-path: no file can be made there: No such file"):
        TierStore(filled_pool(), 0, 1, str(Path(tmp_path) / "nowhere"))


def test_more_memory_than_there_is_is_refused():
    with pytest.raises(SettingsError, match=r"--kv-host-bytes asks for .* of memory are free"):
        TierStore(filled_pool(), 2**40, 0)
