"""Memory: what a cgroup's limit leaves, from trees of files as the kernel shows them, and what this process takes."""

import ctypes
import mmap
import subprocess
import sys

import psutil
import pytest

from serving_core.process.memory import available_bytes, cgroup_rooms, resident_bytes
from tests.unit.serving_core.scarcity import no_descriptors_left

LEVELS = ["", "a", "a/b"]  # the root and two nested groups
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def write_groups(top, names, limits):
    """Nested groups in which 1000 bytes are used, 300 of them for files that can be read again."""
    limit_name, usage_name, reclaimable_name = names
    for level, limit in zip(LEVELS, limits, strict=False):
        folder = top / level
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_name).write_text(f"{limit}\n")
        (folder / usage_name).write_text("1000\n")
        (folder / "memory.stat").write_text(f"anon 700\n{reclaimable_name} 300\n")


@pytest.fixture
def rooms(tmp_path):
    def rooms(of_self: str) -> list[int]:
        (tmp_path / "self").write_text(of_self)
        return list(cgroup_rooms(tmp_path, tmp_path / "self"))

    return rooms


def test_every_level_of_cgroups_may_limit(rooms, tmp_path):
    write_groups(tmp_path, V2, ["max", 5000, 2000])
    assert sorted(rooms("0::/a/b\n")) == [1300, 4300]


def test_the_older_cgroups(rooms, tmp_path):
    write_groups(tmp_path / "memory", V1, [2**63 - 4096, 5000, 2000])
    assert sorted(rooms("5:memory:/a/b\n4:cpu,cpuacct:/c\n0::/\n")) == [1300, 4300, 2**63 - 4096 - 700]


def test_a_container_that_does_not_see_its_path_has_its_own_as_the_root(rooms, tmp_path):
    write_groups(tmp_path / "memory", V1, [900])
    assert rooms("5:memory:/docker/0123abcd\n") == [200]


def test_a_limit_below_what_is_used_leaves_nothing(rooms, tmp_path):
    write_groups(tmp_path, V2, [600])
    assert rooms("0::/\n") == [0]


def test_where_nothing_limits(rooms, tmp_path):
    assert rooms("0::/a\n") == []
    assert list(cgroup_rooms(tmp_path, tmp_path / "no such file")) == []


def test_this_machine_has_some_and_not_more_than_all():
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_what_this_process_takes_is_told_without_a_descriptor_too():
    before = resident_bytes()
    with no_descriptors_left():
        assert resident_bytes() == before
    with mmap.mmap(-1, 64 * 2**20) as ballast:
        for page in range(0, len(ballast), mmap.PAGESIZE):
            ballast[page] = 1
        assert resident_bytes() > before + len(ballast) / 2


# ---- what was freed below something that stays is given back to the system ----

MEASURING = """
import ctypes
from serving_core.process.heap import trim
from serving_core.process.memory import resident_bytes

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resident_bytes()
places = [library.malloc(1000) for _ in range(60_000)]
for place in places:
    ctypes.memset(place, 1, 1000)
for place in places[:-1]:
    library.free(place)
held = resident_bytes() - before
trim()
print(held, resident_bytes() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library gives nothing back")
def test_what_was_freed_goes_back_to_the_system():
    command = [sys.executable, "-c", MEASURING]
    held, left = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert held > 50_000_000
    assert left < held / 4
