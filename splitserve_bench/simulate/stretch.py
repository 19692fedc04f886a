"""Steps of a streak that are over, or will be unless something else happens before."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from coordinator.control.live import TokenRow
from serving_core.requests import Request
from serving_node.streak import Streak
from splitserve_bench.simulate.toy_model import ToyModel


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
