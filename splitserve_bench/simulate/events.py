"""The clock of a simulation, the tokens of its model, and the messages between its nodes and its coordinator."""

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

from coordinator.control.live import TokenRow
from protos import fleet_pb2
from serving_core.requests import Request
from serving_node.streak import Streak
from splitserve_bench.errors import BenchError
from splitserve_bench.simulate.costs import Draws

Action = Callable[[], None]


class Agenda:
    """What is to happen when. Of what is due at one moment, first comes what was planned first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, moment_s: float, action: Action) -> None:
        """Plans an action; what is late already is due now."""
        heapq.heappush(self._due, (moment_s if moment_s > self.now else self.now, next(self._order), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Lets things happen until `is_over`, which is asked after each. Raises BenchError when nothing is left."""
        due = self._due
        while not is_over():
            if not due:
                raise BenchError(f"nothing happens any more, {self.now:.3f} s after the start")
            self.now, _, action = heapq.heappop(due)
            action()


class ToyModel:
    """Knows nothing but the size of its vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def next_ids(self, requests: Iterable[Request]) -> list[int]:
        """What follows the tokens of each."""
        known = [request.token_ids for request in requests]
        return self._next([each[-1] for each in known], map(len, known))

    def following(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """So many tokens that follow these."""
        last, size, following = token_ids[-1], self._vocab_size, list[int]()
        for place in range(len(token_ids), len(token_ids) + num_tokens):
            last = (31 * last + 17 * place + 7) % size
            following.append(last)
        return following

    def check_answer(self, prompt: Sequence[int], answer: list[int]) -> None:
        """Fails unless this is what the model says to the prompt, as far as it goes."""
        places = range(len(prompt), len(prompt) + len(answer))
        expected = self._next([prompt[-1], *answer], places)
        assert answer == expected, "an answer has a token of another one"

    def _next(self, last_ids: Iterable[int], places: Iterable[int]) -> list[int]:
        """The tokens at these places, behind those."""
        size = self._vocab_size
        return [(31 * last + 17 * place + 7) % size for last, place in zip(last_ids, places, strict=False)]


@dataclass(slots=True)
class StreakToken:
    """What fleet_pb2.SampledToken says of a token that does not end its answer."""

    attempt: Request
    index: int
    token_id: int
    finish_reason: int = 0
    num_proposed: int = 0  # streaks have no candidates


@dataclass(slots=True)
class StreakTokens:
    """What fleet_pb2.StepTokens says of a step, made for less: it crosses no wire."""

    tokens: list[StreakToken]
    step_s: float


class Stretch:
    """The next steps of a streak, and what they give."""

    def __init__(self, streak: Streak, model: ToyModel, started_s: float, ends_s: Sequence[float]) -> None:
        self.streak = streak
        self.ends_s = ends_s
        self.steps_s = [end_s - start_s for start_s, end_s in pairwise([started_s, *ends_s])]
        self.token_ids = [model.following(request.token_ids, len(ends_s)) for request in streak.requests]
        self._first_indices = [request.num_output_tokens for request in streak.requests]

    @property
    def num_steps(self) -> int:
        return len(self.ends_s)

    def num_ended(self, now: float) -> int:
        """Steps that are over but for the last one, which is over when that is taken in."""
        return bisect_right(self.ends_s, now, 0, self.num_steps - 1)

    def cut(self, num_steps: int) -> None:
        """No more than these come to pass."""
        self.ends_s, self.steps_s = self.ends_s[:num_steps], self.steps_s[:num_steps]
        self.token_ids = [new[:num_steps] for new in self.token_ids]

    def rows(self, first: int, num_steps: int) -> list[TokenRow]:
        """What so many steps give each answer."""
        answers = zip(self.streak.requests, self._first_indices, self.token_ids, strict=True)
        return [TokenRow(request, index + first, new[first : first + num_steps]) for request, index, new in answers]

    def tokens(self, step: int) -> StreakTokens:
        """What is to be told of a step."""
        answers = zip(self.streak.requests, self._first_indices, self.token_ids, strict=True)
        told = [StreakToken(request, first + step, new[step]) for request, first, new in answers]
        return StreakTokens(told, self.steps_s[step])


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
