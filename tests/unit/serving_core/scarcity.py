"""A process that has run out of descriptors."""

import contextlib
import os
import resource


@contextlib.contextmanager
def no_descriptors_left():
    """This process can open nothing; what it gets is a function that closes so many of the files which fill it up."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    filling = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 50, limits[1]))

    def close(number):
        for _ in range(number):
            os.close(filling.pop())

    try:
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.open(os.devnull, os.O_RDONLY))
        yield close
    finally:
        close(len(filling))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
