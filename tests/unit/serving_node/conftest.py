"""What several tests of nodes read and none changes."""

import pytest

from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))
