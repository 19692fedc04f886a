import contextlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.errors import SettingsError
from serving_core.process.cpus import confined, divide_cpus, parse_cpus, pin


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", [0]), ("0-3,8", [0, 1, 2, 3, 8]), ("7, 2-3,3", [2, 3, 7]), ("1023", [1023])]
)
def test_parse(text, cpus):
    assert parse_cpus(text) == cpus


def test_a_share_of_the_cpus_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 4, 5, 8})
    assert [parse_cpus(f"{i}/2") for i in (1, 2)] == [[1, 3, 4], [5, 8]]
    assert parse_cpus("1/1") == [1, 3, 4, 5, 8]
    assert [parse_cpus(f"{i}/7") for i in (1, 6, 7)] == [[1], [1], [3]]  # some share one


@pytest.mark.parametrize(
    "text",
    [
        "0/4",
        "5/4",
        "1/1024",
        "1/0",
        "1/",
        "/2",
        "1/2,3",
        "0-1/2",
        ",",
        "a",
        "-1",
        "3-",
        "1--2",
        "3-1",
        "1024",
        "0-99999999",
        "0.5",
        "1 2",
        "²",
    ],
)
def test_nonsense(text):
    with pytest.raises(SettingsError, match="--cpus"):
        parse_cpus(text)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("module", "num_threads"),
    [
        ("os", "os.environ['OMP_NUM_THREADS']"),
        pytest.param("torch", "torch.get_num_threads()", marks=pytest.mark.nightly),
    ],
)
def test_pin_sets_affinity_and_the_number_of_threads_for_what_is_imported_later(module, num_threads):
    cpu = max(os.sched_getaffinity(0))
    code = f"""
import os
from serving_core.process.cpus import divide_cpus, pin
pin("{cpu}")
import {module}
print(os.sched_getaffinity(0), {num_threads})
"""
    assert run(code).stdout == f"{{{cpu}}} 1\n"


def test_pin_to_a_cpu_that_is_not_there():
    missing = next(cpu for cpu in range(1024) if cpu not in os.sched_getaffinity(0) and cpu >= os.cpu_count())
    code = """
from serving_core.process.cpus import divide_cpus, pin
from serving_core.errors import SettingsError
try:
    pin("{}")
except SettingsError as error:
    print(error)
"""
    assert "--cpus" in run(code.format(missing)).stdout
    with_one_that_is = f"{max(os.sched_getaffinity(0))},{missing}"
    assert f"there is no CPU {missing}" in run(code.format(with_one_that_is)).stdout


def test_empty_text_leaves_everything(monkeypatch):
    before = os.sched_getaffinity(0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    pin("")
    assert os.sched_getaffinity(0) == before
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_is_confined_for_as_long_as_it_is_told(fails):
    before = os.sched_getaffinity(0)
    with contextlib.suppress(ZeroDivisionError), confined([max(before)]):
        assert os.sched_getaffinity(0) == {max(before)}
        if fails:
            _ = 1 / 0
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("cpus", "num_nodes", "shares"),
    [([4, 5], 3, ["4", "5", "4"]), ([], 2, ["", ""]), ([0, 1, 2], 2, ["0,1", "2"]), ([7], 1, ["7"])],
)
def test_cpus_are_shared_only_when_there_are_too_few(cpus, num_nodes, shares):
    assert divide_cpus(cpus, num_nodes) == shares


@given(cpus=st.lists(st.integers(0, 1023), unique=True, max_size=40).map(sorted), num_nodes=st.integers(1, 12))
def test_shares_of_the_cpus_are_disjoint_complete_and_even(cpus, num_nodes):
    shares = [[int(cpu) for cpu in share.split(",") if cpu] for share in divide_cpus(cpus, num_nodes)]
    assert len(shares) == num_nodes
    if len(cpus) >= num_nodes:
        assert [cpu for share in shares for cpu in share] == cpus
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
