"""The blocks in vLLM's prefix cache, as the coordinator looks for them. Events are packed as vLLM packs them."""

import msgpack
import pytest

from serving_core.node.prefix import BlockNames, hint_of, root_name
from splitserve_vllm.prefixes import CachedPrefixes

BLOCK = 4
FACTS, NUMERICS = {"model": "a"}, {"engine": "vllm"}
TOKENS = list(range(20))


@pytest.fixture
def prefixes():
    return CachedPrefixes(FACTS, NUMERICS, BLOCK)


def stored(*hashes, parent=None, token_ids=(), block_size=BLOCK, **fields):
    made = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": token_ids, "block_size": block_size}
    return {"type": "BlockStored", **made, "lora_id": None, "medium": "GPU", "lora_name": None, **fields}


def removed(*hashes):
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}


def take(prefixes, *events):
    prefixes.take(msgpack.packb([1.0, events]))


def expected(prefixes_changed, token_ids, salt=""):
    """The hints by which the coordinator looks for the full blocks of these tokens."""
    names = BlockNames(root_name(FACTS, salt), BLOCK)
    found, _ = names.find(token_ids, len(token_ids) // BLOCK, list(prefixes_changed.numerics_ids), lambda _: True)
    return [hint_of(name) for name in found]


def test_the_coordinator_finds_what_is_stored(prefixes):
    take(prefixes, stored(b"x", b"y", token_ids=TOKENS[:8]), stored(b"z", parent=b"y", token_ids=TOKENS[8:12]))
    changed = prefixes.changes()
    assert list(changed.stored) == expected(changed, TOKENS[:12])
    assert not changed.removed
    assert len(prefixes) == 3
    assert prefixes.changes() is None


def test_salts_keep_prefixes_apart(prefixes):
    take(prefixes, stored(b"x", token_ids=TOKENS[:4], extra_keys=[["salt"]]))
    changed = prefixes.changes()
    assert list(changed.stored) == expected(changed, TOKENS[:4], "salt")
    assert list(changed.stored) != expected(changed, TOKENS[:4])


def test_what_is_removed_is_reported(prefixes):
    take(prefixes, stored(7, 8, token_ids=TOKENS[:8]))
    before = prefixes.changes()
    take(prefixes, removed(8, 99))
    changed = prefixes.changes()
    assert (list(changed.removed), list(changed.stored)) == (expected(before, TOKENS[:8])[1:], [])


def test_what_comes_and_goes_between_two_reports_is_gone(prefixes):
    take(prefixes, stored(b"x", token_ids=TOKENS[:4]), removed(b"x"), stored(b"y", token_ids=TOKENS[4:8]))
    changed = prefixes.changes()
    assert list(changed.stored) == expected(changed, TOKENS[4:8])


def test_a_cache_that_is_cleared_is_empty(prefixes):
    take(prefixes, stored(b"x", b"y", token_ids=TOKENS[:8]))
    held = prefixes.changes().stored
    take(prefixes, {"type": "AllBlocksCleared"})
    assert sorted(prefixes.changes().removed) == sorted(held)


def test_another_coordinator_hears_of_all(prefixes):
    take(prefixes, stored(b"x", b"y", token_ids=TOKENS[:8]))
    prefixes.changes()
    prefixes.forget()
    changed = prefixes.changes()
    assert sorted(changed.stored) == sorted(expected(changed, TOKENS[:8]))


def test_blocks_behind_an_unknown_one_are_left_out(prefixes):
    take(prefixes, stored(b"x", parent=b"lost", token_ids=TOKENS[:4]), stored(b"y", token_ids=TOKENS[:8], block_size=8))
    assert prefixes.changes() is None


@pytest.mark.parametrize(
    "packed", [b"\xc1", b"\x01", msgpack.packb([1.0, [{"no": "type"}]]), msgpack.packb([1.0, [3]])]
)
def test_what_cannot_be_read_is_left_out(prefixes, packed):
    prefixes.take(packed)
    assert prefixes.changes() is None
