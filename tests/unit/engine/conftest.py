import pytest
import torch

from engine.model.steps import TorchSteps
from engine.native.steps import VARIANTS, NativeSteps, step_library


def _kernels():
    library = step_library()
    for name in VARIANTS:
        is_there = library is not None and library.kernel(name) is not None
        yield pytest.param(name, marks=[] if is_there else pytest.mark.skip(reason=f"no {name} here"))


@pytest.fixture(params=[*_kernels(), "torch"])
def steps(request):
    """What computes a step's small parts: torch, and every variant of the compiled kernels."""
    return TorchSteps() if request.param == "torch" else NativeSteps(request.param)


@pytest.fixture(autouse=True)
def restore_threads():
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
