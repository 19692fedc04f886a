"""How a transfer ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from serving_core import reasons
from serving_core.errors import SplitServeError


class TransferError(SplitServeError):
    """A descriptor, a message or a layout that the corridor cannot accept."""


class AnnexRecalled(TransferError):
    """The node that holds an annex needs its blocks."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The receiver has committed. `num_bytes` counts every block once, however often it was sent."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Received:
    """Every block is verified and in place. `tail` is what the sender's caller gave to finish."""

    tail: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Nothing may be read from the receiver's blocks. `reason` is one of serving_core.reasons; `message` says more."""

    reason: str
    message: str


Done = TypeVar("Done", Sent, Received)


def combined(results: Sequence[Done | TransferFailed]) -> Done | TransferFailed:
    """The end of a whole whose parts, one at least, ended like this, in this order: the first failure, else the sum.
    What was received in parts with different tails is no whole."""
    done: list[Done] = []
    for result in results:
        if isinstance(result, TransferFailed):
            return result
        done.append(result)
    if len(set(map(_tail, done))) > 1:
        return TransferFailed(reasons.TRANSFER_FAILED, "the prefill ranks do not agree on the end of the request")
    return replace(done[0], num_bytes=sum(result.num_bytes for result in done))


def _tail(result: Sent | Received) -> bytes:
    return result.tail if isinstance(result, Received) else b""
