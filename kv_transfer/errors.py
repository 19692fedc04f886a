"""What the corridor raises."""

from serving_core.errors import SplitServeError


class TransferError(SplitServeError):
    """A ticket, a message or a layout that the corridor cannot accept."""


class AnnexRecalled(TransferError):
    """The node that holds an annex needs its blocks."""
