"""Blocks as tensors: the same as blocks as bytes, and a checksum for devices against one in numpy."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.kv_pool import PagedKVPool
from kv_transfer import payload as payload_module
from kv_transfer.payload import HOST
from kv_transfer.transports.tensor_payload import TensorPayload, TensorStore, device_checksum
from tests.unit.kv_transfer.torch_dist_kit import CPU
from tests.unit.kv_transfer.transfer_kit import LAYOUT

TENSORS = TensorPayload()
chunks = st.lists(st.binary(max_size=40), max_size=6)


def tensor(data):
    return torch.tensor(list(data), dtype=torch.uint8)


def as_bytes(buffers):
    return [bytes(buffer) if isinstance(buffer, memoryview) else buffer.numpy().tobytes() for buffer in buffers]


def both(parts):
    return [memoryview(part) for part in parts], [tensor(part) for part in parts]


@given(chunks)
def test_gather_is_that_of_the_host(parts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload_module, "MIN_FRAME_BYTES", 16)
        views, tensors = both(parts)
        assert as_bytes(TENSORS.gather(tensors)) == as_bytes(HOST.gather(views))


@given(chunks, st.lists(st.integers(0, 30), max_size=6), st.booleans())
def test_cut_is_that_of_the_host(parts, sizes, fits):
    sizes = [1, *sizes]
    if fits:
        places = sorted([*itertools.accumulate(sizes), sum(map(len, parts))])
        places = [place for place in places if place <= sum(map(len, parts)) and place]
        sizes = [stop - start for start, stop in itertools.pairwise([0, *places])]
    views, tensors = both(parts)
    expected, pieces = HOST.cut(views, sizes), TENSORS.cut(tensors, sizes)
    assert (pieces is None) == (expected is None)
    assert as_bytes(pieces or ()) == as_bytes(expected or ())


@given(st.binary(min_size=1, max_size=60), st.binary(max_size=60))
def test_the_checksum_on_the_host_is_that_of_the_host(keys, values):
    views, tensors = both([keys, values])
    assert TENSORS.checksum(*tensors) == HOST.checksum(*views)


# ---- on a device ----


def murmur_finish(word):
    """MurmurHash3's fmix32, on unsigned numbers."""
    word = np.uint32(word)
    with np.errstate(over="ignore"):
        word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))


def expected_checksum(key_cache, value_cache):
    caches = [cache + bytes(-len(cache) % 4) for cache in (key_cache, value_cache)]
    words = np.frombuffer(b"".join(caches), dtype="<u4")
    total = 0
    for place, word in enumerate(words):
        total += int(murmur_finish((int(word) + place * 0x9E3779B9) & 0xFFFFFFFF))
    return int(murmur_finish(total & 0xFFFFFFFF))


@given(st.binary(min_size=1, max_size=84), st.binary(max_size=84), st.integers(0, 3))
def test_the_checksum_of_devices_against_numpy(keys, values, shift):
    shifted = torch.cat([tensor(bytes(shift)), tensor(keys)])[shift:]  # which may start at any byte
    assert device_checksum(shifted, tensor(values)) == expected_checksum(keys, values)


@pytest.mark.parametrize("changed", ["a bit", "two words", "two words that differ in their sign", "K and V"])
def test_what_changes_changes_the_checksum_of_a_device(changed):
    block = torch.randint(0, 256, (2 * 64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    if changed.endswith("sign"):
        block[8:12] = block[40:44] ^ torch.tensor([0, 0, 0, 128], dtype=torch.uint8)
    spoilt = block.clone()
    match changed:
        case "a bit":
            spoilt[77] ^= 1
        case "K and V":
            spoilt = torch.cat([block[64:], block[:64]])
        case _:
            spoilt[8:12], spoilt[40:44] = block[40:44], block[8:12]
    assert not torch.equal(spoilt, block)
    assert device_checksum(spoilt[:64], spoilt[64:]) != device_checksum(block[:64], block[64:])


# ---- the store ----


def test_a_store_reads_and_writes_what_its_pool_does():
    pool = PagedKVPool(LAYOUT, 6, CPU)
    pool.keys(1).normal_()
    pool.values(1).normal_()
    store = TensorStore(pool)
    assert store.layout == LAYOUT
    assert as_bytes(store.read(1, [4, 5, 2])) == as_bytes(pool.read(1, [4, 5, 2]))
    store.write(2, [0, 1, 3], *store.read(1, [4, 5, 2]))
    assert torch.equal(pool.keys(2)[[0, 1, 3]], pool.keys(1)[[4, 5, 2]])
    assert torch.equal(pool.values(2)[[0, 1, 3]], pool.values(1)[[4, 5, 2]])


def test_some_heads_of_a_store_are_those_of_its_pool():
    pool = PagedKVPool(LAYOUT, 3, CPU)
    pool.keys(0).normal_()
    store = TensorStore(pool)
    assert store.heads(range(2)) is store
    some = store.heads(range(1, 2))
    assert some.layout == LAYOUT.with_heads(1)
    expected = pool.keys(0)[[2, 0], :, 1:2].contiguous().view(torch.uint8).flatten()
    assert torch.equal(some.read(0, [2, 0])[0], expected)
    some.write(1, [1], *some.read(0, [2]))
    assert torch.equal(pool.keys(1)[1, :, 1], pool.keys(0)[2, :, 1])
    assert not pool.keys(1)[1, :, 0].any()
