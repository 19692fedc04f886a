"""Names of blocks: against hashes put together by hand, and what must never share a name."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from serving_core.node.prefix import (
    CHUNK,
    MIXED_NUMERICS,
    NUMERICS_ID_BYTES,
    STEP,
    BlockNames,
    child_name,
    hint_of,
    numerics_of,
    root_name,
)

texts = st.text(max_size=4)
fingerprints = st.dictionaries(texts, texts, max_size=3)


def test_a_child_is_the_hash_of_its_parent_its_maker_and_its_tokens():
    parent = bytes(range(32))
    tokens = b"\x01\0\0\0" + b"\x02\x01\0\0" + b"\xff\xff\xff\xff"
    assert child_name(parent, b"origin:)s", [1, 258, 2**32 - 1]) == sha256(parent + b"origin:)s" + tokens).digest()


def test_origins_tell_facts_apart_and_makers_are_as_long_as_one_and_a_kind():
    facts = {"tp_size": "2", "attention": "native"}
    assert numerics_of(facts) == numerics_of(dict(reversed(facts.items())))
    assert len({numerics_of(facts), numerics_of({**facts, "tp_size": "1"}), numerics_of({}), MIXED_NUMERICS[:8]}) == 4
    assert {
        len(numerics_id) for numerics_id in (numerics_of(facts) + CHUNK, numerics_of(facts) + STEP, MIXED_NUMERICS)
    } == {NUMERICS_ID_BYTES}


def test_a_root_is_the_hash_of_its_tag_and_of_texts_with_their_lengths():
    parts = [b"splitserve: root of block names\0", b"\x04" + bytes(7) + b"salt", b"\x01" + bytes(7) + b"a"]
    parts += [b"\x02" + bytes(7) + "ü".encode(), b"\x01" + bytes(7) + b"b", bytes(8)]
    assert root_name({"b": "", "a": "ü"}, "salt") == sha256(b"".join(parts)).digest()


def test_a_hint_is_the_first_eight_bytes_little_endian():
    assert hint_of(bytes([1, 2, 0, 0, 0, 0, 0, 128]) + bytes(24)) == 1 + 2 * 256 + 128 * 256**7


@given(fingerprints, texts, fingerprints, texts)
def test_roots_are_equal_for_equal_fingerprints_and_salts_only(fingerprint, salt, other_fingerprint, other_salt):
    same = (fingerprint, salt) == (other_fingerprint, other_salt)
    assert (root_name(fingerprint, salt) == root_name(other_fingerprint, other_salt)) == same
    assert root_name(dict(reversed(fingerprint.items())), salt) == root_name(fingerprint, salt)


def test_roots_keep_apart_what_reads_the_same_in_a_row():
    rows = [({}, "ab"), ({"a": "b"}, ""), ({"ab": ""}, ""), ({"": "ab"}, ""), ({"b": ""}, "a"), ({"": "b"}, "a")]
    assert len({root_name(fingerprint, salt) for fingerprint, salt in rows}) == len(rows)


def test_an_adapter_has_blocks_of_its_own_by_its_content_and_not_by_its_name():
    nodes = {"dtype": "bfloat16", "lora:a": "digest", "lora:b": "other", "lora:also-a": "digest"}
    roots = {name: root_name(nodes, "", name) for name in ("", "a", "b", "also-a", "unknown")}
    assert roots["a"] == roots["also-a"]
    assert len(set(roots.values())) == 4
    assert roots[""] == root_name(nodes, "")
    assert root_name({**nodes, "lora:a": "changed"}, "", "a") not in roots.values()
    assert root_name(nodes, "salt", "a") not in roots.values()


NUMERICS_IDS = [b"origin-ac", b"origin-as", b"origin-bc", MIXED_NUMERICS]
made = st.lists(st.sampled_from(NUMERICS_IDS), max_size=8)
tokens_of_eight = st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=17)


def names_of(root, numerics_ids, tokens):
    """By hand; of blocks of two."""
    names, parent = [], root
    for index, numerics_id in enumerate(numerics_ids):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[2 * index : 2 * index + 2])
        parent = sha256(parent + numerics_id + block).digest()
        names.append(parent)
    return names


@given(made, tokens_of_eight)
def test_names_follow_what_a_request_gets_block_by_block(numerics_ids, tokens):
    root = root_name({}, "")
    expected = names_of(root, numerics_ids, tokens)
    names = BlockNames(root, 2)
    for numerics_id in numerics_ids:
        names.add(tokens, numerics_id)
    assert (names.names, names.numerics_ids) == (expected, numerics_ids)
    names = BlockNames(root, 2)
    names.begin(expected[:3], numerics_ids[:3])
    names.add(tokens, *numerics_ids[3:])
    assert (names.names, names.numerics_ids) == (expected, numerics_ids)


@given(made, tokens_of_eight, st.integers(0, 8), st.integers(1, 4), st.data())
def test_what_is_held_is_found_whoever_made_it(numerics_ids, tokens, most, num_known, data):
    root = root_name({}, "")
    held = names_of(root, numerics_ids, tokens)
    known = NUMERICS_IDS[:num_known]
    num_found = next(
        (index for index, numerics_id in enumerate(numerics_ids) if numerics_id not in known), len(numerics_ids)
    )
    names = BlockNames(root, 2)
    for _ in range(2):  # what was tried before is known
        found = names.find(tokens, most, known, set(held).__contains__)
        assert found == (held[: min(most, num_found)], numerics_ids[: min(most, num_found)])
    gap = data.draw(st.integers(0, 7))
    found, _ = names.find(tokens, 8, known, set(held[:gap] + held[gap + 1 :]).__contains__)
    assert found == held[: min(gap, num_found)]


def test_of_several_that_made_a_block_the_first_one_is_taken():
    root, tokens = root_name({}, ""), list(range(4))
    held = {
        *names_of(root, [NUMERICS_IDS[0], NUMERICS_IDS[2]], tokens),
        *names_of(root, [NUMERICS_IDS[1], NUMERICS_IDS[1]], tokens),
    }
    names = BlockNames(root, 2)
    assert names.find(tokens, 2, NUMERICS_IDS[1:], held.__contains__)[1] == [NUMERICS_IDS[1], NUMERICS_IDS[1]]
    assert names.find(tokens, 2, NUMERICS_IDS, held.__contains__)[1] == [
        NUMERICS_IDS[1],
        NUMERICS_IDS[1],
    ]  # as it was found before
    assert BlockNames(root, 2).find(tokens, 2, NUMERICS_IDS, held.__contains__)[1] == [NUMERICS_IDS[0], NUMERICS_IDS[2]]


def test_a_name_stands_for_all_tokens_and_makers_before_it():
    tokens, others = [1, 2, 3, 4], [1, 9, 3, 4]
    chains = [
        names_of(root_name({}, ""), [numerics_id, NUMERICS_IDS[0]], each)
        for numerics_id in NUMERICS_IDS
        for each in (tokens, others)
    ]
    assert len({name for chain in chains for name in chain}) == 2 * len(chains)
