"""Measure how much memory this process uses, and may still use. Torch-free."""

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
    """Return the bytes of memory that this process may still use: the machine's, or what its cgroups' limits leave."""
    available: int = psutil.virtual_memory().available
    return min([available, *cgroup_rooms(CGROUP_ROOT, CGROUPS_OF_SELF)])


def cgroup_rooms(root: Path, cgroups_of_self: Path) -> Iterator[int]:
    """Yield the bytes that each memory limit on this process leaves; none without limits, as off Linux.

    `root` is the folder of cgroups, and `cgroups_of_self` the file that lists those of this process.
    """
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
