"""Every test here needs a CUDA device. --simulate-cuda gives one where torch knows none: see tests/simulated_cuda.

`make test` runs SMOKE on the simulated device, `make test-nightly` all.
"""

import warnings
from shutil import which

import pytest
import torch

SMOKE = {
    "test_cuda_engine.py::test_greedy_tokens_equal_those_of_the_cpu[llama]",
    "test_cuda_features.py::test_blocks_travel_over_zmq_from_a_pool_on_the_device[cuda-bfloat16]",
    "test_cuda_features.py::test_penalties_biases_and_logprobs",
    "test_cuda_features.py::test_quantized_weights_are_those_of_the_cpu[int4]",
    "test_cuda_graphs.py::test_the_host_does_not_wait_before_it_reads_the_tokens[False]",
    "test_cuda_sampling.py::test_samplings[401-dtype1]",
    "test_cuda_streams.py::test_blocks_are_written_and_read_beside_a_step[some-any]",
    "test_cuda_transfer.py::test_blocks_go_from_device_to_device",
}


def pytest_configure(config):
    can_simulate = not torch.cuda.is_available() and which("c++")
    if config.getoption("--simulate-cuda") and can_simulate:
        from tests.simulated_cuda.simulate import simulate

        simulate()
    if torch.cuda.is_available():
        with warnings.catch_warnings():  # of its first call, which as an error would leave the mode of a test set
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")


@pytest.hookimpl(tryfirst=True)  # before marks choose tests
def pytest_collection_modifyitems(config, items):
    found = set()
    for item in items:
        if "/gpu/" not in item.path.as_posix():
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))
        if (name := item.nodeid.rpartition("/")[2]) in SMOKE:
            item.add_marker(pytest.mark.smoke)
            found.add(name)
    assert config.option.markexpr != "smoke" or found == SMOKE, f"no such tests: {SMOKE - found}"
