"""Choose the CPUs of a node. Torch-free: the number of threads must be known before torch is imported."""

import contextlib
import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence

from serving_core.errors import SettingsError

LARGEST_CPU = 1023  # the largest number in the kernel's default CPU mask
_PART = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)
_SHARE = re.compile(r"(\d{1,4})/(\d{1,4})", re.ASCII)


def parse_cpus(text: str) -> list[int]:
    """Return the CPU numbers of a text such as "0-3,8", ascending; "2/4" is the second quarter of this process's CPUs.

    Raises SettingsError for any other text.
    """
    if share := _SHARE.fullmatch(text.strip()):
        return _share(int(share[1]), int(share[2]))
    cpus: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise SettingsError(f"--cpus must look like 0-3,8 or 1/4, not {text!r}")
        first = int(match[1])
        last = int(match[2] or first)
        if not first <= last <= LARGEST_CPU:
            raise SettingsError(f"--cpus {text!r}: {part.strip()!r} is not a range of CPUs up to {LARGEST_CPU}")
        cpus.update(range(first, last + 1))
    return sorted(cpus)


def divide_cpus(cpus: Sequence[int], num_parts: int) -> list[str]:
    """Divide the CPUs into `num_parts` texts in the form of --cpus: disjoint and as even as possible.

    With fewer CPUs than parts, each part is one CPU, shared by several parts. The texts are empty if `cpus` is.
    """
    if not cpus:
        return [""] * num_parts
    if len(cpus) < num_parts:
        return [str(cpus[i % len(cpus)]) for i in range(num_parts)]
    starts = [-(-i * len(cpus) // num_parts) for i in range(num_parts + 1)]
    return [",".join(map(str, cpus[start:end])) for start, end in itertools.pairwise(starts)]


def allowed_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may use, ascending; an empty list where the system does not
    report them (macOS)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _share(number: int, num_shares: int) -> list[int]:
    if not 1 <= number <= num_shares <= LARGEST_CPU:
        raise SettingsError(f"--cpus {number}/{num_shares} is not a share: 1/N to N/N, with N up to {LARGEST_CPU}")
    if not hasattr(os, "sched_getaffinity"):
        raise SettingsError("--cpus needs Linux")
    return parse_cpus(divide_cpus(allowed_cpus(), num_shares)[number - 1])


@contextlib.contextmanager
def confined(cpus: Collection[int]) -> Iterator[None]:
    """Return a context manager that restricts this thread to these CPUs, where the system supports it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin(cpus: str) -> None:
    """Restrict this process to the CPUs of a --cpus text, and torch, if not imported yet, to as many threads.

    An empty text changes nothing. Raises SettingsError if a CPU does not exist, and off Linux.
    """
    if not cpus:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise SettingsError("--cpus needs Linux")
    wanted = set(parse_cpus(cpus))
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        raise SettingsError(f"--cpus {cpus}: {error.strerror}") from error
    if missing := wanted - os.sched_getaffinity(0):
        raise SettingsError(f"--cpus {cpus}: there is no CPU {', '.join(map(str, sorted(missing)))} for this process")
    os.environ["OMP_NUM_THREADS"] = str(len(wanted))
