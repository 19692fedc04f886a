"""Every test here needs a CUDA device. --simulate-cuda gives one where torch knows none: see tests/simulated_cuda."""

from shutil import which
from types import SimpleNamespace

import pytest
import torch

HAS_DEVICE = torch.cuda.is_available() and not hasattr(torch.cuda, "is_simulated")
LONG = ("test_cuda_invariant.py", "test_cuda_offload.py")  # where the CPU has to do what a device would
NO_PARAMS = SimpleNamespace(params={})
ONE_OF_A_FAMILY = {"llama": (16, False), "mistral": (256, False), "qwen2": (256, True), "qwen3": (16, False)}


def pytest_configure(config):
    can_simulate = torch.version.cuda is None and not torch.cuda.is_available() and which("c++")
    if config.getoption("--simulate-cuda") and can_simulate:
        from tests.simulated_cuda.simulate import simulate

        simulate()


@pytest.hookimpl(tryfirst=True)  # before those that are not long are taken
def pytest_collection_modifyitems(items):
    for item in items:
        if "/gpu/" not in item.path.as_posix() or HAS_DEVICE:
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))
        elif item.path.name in LONG:
            item.add_marker(pytest.mark.long)
            if not stands_for_others(item.path.name, **getattr(item, "callspec", NO_PARAMS).params):
                item.add_marker(pytest.mark.skip(reason="another stands for it on a simulated device"))


def stands_for_others(file, family=None, dtype="bfloat16", block_size=None, enforce_eager=False, **others):
    """Each takes the CPU a minute."""
    if file == "test_cuda_offload.py":
        return others.get("share") != 0.75
    is_one = block_size is None or ONE_OF_A_FAMILY[family] == (block_size, enforce_eager)
    return dtype == "bfloat16" and is_one and others.get("quantization") != "int8"
