"""What was freed below something that stays is given back to the system."""

import ctypes
import subprocess
import sys

import pytest

MEASURING = """
import ctypes
from serving_core import heap
from serving_core.memory import resident_bytes

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resident_bytes()
places = [library.malloc(1000) for _ in range(60_000)]
for place in places:
    ctypes.memset(place, 1, 1000)
for place in places[:-1]:
    library.free(place)
held = resident_bytes() - before
heap.trim()
print(held, resident_bytes() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library gives nothing back")
def test_what_was_freed_goes_back_to_the_system():
    command = [sys.executable, "-c", MEASURING]
    held, left = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert held > 50_000_000
    assert left < held / 4
