"""The version of SplitServe, which `pyproject.toml` reads: a checkout that is not installed knows it too."""

import re
from typing import Final

VERSION: Final = "0.1.0"
MAX_SKEW: Final = 1  # minors between processes that serve together

_MINOR: Final = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})\..*", re.ASCII)


def is_within_skew(version: str, other: str) -> bool:
    """Return whether processes of these versions may serve together: of one major, minors at most MAX_SKEW apart."""
    given, expected = _MINOR.fullmatch(version), _MINOR.fullmatch(other)
    if given is None or expected is None or given[1] != expected[1]:
        return False
    return abs(int(given[2]) - int(expected[2])) <= MAX_SKEW
