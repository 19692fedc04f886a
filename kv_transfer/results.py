"""Define how a transfer ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from serving_core import reasons
from serving_core.errors import SplitServeError


class TransferError(SplitServeError):
    """Report a descriptor, message or layout that the KV transfer cannot accept."""


class RemoteKVRevoked(TransferError):
    """Report that a KV holder revokes blocks of distributed KV."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Report that the receiver has committed. `num_bytes` counts every block once, however often it was sent."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Received:
    """Report that every block is verified and in place.

    `tail` holds the bytes that the sender's caller passed to `finish`; `num_bytes` counts the received blocks.
    """

    tail: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Report that a transfer failed and nothing may be read from the receiver's blocks.

    `reason` is a value from serving_core.reasons; `message` gives details.
    """

    reason: str
    message: str


Done = TypeVar("Done", Sent, Received)


def combined(results: Sequence[Done | TransferFailed]) -> Done | TransferFailed:
    """Return the result of a transfer from the results of its parts, of which there is at least one.

    The result is the first failure in the given order, else the sum of the bytes. Parts with different tails are a
    failure.
    """
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
