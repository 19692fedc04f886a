"""What this machine does with plain bytes: the rates that a transfer is compared with."""

import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64_intdigest

COPY, XXH3, TCP, UNIX = "memory copy", "XXH3", "TCP socket", "Unix socket"
CHECKED = "Unix socket, XXH3 at both ends"  # what is left of a socket for whoever checks every byte on the same core
YARDSTICKS: Final = (COPY, XXH3, TCP, UNIX, CHECKED)
CHECKED_BYTES: Final = 2**20  # that are checked at a time, and still lie in the CPU's cache when they are sent


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of several repeats: the fastest, which others on the machine disturbed least, the median, quartiles."""

    fastest_s: float
    median_s: float
    low_s: float
    high_s: float


def spread_of(samples_s: Sequence[float]) -> Spread:
    """Of one sample at least, which is its own quartiles when it is alone."""
    if len(samples_s) == 1:
        return Spread(*[samples_s[0]] * 4)
    low_s, median_s, high_s = statistics.quantiles(samples_s, n=4, method="inclusive")
    return Spread(min(samples_s), median_s, low_s, high_s)


class Plain:
    """So many bytes in memory, to be copied, checked and sent. Every buffer is touched before the first measurement."""

    def __init__(self, num_bytes: int) -> None:
        self.source = bytearray(b"\1") * num_bytes
        self._target = bytearray(b"\2") * num_bytes

    def copy_s(self) -> float:
        """Seconds to copy them from one buffer into another."""
        start_s = time.perf_counter()
        memoryview(self._target)[:] = self.source
        return time.perf_counter() - start_s

    def checksum_s(self) -> float:
        """Seconds to compute their XXH3 of 64 bits."""
        start_s = time.perf_counter()
        xxh3_64_intdigest(self.source)
        return time.perf_counter() - start_s

    def send_s(self, address: str | Sequence[str | int], timeout_s: float, *, is_checked: bool) -> float:
        """Seconds until a process that listens there has read them all and said so. A path is a Unix socket."""
        view = memoryview(self.source)
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(address if isinstance(address, str) else tuple(address))
            start_s = time.perf_counter()
            if is_checked:
                for start in range(0, len(view), CHECKED_BYTES):
                    piece = view[start : start + CHECKED_BYTES]
                    xxh3_64_intdigest(piece)
                    connection.sendall(piece)
            else:
                connection.sendall(view)
            connection.recv(1)
            return time.perf_counter() - start_s
