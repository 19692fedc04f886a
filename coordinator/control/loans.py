"""What it takes one node to lend another one blocks of KV, as measured, and whether it is worth it. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

AUTO: Final = "auto"
ALWAYS: Final = "always"
NEVER: Final = "never"
LENDS: Final = (AUTO, ALWAYS, NEVER)

MAX_SAMPLES: Final = 7  # of a pair of nodes
MIN_SAMPLES: Final = 3
MAX_AGE_S: Final = 120.0
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
        if len(known) < MIN_SAMPLES:
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
    """Measures loans as they happen. What is old counts no more, and less than MIN_SAMPLES count as nothing: a few slow
    ones, as when connections are made, would else end them, and nothing would show that they have become faster."""

    def __init__(self, lends: str = NEVER) -> None:
        """`lends`: one of LENDS."""
        self._lends = lends
        self._samples: dict[Pair, deque[Sample]] = {}

    def ended(self, pair: Pair, num_tokens: int, seconds: float, now: float) -> None:
        """So many tokens have come, or should have come in this time."""
        if num_tokens > 0:
            self._drop_old(now)
            samples = self._samples.setdefault(pair, deque(maxlen=MAX_SAMPLES))
            samples.append(Sample(now, num_tokens, max(0.0, seconds)))

    def costs(self, now: float) -> LoanCosts:
        """To be read at once: it goes on changing."""
        self._drop_old(now)
        return LoanCosts(self._lends, self._samples)

    def _drop_old(self, now: float) -> None:
        for pair, samples in list(self._samples.items()):
            while samples and now - samples[0].at_s > MAX_AGE_S:
                samples.popleft()
            if not samples:
                del self._samples[pair]
