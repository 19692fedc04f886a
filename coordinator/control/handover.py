"""What it has cost lately to move answers from a prefill node to a decode node. Pure."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from coordinator.control.attempts import Attempt
from coordinator.control.loans import NEVER, LoanCosts, Loans

MAX_SAMPLES: Final = 31
MAX_AGE_S: Final = 30.0
MIN_SAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class HandoverCosts:
    """Medians over recent answers, in seconds.

    credit_s is the wait for blocks on the decode node, from the start of the attempt. move_s is what follows once the
    first token is there and the blocks are granted: transfer and decode queue, up to the first decode step. loans are
    what it takes to have blocks of prompts from other nodes.
    """

    credit_s: float = 0.0
    move_s: float = 0.0
    loans: LoanCosts = field(default_factory=LoanCosts)


class Handover:
    """Measures hand-overs as they happen.

    What is old counts no more, and less than MIN_SAMPLES count as nothing: a few slow ones, as when connections are
    made, would else keep answers away, and then nothing would ever show that it has become faster.
    """

    def __init__(self, lends: str = NEVER) -> None:
        """`lends`: when nodes lend each other blocks, one of coordinator.control.loans.LENDS."""
        self._credits, self._moves = _Samples(), _Samples()
        self.loans = Loans(lends)

    def granted(self, attempt: Attempt, now: float) -> None:
        """The decode node has granted blocks to the attempt now."""
        self._credits.add(now - attempt.started_s, now)

    def moved(self, attempt: Attempt, step_start_s: float, now: float) -> None:
        """The attempt is in its first decode step, which began at step_start_s."""
        if attempt.is_local or attempt.granted_s is None or attempt.first_token_s is None:
            return
        self._moves.add(step_start_s - max(attempt.granted_s, attempt.first_token_s), now)

    def costs(self, now: float) -> HandoverCosts:
        return HandoverCosts(self._credits.median_s(now), self._moves.median_s(now), self.loans.costs(now))


class _Samples:
    """The last few durations."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)  # time of the measurement, seconds

    def add(self, seconds: float, now: float) -> None:
        self._samples.append((now, max(0.0, seconds)))

    def median_s(self, now: float) -> float:
        while self._samples and now - self._samples[0][0] > MAX_AGE_S:
            self._samples.popleft()
        return median([seconds for _, seconds in self._samples]) if len(self._samples) >= MIN_SAMPLES else 0.0
