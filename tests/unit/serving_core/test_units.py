"""Sizes, as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.units import parse_size, size_of


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**29, "512.0 MiB"), (3 * 2**29, "1.5 GiB")],
)
def test_a_size_is_shown_in_its_largest_unit(num_bytes, shown):
    assert size_of(num_bytes) == shown


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2TiB", 2**41),
        ("0.5 tib", 2**39),
        ("3GiB", 3 * 2**30),
        ("3gib", 3 * 2**30),
        ("2gb", 2 * 10**9),
        ("2 GB", 2 * 10**9),
        ("1.5Mb", 1_500_000),
        ("7KB", 7000),
        ("1tb", 10**12),
        ("9b", 9),
    ],
)
def test_a_size_may_have_a_unit(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1 G", "1iB", "1,5GiB", "1PiB", "0x10", "1.GiB", "٣"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is no size such as 512MiB"):
        parse_size(text)


def test_less_than_a_byte_is_not_0_which_has_a_meaning_of_its_own():
    with pytest.raises(ValueError, match=r"'0\.4' is less than a byte"):
        parse_size("0.4")
    assert parse_size("0") == parse_size("0.0GiB") == 0


@given(num_bytes=st.integers(0, 2**60))
def test_what_is_shown_can_be_given(num_bytes):
    assert parse_size(str(num_bytes)) == num_bytes
    assert abs(parse_size(size_of(num_bytes)) - num_bytes) <= num_bytes / 20
