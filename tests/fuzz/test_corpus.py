"""What searches of every decoder have left is replayed, as it is and spoiled a little."""

from random import Random

import pytest

from tests.effort import effort
from tests.fuzz.corpus import FOLDER, inputs_of, read_corpus
from tests.fuzz.decoders import DECODERS

SLOW = ("tokenizer_json",)  # each of its inputs is parsed by a library that takes its time
NUM_SPOILED = effort(100, 300, 3000)  # of each decoder
PIECES = [b"", b"\0", b"\xff", b"-1", b"1e999", b"null", b"[", b"{}", b'"', b"\xed\xa0\x80", b"99999999999999999999"]


def spoiled(data, random):
    """With a piece of it cut out, doubled, or replaced by what is often not thought of."""
    start, end = sorted(random.randrange(len(data) + 1) for _ in range(2))
    middle = random.choice([*PIECES, data[start:end] * 2, random.randbytes(random.randrange(1, 5))])
    return data[:start] + middle + data[end:]


def test_every_decoder_has_a_corpus():
    assert {path.stem for path in FOLDER.iterdir()} == set(DECODERS)
    assert all(read_corpus(name) for name in DECODERS)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_takes_or_refuses_what_was_found_before(name):
    for data in inputs_of(name):
        DECODERS[name](data)


def is_accepted(name, data):
    try:
        DECODERS[name].__wrapped__(data)
    except Exception:  # noqa: BLE001  # as the decoder refuses, else the test above has failed
        return False
    return True


@pytest.mark.parametrize("name", DECODERS)
def test_something_of_it_is_accepted_else_nothing_gets_far(name):
    assert any(is_accepted(name, data) for data in inputs_of(name))


@pytest.mark.parametrize("name", DECODERS)
def test_and_what_is_like_it(name):
    random, corpus = Random(name), inputs_of(name)
    for _ in range(NUM_SPOILED // 10 if name in SLOW else NUM_SPOILED):
        DECODERS[name](spoiled(random.choice(corpus), random))
