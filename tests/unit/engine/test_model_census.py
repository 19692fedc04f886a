"""The table of docs/reference/models.md, row by row."""

import pytest

from tests.model_census import row_of, rows_of_page, types

pytestmark = pytest.mark.nightly


def test_every_type_has_a_row():
    assert sorted(rows_of_page()) == types()


@pytest.mark.parametrize("model_type", sorted(rows_of_page()))
def test_the_row_is_what_is_found(model_type):
    assert row_of(model_type) == rows_of_page()[model_type]
