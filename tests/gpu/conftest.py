"""Every test here needs a CUDA device. --simulate-cuda gives one where torch knows none: see tests/simulated_cuda."""

from shutil import which

import pytest
import torch

HAS_DEVICE = torch.cuda.is_available() and not hasattr(torch.cuda, "is_simulated")
LONG = ("test_cuda_invariant.py", "test_cuda_offload.py")  # where the CPU has to do what a device would
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
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if not stands_for_others(params):
                item.add_marker(pytest.mark.skip(reason="another stands for it on a simulated device"))


def stands_for_others(params):
    """Each takes the CPU a minute."""
    if "share" in params:  # of weights that stay on the device
        return params["share"] == 0.5
    if params.get("dtype", "bfloat16") != "bfloat16" or params.get("quantization") == "int8":
        return False
    if "block_size" not in params:
        return True
    return (params["block_size"], params["enforce_eager"]) == ONE_OF_A_FAMILY[params["family"]]
