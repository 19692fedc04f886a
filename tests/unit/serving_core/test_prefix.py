"""Names of blocks: against hashes put together by hand, and what must never share a name."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from serving_core.prefix import BlockNames, child_name, hint_of, root_name

texts = st.text(max_size=4)
fingerprints = st.dictionaries(texts, texts, max_size=3)


def test_a_child_is_the_hash_of_its_parent_and_its_tokens():
    parent = bytes(range(32))
    tokens = b"\x01\0\0\0" + b"\x02\x01\0\0" + b"\xff\xff\xff\xff"
    assert child_name(parent, [1, 258, 2**32 - 1]) == sha256(parent + tokens).digest()


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


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), block_size=st.integers(1, 6), data=st.data())
def test_names_that_grow_with_their_request_are_those_of_the_whole(tokens, block_size, data):
    root = root_name({}, "")
    expected, parent = [], root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_size])
        parent = sha256(parent + block).digest()
        expected.append(parent)
    names = BlockNames(root, block_size)
    for length in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6))):
        assert names.names_of(tokens[:length]) == expected[: length // block_size]
    assert names.names_of(tokens) == expected


def test_a_name_stands_for_all_tokens_before_it():
    first, second = BlockNames(root_name({}, ""), 2), BlockNames(root_name({}, ""), 2)
    one, other = first.names_of([1, 2, 3, 4, 5]), second.names_of([1, 9, 3, 4])
    assert len(one) == len(other) == 2
    assert not set(one) & set(other)
