"""What all tests share."""

import gc
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples each time, and none fails for the time that it takes: machines differ, and may be busy.
settings.register_profile(
    "deterministic", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("deterministic")

# The files that take longest come first, so that no worker is left alone with one of them at the end. Where time may be
# over before, they come last: most tests are in the others.
LONGEST = (
    "system/test_bits",
    "system/test_foreign_models",
    "system/test_moves",
    "schedules/test_schedules",
    "faults/test_matrix",
    "unit/splitserve_bench/test_goodput_more",
    "system/test_ray",
    "system/test_faults",
    "system/test_stages",
    "unit/engine/test_bits",
    "system/test_tensor_parallel",
    "system/test_start",
    "unit/splitserve/test_launcher",
    "unit/engine/test_foreign_ranks",
    "system/test_resume",
    "unit/serving_node/test_slack",
    "unit/splitserve_bench/test_goodput_knowledge",
    "unit/splitserve_bench/test_dominance_sample",
    "unit/engine/test_tensor_parallel",
    "unit/kv_transfer/test_faults",
    "unit/engine/test_foreign",
    "unit/serving_node/test_logic_fleet",
    "unit/splitserve_bench/test_goodput_overload",
    "unit/splitserve_bench/test_serve_command",
    "unit/splitserve_bench/test_simulate_property",
)
TESTS = Path(__file__).parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a script's background, and so for all that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

gc.disable()  # until all is collected: ten thousand tests would be looked through again and again


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--begin-by", type=float, metavar="UNIX_SECONDS", help="skips tests whose turn comes later")
    parser.addoption("--simulate-cuda", action="store_true", help="tests/gpu on a simulated device where there is none")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    begin_by_s = item.config.getoption("begin_by")
    if begin_by_s is not None and time.time() > begin_by_s:
        pytest.skip("its turn had not come by the time that --begin-by gives")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {TESTS / f"{name}.py": place for place, name in enumerate(LONGEST)}
    of_others = len(places) if config.getoption("begin_by") is None else -1
    items.sort(key=lambda item: places.get(item.path, of_others))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
