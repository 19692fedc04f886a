"""Which of the two parts of requests lacks hands. Pure.

    reading   the prompts that wait would take the readers LONG_QUEUE_S, and running answers leave the writers room
    writing   running answers fill the writers, and readers have next to nothing to do
    no reader, no writer
              nobody that is ready does the one part, and some do the other
    none      the queue is short, and writers would have room without those that are lent to them

Prompts and answers are counted by the ledger, readers' rates as they have measured them. Where requests have limits,
the median of those counts: half of the time until first tokens are due is a long queue too, and writers are full with
as many answers as keep a limit on the others. Between the bounds nothing is the matter, one way or the other.
"""

import math
from collections.abc import Collection
from enum import Enum, auto
from statistics import median
from typing import Final

from coordinator.control.ledger import Ledger
from coordinator.control.registry import Node

LONG_QUEUE_S: Final = 1.0
LONG_PART: Final = 0.5  # of the time until first tokens are due
SHORT_QUEUE_S: Final = 0.2
EVEN: Final = 0.6  # of the answers that keep their limits together: so many on average, as they come and go
FULL: Final = 0.9  # part of the seats, or of the KV pools, that is taken
ROOMY: Final = 0.6


class Pressure(Enum):
    """What presses."""

    READING = auto()
    WRITING = auto()
    NO_READER = auto()
    NO_WRITER = auto()
    NONE = auto()


class PressureGauge:
    """Measures again and again, and tells for how long it has been so."""

    def __init__(self, ledger: Ledger, *, embeds: bool = False) -> None:
        """`embeds`: whether nobody has to write."""
        self._ledger = ledger
        self._embeds = embeds
        self._seen: Pressure | None = None
        self._since_s = 0.0

    def measure(self, nodes: Collection[Node], now: float) -> tuple[Pressure | None, float]:
        """What presses, None between the limits, and the seconds since it does. To be called some times a second."""
        seen = self._look([node for node in nodes if node.is_ready], now)
        if seen is not self._seen:
            self._seen, self._since_s = seen, now
        return seen, now - self._since_s

    def _look(self, nodes: Collection[Node], now: float) -> Pressure | None:
        readers = [node for node in nodes if node.usable.reads]
        writers = [node for node in nodes if node.usable.writes]
        if writers and not readers:
            return Pressure.NO_READER
        if readers and not writers and not self._embeds:
            return Pressure.NO_WRITER
        rate = sum(node.load.prefill_tokens_per_s for node in readers)
        if not rate or not writers:
            return None
        queue_s = sum(self._ledger.of(node).tokens_to_compute for node in readers) / rate
        taken = self._taken(writers)
        if queue_s >= min(LONG_QUEUE_S, LONG_PART * self._usual_left_s(readers, now)) and taken < FULL:
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
        num_answers, num_tokens, num_held = self._ledger.running()
        return max(
            num_answers / sum(node.usable.seats for node in writers),
            num_held / sum(node.pool_tokens for node in writers),
            num_answers / self._num_in_time(writers, num_tokens / num_answers) if num_answers else 0.0,
        )

    def _num_in_time(self, writers: Collection[Node], num_cached: float) -> float:
        """Answers behind so many tokens each that all these writers could give their tokens in time; inf without
        limits, or where no answer could keep them."""
        tpots_s = [each.due.tpot_s for node in writers for each in self._ledger.owed(node) if each.is_written]
        limit_s = median([each for each in tpots_s if each < math.inf] or [math.inf])
        seats = [node.step_weights.num_answers_within(limit_s, num_cached) for node in writers]
        return EVEN * sum(seats) or math.inf

    def _usual_left_s(self, readers: Collection[Node], now: float) -> float:
        """Until the first tokens of the prompts that wait are due; inf without limits."""
        owed = [each for node in readers for each in self._ledger.owed(node) if each.num_to_compute]
        dues_s = [due_s for each in owed if (due_s := each.due.token_s(each.num_output)) < math.inf]
        return median(dues_s) - now if dues_s else math.inf
