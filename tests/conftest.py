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
    parser.addoption("--shard", default="1/1", metavar="I/N", help="of the test files every Nth, from the Ith on")
    parser.addoption("--simulate-cuda", action="store_true", help="tests/gpu on a simulated device where there is none")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {TESTS / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    shard, num_shards = map(int, config.getoption("shard").split("/"))
    paths = list(dict.fromkeys(item.path for item in items))
    others = {path for place, path in enumerate(paths) if place % num_shards != shard - 1}
    config.hook.pytest_deselected(items=[item for item in items if item.path in others])
    items[:] = [item for item in items if item.path not in others]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
