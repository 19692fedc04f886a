"""JSON of a model: what is read can be written, and says the same."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.doors.http.conversations import MAX_DEPTH, parsed
from serving_core.json_fields import json_line

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(value=VALUES)
def test_what_is_json_is_read_and_written_as_it_is(value):
    assert parsed(json.dumps(value)) == value
    assert json.loads(json_line(parsed(json.dumps(value)))) == value


NOT_WRITTEN = ["NaN", "[Infinity]", '{"a": -Infinity}', "1e400", "[-1e999]", '"\\udc00"', "", "{", "9" * 5000]


@pytest.mark.parametrize("text", NOT_WRITTEN)
def test_what_cannot_be_written_is_not_read(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the message is Python's own
        parsed(text)


def test_how_deep_it_may_be():
    assert json_line(parsed("[" * MAX_DEPTH + "]" * MAX_DEPTH)) == "[" * MAX_DEPTH + "]" * MAX_DEPTH
    for depth in (MAX_DEPTH + 1, 10_000):
        with pytest.raises(ValueError, match=r"levels|deeply"):
            parsed("[" * depth + "]" * depth)
