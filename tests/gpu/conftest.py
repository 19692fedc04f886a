"""Every test here needs a CUDA device."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))
