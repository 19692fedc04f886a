import shutil

import pytest
import torch

from engine.native.ops_library import VARIANTS, ops_library
from engine.ops.base import Ops
from engine.ops.native import NativeOps


def _kernels():
    library = ops_library()
    for name in VARIANTS:
        is_there = library is not None and library.kernel(name) is not None
        yield pytest.param(name, marks=[] if is_there else pytest.mark.skip(reason=f"no {name} here"))


@pytest.fixture(params=[*_kernels(), "torch"])
def ops(request):
    """The ops of a step: by torch, and every variant of the compiled kernels."""
    return Ops() if request.param == "torch" else NativeOps(request.param)


@pytest.fixture(autouse=True)
def restore_threads():
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Return a function that gives the folder of a model, such as `written(write_tiny_model, "qwen3", head_dim=16)`.
    A model is written once; no test may change its folder."""
    folders = {}

    def written(write, *args, **fields):
        key = write, args, repr(sorted(fields.items()))
        if key not in folders:
            folders[key] = write(tmp_path_factory.mktemp("model"), *args, **fields)
        return folders[key]

    return written


@pytest.fixture
def copied(written, tmp_path):
    """Return a function like `written` that gives a copy of the folder, which the test may change."""
    return lambda write, *args, **fields: shutil.copytree(written(write, *args, **fields), tmp_path / "copied")
