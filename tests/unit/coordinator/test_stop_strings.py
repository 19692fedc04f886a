"""The matcher against an oracle that searches the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.stop_strings import StopMatcher

LETTERS = st.text("ab", min_size=1, max_size=4)


def oracle(text: str, stops: list[str], may_stop_from: int = 0) -> tuple[str, str | None]:
    """The text before the stop string that ends first, the longest of those that end together."""
    for end in range(may_stop_from, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            match = max(found, key=len)
            return text[: end - len(match)], match
    return text, None


def feed_all(matcher: StopMatcher, pieces: list[str]) -> str:
    out = ""
    for piece in pieces:
        out += matcher.feed(piece)
        if matcher.matched is not None:
            return out
    return out + matcher.flush()


@given(st.lists(LETTERS, min_size=1, max_size=4), st.lists(st.text("abc", max_size=5), max_size=8))
def test_any_split_of_a_text_gives_what_the_whole_text_gives(stops, pieces):
    matcher = StopMatcher(stops)
    text, match = oracle("".join(pieces), stops)
    assert feed_all(matcher, pieces) == text
    assert matcher.matched == match


@given(st.lists(LETTERS, min_size=1, max_size=4), st.text("abc", max_size=20))
def test_exactly_the_longest_tail_that_begins_a_stop_string_is_held_back(stops, text):
    matcher = StopMatcher(stops)
    out = ""
    for end, char in enumerate(text, 1):
        out += matcher.feed(char)
        if matcher.matched is not None:
            return
        begins = [text[start:end] for start in range(end + 1) if any(s.startswith(text[start:end]) for s in stops)]
        assert out + max(begins, key=len) == text[:end]


@given(st.lists(LETTERS, min_size=1, max_size=3), st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_stop_strings_that_end_too_early_do_not_count(stops, early, late):
    matcher = StopMatcher(stops)
    out = matcher.feed(early, may_stop=False) + feed_all(matcher, [late])
    text, match = oracle(early + late, stops, may_stop_from=len(early) + 1)
    assert (out, matcher.matched) == (text, match)


def test_a_match_across_pieces_takes_back_nothing_that_was_sent():
    matcher = StopMatcher(["<end>"])
    assert matcher.feed("a<e") == "a"
    assert matcher.feed("n") == ""
    assert matcher.feed("x") == "<enx"
    assert matcher.feed("<end>more") == ""
    assert matcher.matched == "<end>"


def test_answers_with_the_same_stop_strings_share_what_is_built_of_them_and_nothing_else():
    one, other = StopMatcher(["ab", "b"]), StopMatcher(["ab", "b"])
    assert one._root is other._root
    assert one.feed("xa") == "x"
    assert other.feed("b") == ""
    assert (one.matched, other.matched) == (None, "b")


def test_many_long_stop_strings_over_a_long_text():
    stops = [("ab" * 128)[:-1] + char for char in "cdefghijklmnopqr"]
    matcher = StopMatcher(stops)
    text = "ab" * 50_000
    assert feed_all(matcher, [text]) == text
