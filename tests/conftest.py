"""What all tests share."""

import gc
import signal
from pathlib import Path

import pytest

from tests.effort import register_profiles

register_profiles()

# The files that take longest come first, so that no worker is left alone with one of them at the end.
LONGEST = (
    "system/test_bits",
    "system/test_ray",
    "system/test_soak",
    "fuzz/test_search",
    "schedules/test_schedules",
    "system/test_transformers_models",
    "system/test_moves",
    "faults/test_matrix",
    "system/test_faults",
    "system/test_descriptors",
    "system/test_bad_input",
    "unit/splitserve_bench/test_goodput",
    "unit/splitserve_bench/test_compare_run",
    "unit/serving_node/test_chunk_budget",
    "unit/serving_node/test_scheduler_fleet",
    "unit/engine/test_bits",
    "unit/engine/test_transformers_backend_ranks",
    "unit/engine/test_tensor_parallel",
    "unit/splitserve/test_launcher",
)
TESTS = Path(__file__).parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a script's background, and so for all that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

gc.disable()  # until all is collected: ten thousand tests would be looked through again and again


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", metavar="I/N", help="of the test files every Nth, from the Ith on")
    parser.addoption("--simulate-cuda", action="store_true", help="tests/gpu on a simulated device where there is none")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {TESTS / f"{name}.py": place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places), "LONGEST names what is not there"
    items.sort(key=lambda item: places.get(item.path, len(places)))
    shard, num_shards = map(int, config.getoption("shard").split("/"))
    paths = list(dict.fromkeys(item.path for item in items))
    others = {path for place, path in enumerate(paths) if place % num_shards != shard - 1}
    config.hook.pytest_deselected(items=[item for item in items if item.path in others])
    items[:] = [item for item in items if item.path not in others]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
