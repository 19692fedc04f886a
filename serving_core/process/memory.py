"""Measure and limit the memory of this process. Torch-free."""

import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from serving_core.net.descriptors import NONE_LEFT

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
CGROUPS_OF_SELF: Final = Path("/proc/self/cgroup")

# Files of a cgroup: its limit, its usage, and the part of it that the kernel reclaims on demand.
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = ("memory.max", "memory.current", "inactive_file")


class _Rss:
    """The resident memory of this process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._num_bytes: int = self._process.memory_info().rss

    def num_bytes(self) -> int:
        try:
            self._num_bytes = self._process.memory_info().rss
        except OSError as error:  # the system reports it in a file
            if error.errno not in NONE_LEFT:
                raise
        return self._num_bytes


_rss: Final = _Rss()


def resident_bytes() -> int:
    """Return the RSS of this process in bytes; the last measurement if no file descriptor is left."""
    return _rss.num_bytes()


def available_bytes() -> int:
    """Return the bytes available to this process: the machine's, or what a limit of its cgroups leaves."""
    available: int = psutil.virtual_memory().available
    return min([available, *cgroup_rooms(CGROUP_ROOT, CGROUPS_OF_SELF)])


def cgroup_rooms(root: Path, cgroups_of_self: Path) -> Iterator[int]:
    """Yield the bytes that each memory limit on this process leaves; none without limits, as off Linux."""
    lines = cgroups_of_self.read_text().splitlines() if cgroups_of_self.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (root / "memory", _V1) if controllers else (root, _V2)
        folder = top / path.lstrip("/")  # a container sees its own folder as the root, and may not see this path
        for place in [folder, *folder.parents]:
            if place.is_relative_to(top) and (place / names[0]).exists():
                yield from _room(place, *names)


def _room(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> Iterator[int]:
    limit = (folder / limit_name).read_text().strip()
    if limit == "max":
        return
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    usage = int((folder / usage_name).read_text()) - int(stat[reclaimable_name])
    yield max(0, int(limit) - usage)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
MAX_HEAP_BYTES: Final = 32 * 2**20  # larger pieces are mapped anew each time; the largest value that glibc accepts
KEPT_BYTES: Final = 128 * 2**20


def trim() -> None:
    """Return freed memory to the system, where the C library supports it, such as after reading a large file."""
    if release := getattr(ctypes.CDLL(None), "malloc_trim", None):
        release(0)


def keep_freed_memory() -> None:
    """Let this process keep up to KEPT_BYTES of freed memory on each heap for reuse.

    By default glibc returns memory after nearly every frame and after some prefill steps, and each page that is fetched
    again costs a fault: up to a fifth of a receiver's CPU time. C libraries other than glibc are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, MAX_HEAP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
