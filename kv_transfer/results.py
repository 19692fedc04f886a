"""Define how a transfer ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from serving_core import reasons
from serving_core.errors import SplitServeError


class TransferError(SplitServeError):
    """A descriptor, message or layout that the KV transfer cannot accept."""


class RemoteKVRevoked(TransferError):
    """A KV holder has revoked blocks of distributed KV."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The sender's result of a transfer that the receiver has committed.

    `num_bytes` counts every block once, however often it was sent.
    """

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Received:
    """The receiver's result of a transfer whose blocks are all verified and written.

    `tail` holds the bytes that the sender's caller passed to `finish`; `num_bytes` counts the received blocks.
    """

    tail: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The result of a failed transfer: nothing may be read from the receiver's blocks.

    `reason` is a value from serving_core.reasons; `message` gives details.
    """

    reason: str
    message: str


Done = TypeVar("Done", Sent, Received)


def combined(results: Sequence[Done | TransferFailed]) -> Done | TransferFailed:
    """Return the result of a transfer from the results of its parts, of which there is at least one.

    It is the first failure in the given order, else success with the sum of the bytes. Parts with different tails are a
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
