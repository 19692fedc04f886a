"""Provide a simulation's clock, its model's tokens, and the messages between its nodes and its coordinator."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

from serving_core.requests import SampledToken, Work
from splitserve_bench.errors import BenchError
from splitserve_bench.simulate.costs import Draws

Action = Callable[[], None]


class Agenda:
    """The clock and the planned actions of a simulation.

    Of those due at one moment, the one planned first comes first.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, moment_s: float, action: Action) -> None:
        """Plan an action for a moment in seconds; for one that is over, now."""
        heapq.heappush(self._due, (moment_s if moment_s > self.now else self.now, next(self._order), action))

    def after(self, seconds: float, action: Action) -> None:
        """Plan an action for so many seconds from now."""
        self.at(self.now + seconds, action)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run the planned actions, each at its moment, until `is_over()`, which is called after each.

        Raises BenchError when no action is left before that.
        """
        due = self._due
        while not is_over():
            if not due:
                raise BenchError(f"nothing happens any more, {self.now:.3f} s after the start")
            self.now, _, action = heapq.heappop(due)
            action()


class _Tokens(dict[int, SampledToken]):
    """The tokens of a vocabulary by their ids, made when they are first needed."""

    def __missing__(self, token_id: int) -> SampledToken:
        token = self[token_id] = SampledToken(token_id)
        return token


class ToyModel:
    """A model whose next token follows from the last token and the length, so that outputs can be checked."""

    _tokens: Final = _Tokens()  # of all models: there are thousands of simulations in one process

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def next_tokens(self, works: Iterable[Work]) -> list[SampledToken]:
        """Return the results of a step: the token that follows the tokens of each request that samples."""
        tokens, size = self._tokens, self._vocab_size
        return [
            tokens[(31 * known[-1] + 17 * len(known) + 7) % size]
            for request, start, num_tokens, *_ in works
            if start + num_tokens == len(known := request.token_ids)
        ]

    def check_output(self, prompt: Sequence[int], answer: list[int]) -> None:
        """Raise AssertionError unless `answer` is the beginning of the model's output for the prompt."""
        places = range(len(prompt), len(prompt) + len(answer))
        size, last_ids = self._vocab_size, [prompt[-1], *answer]
        expected = [(31 * last + 17 * place + 7) % size for last, place in zip(last_ids, places, strict=False)]
        assert answer == expected, "an answer has a token of another one, twice or out of order"


Event = tuple[str, Any]
"""One event of a node: the name of its field in fleet_pb2.NodeEvent, and the message of that field."""

Message = TypeVar("Message")


class Line(Generic[Message]):
    """One direction of a node's stream: messages arrive after some time, and in order."""

    def __init__(
        self, agenda: Agenda, message_s: Callable[[float], float], noise: Draws, hear: Callable[[Message], None]
    ) -> None:
        """Call `hear` with each message when it arrives.

        `message_s` returns the mean seconds of a message that is sent at a moment; `noise` varies them. Setting
        `is_cut` drops the messages under way.
        """
        self._agenda, self._message_s, self._noise, self._hear = agenda, message_s, noise, hear
        self._num_sent = 0
        self._last_s = 0.0  # arrival of the last one
        self.is_cut = False

    def send(self, message: Message) -> None:
        """Send a message, which arrives later, after those sent before."""
        now = self._agenda.now
        self._last_s = max(self._last_s, now + self._message_s(now) * self._noise.factor(self._num_sent))
        self._num_sent += 1
        self._agenda.at(self._last_s, partial(self._arrive, message))

    def _arrive(self, message: Message) -> None:
        if not self.is_cut:
            self._hear(message)
