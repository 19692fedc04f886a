"""What a bench raises on purpose."""

from serving_core.errors import SplitServeError


class BenchError(SplitServeError):
    """A measurement that cannot be made."""
