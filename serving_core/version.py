"""The version of SplitServe, which `pyproject.toml` reads: a checkout that is not installed knows it too."""

from typing import Final

VERSION: Final = "0.1.0"
