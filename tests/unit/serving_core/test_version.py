"""Which versions may serve together."""

import pytest

from serving_core.version import MAX_SKEW, VERSION, is_within_skew


@pytest.mark.parametrize("other", ["1.3.0", "1.4.0", "1.4.9", "1.5.0", "1.5.0rc1", "1.5.2+local"])
def test_minors_that_are_at_most_one_apart_serve_together(other):
    assert MAX_SKEW == 1
    assert is_within_skew("1.4.2", other)
    assert is_within_skew(other, "1.4.2")


@pytest.mark.parametrize(
    "other", ["1.2.9", "1.6.0", "2.4.2", "0.4.2", "", "1", "1.4", "1.x.0", "v1.4.2", "1.9999999.0"]
)
def test_others_do_not(other):
    assert not is_within_skew("1.4.2", other)
    assert not is_within_skew(other, "1.4.2")


def test_a_version_serves_with_itself():
    assert is_within_skew(VERSION, VERSION)
