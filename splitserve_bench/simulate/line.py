"""The messages between one node of a simulation and its coordinator."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from protos import fleet_pb2
from splitserve_bench.simulate.agenda import Agenda
from splitserve_bench.simulate.noise import Draws
from splitserve_bench.simulate.stretch import StreakTokens, Stretch

Message = TypeVar("Message")

Event = fleet_pb2.NodeEvent | StreakTokens
"""What a node tells the coordinator; the tokens of most steps as what stands for fleet_pb2.StepTokens."""


class Line(Generic[Message]):
    """One direction of a node's stream: messages arrive late, and in order."""

    def __init__(
        self, agenda: Agenda, message_s: Callable[[float], float], noise: Draws, hear: Callable[[Message], None]
    ) -> None:
        """`message_s` tells what a message takes that is sent at that moment, in the mean of its `noise`."""
        self._agenda, self._message_s, self._noise, self._hear = agenda, message_s, noise, hear
        self._num_sent = 0
        self._last_s = 0.0  # arrival of the last one
        self.is_cut = False

    def send(self, message: Message) -> None:
        self._agenda.at(self._next_arrival_s(), partial(self._arrive, message))

    def _next_arrival_s(self) -> float:
        """Of a message that is sent now."""
        self._last_s = self._arrival_s(self._num_sent, self._agenda.now, self._last_s)
        self._num_sent += 1
        return self._last_s

    def _arrival_s(self, number: int, sent_s: float, last_s: float) -> float:
        return max(last_s, sent_s + self._message_s(sent_s) * self._noise.factor(number))

    def _arrive(self, message: Message) -> None:
        if not self.is_cut:
            self._hear(message)


@dataclass(slots=True, eq=False)
class _Told:
    """Messages about a stretch: one for each step."""

    stretch: Stretch
    arrivals_s: list[float]
    num_heard: int = 0
    is_past: bool = False  # whether a message has arrived that was sent after all of these


class EventLine(Line[Event]):
    """From a node to the coordinator. What a stretch gives does not come by itself: the coordinator asks for what has
    arrived before it does anything that it might bear on."""

    def __init__(
        self, agenda: Agenda, message_s: Callable[[float], float], noise: Draws, hear: Callable[[Event], None]
    ) -> None:
        super().__init__(agenda, message_s, noise, hear)
        self._told: deque[_Told] = deque()
        self._under_way: _Told | None = None

    def send(self, message: Event) -> None:
        self._agenda.at(self._next_arrival_s(), partial(self._arrive_after, tuple(self._told), message))

    def _arrive_after(self, before: tuple[_Told, ...], message: Event) -> None:
        """Messages may arrive at one moment: those that were sent before this one are heard before it."""
        for told in before:
            told.is_past = True
        self._arrive(message)

    def begin(self, stretch: Stretch) -> None:
        """Its steps are told as they end. `end` is to follow before anything else is sent."""
        arrivals_s, last_s = list[float](), self._last_s
        for number, end_s in enumerate(stretch.ends_s, self._num_sent):
            last_s = self._arrival_s(number, end_s, last_s)
            arrivals_s.append(last_s)
        self._under_way = _Told(stretch, arrivals_s)
        self._told.append(self._under_way)

    def end(self, num_steps: int) -> None:
        """So many of its steps have come to pass."""
        assert self._under_way is not None
        arrivals_s, self._under_way = self._under_way.arrivals_s, None
        del arrivals_s[num_steps:]
        self._num_sent += num_steps
        if arrivals_s:
            self._last_s = arrivals_s[-1]

    def arrived(self, now: float) -> list[tuple[Stretch, int, Sequence[float]]]:
        """What has come before now and was not asked for yet: of each stretch from which step on, and when."""
        told = self._told
        heard: list[tuple[Stretch, int, Sequence[float]]] = []
        while told:
            first = told[0]
            num_before, arrivals_s = first.num_heard, first.arrivals_s
            first.num_heard = len(arrivals_s) if first.is_past else bisect_left(arrivals_s, now, num_before)
            if first.num_heard > num_before:
                heard.append((first.stretch, num_before, arrivals_s[num_before : first.num_heard]))
            if first is self._under_way or first.num_heard < len(arrivals_s):
                break
            told.popleft()
        return heard
