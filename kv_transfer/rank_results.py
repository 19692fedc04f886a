"""Combine the results of one transfer over all ranks of a node. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kv_transfer.results import Received, Sent, TransferFailed, combined
from protos import ranks_pb2

Done = TypeVar("Done", Sent, Received)


@dataclass(slots=True)
class _Parts(Generic[Done]):
    missing: set[int]  # ranks
    results: list[Done | TransferFailed] = field(default_factory=list)  # in order of arrival


class RankResults(Generic[Done]):
    """Track the transfers of one node, by epoch."""

    def __init__(
        self, tp_size: int, cancel: Callable[[int], None], on_ended: Callable[[int, Done | TransferFailed], None]
    ) -> None:
        """Create an empty tracker.

        `cancel` ends the rest of a transfer on every rank. `on_ended` receives the result of the whole transfer once no
        rank touches its blocks: the first failure if there is one.
        """
        self._tp_size = tp_size
        self._cancel = cancel
        self._on_ended: Callable[[int, Done | TransferFailed], None] = on_ended
        self._open: dict[int, _Parts[Done]] = {}

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._open

    def __len__(self) -> int:
        """Return the number of transfers that are not over on every rank."""
        return len(self._open)

    def begin(self, epoch: int) -> None:
        assert epoch not in self._open, "an epoch was used twice"
        self._open[epoch] = _Parts(set(range(self._tp_size)))

    def end(self, epoch: int, rank: int, result: Done | TransferFailed) -> None:
        """Record the result of one rank's part."""
        parts = self._open[epoch]
        parts.missing.remove(rank)
        is_first_failure = isinstance(result, TransferFailed) and not any(
            isinstance(each, TransferFailed) for each in parts.results
        )
        parts.results.append(result)
        if not parts.missing:
            del self._open[epoch]
            self._on_ended(epoch, combined(parts.results))
        elif is_first_failure:
            self._cancel(epoch)


def to_wire(epoch: int, result: Sent | Received | TransferFailed) -> ranks_pb2.TransferEnded:
    """Return the message by which a follower reports the result of its part."""
    match result:
        case Sent(num_bytes):
            return ranks_pb2.TransferEnded(epoch=epoch, ok=True, num_bytes=num_bytes)
        case Received(tail, num_bytes):
            return ranks_pb2.TransferEnded(epoch=epoch, ok=True, num_bytes=num_bytes, tail=tail)
        case TransferFailed(reason, message):
            return ranks_pb2.TransferEnded(epoch=epoch, reason=reason, message=message)


def failure_from_wire(wire: ranks_pb2.TransferEnded) -> TransferFailed:
    return TransferFailed(wire.reason, wire.message)
