"""Become another program that dies with its parent.

    python -m serving_core.process.child PARENT_PID PROGRAM [ARGUMENT ...]

A wrapper program instead of a hook between fork and exec: the launcher has gRPC's threads, and forking Python code
under threads may deadlock.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>; kept over exec
READ_BY_PYTHON = ("PYTHON", "LC_", "LD_", "MALLOC_", "GLIBC_")  # prefixes of names
READ_BY_ALL = {"HOME", "LANG", "PATH", "TZ"}


def bare_environment() -> dict[str, str]:
    """Return the environment for a helper process that must hold no secret, not even in /proc.

    It has only the variables that Python and the C library read.
    """
    return {name: value for name, value in os.environ.items() if name in READ_BY_ALL or name.startswith(READ_BY_PYTHON)}


def die_with(parent: int) -> bool:
    """Let Linux kill this process when its parent ends; return whether the process `parent` is still the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def main() -> None:
    parent, *argv = sys.argv[1:]
    if not die_with(int(parent)):
        sys.exit("the launcher is gone")
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main()
