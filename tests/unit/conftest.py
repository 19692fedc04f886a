"""What tests of several rooms begin with."""

import pytest

from tests.tiny_models import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """Of a model of which there is the byte-level tokenizer alone."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder
