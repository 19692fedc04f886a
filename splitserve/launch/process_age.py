"""How long this process has been running."""

import os
import sys
import time
from pathlib import Path

import psutil


def process_age_s() -> float:
    """Seconds since this process was started, interpreter start-up included.

    On Linux from the kernel's own clock: psutil's start time is off by up to a second, the boot time's rounding.
    """
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    fields_after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_ticks = int(fields_after_name[19])  # proc(5): starttime is field 22
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
