"""Every decoder is searched, guided by the code that it reaches; `make fuzz` does the same."""

import importlib.util

import pytest

from tests.effort import effort
from tests.fuzz.decoders import DECODERS
from tests.fuzz.run import search


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris, which make test-nightly installs")
@pytest.mark.parametrize("name", DECODERS)
def test_nothing_is_found_that_is_neither_taken_nor_refused(name, tmp_path):
    assert search(name, tmp_path, seconds=effort(2, 5, 30)), "what was found is in the output"
