"""Which of the two parts of requests lacks hands. Pure.

    reading   the prompts that wait would take the readers LONG_QUEUE_S, and running answers leave the writers room
    writing   running answers fill the writers, and readers have next to nothing to do
    none      the queue is short, and writers would have room without those that are lent to them

Prompts and answers are counted by the ledger, readers' rates as they have measured them. Between the limits nothing is
the matter, one way or the other.
"""

import math
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from coordinator.control.ledger import Ledger
from coordinator.control.registry import Node

LONG_QUEUE_S: Final = 1.0
SHORT_QUEUE_S: Final = 0.2
FULL: Final = 0.9  # part of the seats, or of the KV pools, that is taken
ROOMY: Final = 0.6


class Pressure(Enum):
    """What presses."""

    READING = auto()
    WRITING = auto()
    NONE = auto()


class PressureGauge:
    """Measures again and again, and tells for how long it has been so."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seen: Pressure | None = None
        self._since_s = 0.0

    def measure(self, nodes: Collection[Node], now: float) -> tuple[Pressure | None, float]:
        """What presses, None between the limits, and the seconds since it does. To be called some times a second."""
        seen = self._look([node for node in nodes if node.is_ready])
        if seen is not self._seen:
            self._seen, self._since_s = seen, now
        return seen, now - self._since_s

    def _look(self, nodes: Collection[Node]) -> Pressure | None:
        readers = [node for node in nodes if node.usable.reads]
        writers = [node for node in nodes if node.usable.writes]
        rate = sum(node.load.prefill_tokens_per_s for node in readers)
        if not rate or not writers:
            return None
        queue_s = sum(self._ledger.of(node).tokens_to_compute for node in readers) / rate
        taken = self._taken(writers)
        if queue_s >= LONG_QUEUE_S and taken < FULL:
            return Pressure.READING
        if taken >= FULL and queue_s <= SHORT_QUEUE_S:
            return Pressure.WRITING
        is_calm = queue_s <= SHORT_QUEUE_S and self._taken([node for node in writers if node.home.writes]) <= ROOMY
        return Pressure.NONE if is_calm else None

    def _taken(self, writers: Collection[Node]) -> float:
        """The part that all running answers take of these writers' seats or pools, whichever is larger. Those whose
        prompts wait to be read hold some too, but would not if there were more readers."""
        if not writers:
            return math.inf
        num_answers, num_tokens = self._ledger.running()
        return max(
            num_answers / sum(node.usable.seats for node in writers),
            num_tokens / sum(node.pool_tokens for node in writers),
        )
