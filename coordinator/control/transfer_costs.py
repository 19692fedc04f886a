"""Estimate what it costs to send KV between two nodes, from the latest measured transfers. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

from coordinator.control.request import Attempt

AUTO: Final = "auto"
ALWAYS: Final = "always"
NEVER: Final = "never"
LENDS: Final = (AUTO, ALWAYS, NEVER)

MAX_LOANS: Final = 7  # of a pair of nodes
MIN_LOANS: Final = 3
MAX_LOAN_AGE_S: Final = 120.0
UNMEASURED_S: Final = 0.01  # what a loan between nodes is taken to take while nothing is known of them
LEAST_PATIENCE_S: Final = 0.25
PATIENCE_S: Final = 10.0  # where loans are not priced

Pair = tuple[str, str]
"""The names of the node that lends and of the one that borrows."""


class Sample(NamedTuple):
    """One loan: so many tokens came in so many seconds."""

    at_s: float
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoanCosts:
    """What loans take between these pairs, by recent ones."""

    lends: str = NEVER
    samples: Mapping[Pair, Sequence[Sample]] = field(default_factory=dict)

    def seconds(self, pair: Pair, num_tokens: int) -> float:
        """Of a loan of so many tokens. More of them take longer than a loan did in proportion at most, and fewer no
        longer: so it is never less than was measured."""
        if self.lends == ALWAYS:
            return 0.0
        known = self.samples.get(pair, ())
        if len(known) < MIN_LOANS:
            return UNMEASURED_S
        return median(each.seconds * max(1.0, num_tokens / each.num_tokens) for each in known)

    def is_worth(self, pair: Pair, num_tokens: int, computed_s: float) -> bool:
        """Whether to borrow so many tokens that would take computed_s to be computed."""
        if self.lends == NEVER or num_tokens <= 0:
            return False
        return self.lends == ALWAYS or self.seconds(pair, num_tokens) < computed_s

    def patience_s(self, computed_s: float) -> float:
        """For how long to wait for a loan."""
        return PATIENCE_S if self.lends == ALWAYS else max(LEAST_PATIENCE_S, computed_s)


class Loans:
    """Measures loans as they happen. What is old counts no more, and less than MIN_LOANS count as nothing: a few slow
    ones, as when connections are made, would else end them, and nothing would show that they have become faster."""

    def __init__(self, lends: str = NEVER) -> None:
        """`lends`: one of LENDS."""
        self._lends = lends
        self._samples: dict[Pair, deque[Sample]] = {}

    def ended(self, pair: Pair, num_tokens: int, seconds: float, now: float) -> None:
        """So many tokens have come, or should have come in this time."""
        if num_tokens > 0:
            self._drop_old(now)
            samples = self._samples.setdefault(pair, deque(maxlen=MAX_LOANS))
            samples.append(Sample(now, num_tokens, max(0.0, seconds)))

    def costs(self, now: float) -> LoanCosts:
        """To be read at once: it goes on changing."""
        self._drop_old(now)
        return LoanCosts(self._lends, self._samples)

    def _drop_old(self, now: float) -> None:
        for pair, samples in list(self._samples.items()):
            while samples and now - samples[0].at_s > MAX_LOAN_AGE_S:
                samples.popleft()
            if not samples:
                del self._samples[pair]


MAX_HANDOVERS: Final = 31
MAX_HANDOVER_AGE_S: Final = 30.0
MIN_HANDOVERS: Final = 3


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

    What is old counts no more, and less than MIN_HANDOVERS count as nothing: a few slow ones, as when connections are
    made, would else keep answers away, and then nothing would ever show that it has become faster.
    """

    def __init__(self, lends: str = NEVER) -> None:
        """`lends`: when nodes lend each other blocks, one of coordinator.control.transfer_costs.LENDS."""
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
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_HANDOVERS)  # time of the measurement, seconds

    def add(self, seconds: float, now: float) -> None:
        self._samples.append((now, max(0.0, seconds)))

    def median_s(self, now: float) -> float:
        while self._samples and now - self._samples[0][0] > MAX_HANDOVER_AGE_S:
            self._samples.popleft()
        return median([seconds for _, seconds in self._samples]) if len(self._samples) >= MIN_HANDOVERS else 0.0
