"""What a text foretells of itself, by hand and against a search through all of it."""

from random import Random

import pytest

from decode_node.speculation import LONGEST, MOST_TRIED, NOWHERE, SHORTEST, Lookup, following


def found(token_ids):
    lookup = Lookup()
    assert lookup.index(token_ids, len(token_ids))
    return lookup.find(token_ids)


def test_what_followed_before_is_proposed():
    text = [5, 6, 7, 8, 9, 1, 2, 6, 7, 8]
    place, num_matching = found(text)
    assert (place, num_matching) == (3, 3)
    assert following(text, place, 4) == [9, 1, 2, 6]


def test_the_longest_match_is_taken_and_of_equals_the_latest():
    longer = [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 1, 2, 3, 4]
    assert found(longer) == (3, 4)
    equal = [2, 3, 4, 50, 7, 2, 3, 4, 60, 8, 2, 3, 4]
    assert found(equal) == (7, 3)


def test_a_text_that_repeats_goes_on():
    text = [9, 1, 2, 3, 1, 2, 3]
    place, num_matching = found(text)
    assert (place, num_matching) == (3, 3)
    assert following(text, place, 7) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 2, 3], [1, 2, 3, 4, 2, 3], [1, 2, 9, 4, 1, 2]])
def test_fewer_tokens_tell_nothing(text):
    assert found(text) == (NOWHERE, 0)


def test_it_takes_in_so_much_at_a_time():
    lookup, text = Lookup(), [1, 2, 3, 4, 1, 2, 3]
    assert not lookup.index(text, 4)
    assert lookup.index(text, 4)
    assert lookup.find(text) == (2, 3)
    text.append(4)
    assert lookup.index(text, 4)
    assert lookup.find(text) == (3, 4)


def test_as_a_search_through_the_whole_text_finds_it():
    """Where few places match, so that all of them are tried."""
    draw, num_found = Random(3), 0
    for _ in range(200):
        text = draw.choices(range(40), k=30)
        at, length = draw.randint(0, 20), draw.randint(2, 8)
        text += text[at : at + length]
        matches = {place: longest_match(text, place) for place in range(len(text) - 1)}
        matches = {place: length for place, length in matches.items() if length >= SHORTEST}
        assert len(matches) <= MOST_TRIED
        best = max(matches.items(), key=lambda each: (each[1], each[0]), default=(NOWHERE, 0))
        assert found(text) == best
        num_found += bool(matches)
    assert 100 < num_found < 200


def longest_match(text, place):
    length = 0
    while length < min(LONGEST, place + 1) and text[place - length] == text[-1 - length]:
        length += 1
    return length


def test_a_long_text_with_one_token_alone_takes_no_longer():
    """Each look tries few places, however many have the same hash; and a match is no longer than LONGEST."""
    text = [7] * 50_000
    assert found(text) == (len(text) - 2, LONGEST)
