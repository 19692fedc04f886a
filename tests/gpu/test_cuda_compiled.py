"""What Triton's compiler makes of the kernels for devices, of which none has to be here."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton, which comes with torch for CUDA, is not installed")

from engine.attention.triton_paged import ALONE, MANY_ROWS, attend, shared_bytes
from engine.quantization import triton_linear
from tests.gpu.compile_triton import BYTES, cases

DEVICES = {80: 163, 89: 99, 90: 227, 100: 227}  # KiB of memory that a program may share, by compute capability
MANY_ROWS_BY = {90: "wgmma.mma_async", 100: "tcgen05.mma"}  # of devices since Hopper
MOST_SPILLED = 512  # bytes, where a thread holds more than there are registers


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", DEVICES)
def test_kernels_fit_a_device_and_use_what_it_has(capability):
    most_bytes = DEVICES[capability] * 1024
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path and "children" not in path)
    argv = [sys.executable, "-m", "tests.gpu.compile_triton", str(capability), str(most_bytes)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    for case, line in zip(cases(capability, most_bytes), done.stdout.splitlines(), strict=True):
        (kernel, pointers, _, constants, *stages), code = case, json.loads(line)
        about = f"{kernel.__name__} {pointers} {constants}: {code}"
        assert code["shared"] <= most_bytes, about
        if kernel is attend and capability < 90:
            itemsizes = BYTES[pointers["queries"]], BYTES[pointers["keys"]]
            estimate = shared_bytes(constants["ROWS"], *stages, constants["HEAD_DIM"], *itemsizes)
            assert code["shared"] <= estimate, about
        assert code["spilled"] <= (MOST_SPILLED if may_spill(capability, kernel, pointers, constants) else 0), about
        if kernel in (attend, triton_linear.multiply):
            assert 16 in code["copies"], about
            assert code["products"] == products_of(capability, pointers, constants), about


def may_spill(capability, kernel, pointers, constants):
    """Whether a program holds more than the registers of its threads, as those of prompts may: of float32, wide heads,
    keys that are widened, and many rows before Hopper. Steps never do."""
    if kernel not in (attend, triton_linear.multiply) or constants.get("SPLITS", ALONE) > ALONE:
        return False
    is_wide = "fp32" in (pointers.get("queries"), pointers.get("inputs")) or constants.get("HAS_SCALES")
    has_many = constants["ROWS"] >= MANY_ROWS and capability < 90
    return is_wide or has_many or constants.get("HEAD_DIM", 0) > 128


def products_of(capability, pointers, constants):
    """The instructions of tensor cores: float32 is multiplied without them, to all of its bits."""
    if "fp32" in (pointers.get("queries"), pointers.get("inputs")):
        return []
    few = "mma.sync"
    return [MANY_ROWS_BY.get(capability, few) if constants["ROWS"] >= MANY_ROWS else few]
