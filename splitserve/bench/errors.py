"""What a bench raises on purpose."""

from engine.errors import SplitServeError


class BenchError(SplitServeError):
    """A measurement that cannot be made."""
