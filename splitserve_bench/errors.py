"""Define the error of a benchmark that cannot measure."""

from serving_core.errors import SplitServeError


class BenchError(SplitServeError):
    """A measurement that cannot be made: a server does not reply, a file cannot be read, a request fails."""
