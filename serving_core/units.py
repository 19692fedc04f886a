"""Format and parse sizes in bytes."""

import re
from typing import Final

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30
UNITS: Final = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))  # units in which sizes are shown
_FACTORS: Final = {
    "tib": 2**40,
    **{unit.lower(): num_bytes for unit, num_bytes in UNITS},
    "tb": 10**12,
    "gb": 10**9,
    "mb": 10**6,
    "kb": 10**3,
}

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([TGMK]i?B|B)?", re.ASCII | re.IGNORECASE)


def size_of(num_bytes: int) -> str:
    """Return a number of bytes in words, such as 1.5 GiB, in the largest unit of which there is at least one."""
    for unit, unit_bytes in UNITS:
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes} B"


def parse_size(text: str) -> int:
    """Return the number of bytes in a text such as 536870912, 512MiB, 0.5 GiB, or 2GB (2 * 10**9), in any case.

    Raises ValueError for any other text, and for less than a byte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size such as 512MiB, 2GiB, 2GB or 536870912")
    factor = _FACTORS.get((match[2] or "").lower(), 1)
    num_bytes = round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if not num_bytes and match[1].strip("0."):
        raise ValueError(f"{text!r} is less than a byte")
    return num_bytes
