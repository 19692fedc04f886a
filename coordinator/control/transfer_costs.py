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
PREFIX_FETCHES: Final = (AUTO, ALWAYS, NEVER)

MAX_PREFIX_FETCHES: Final = 7  # samples kept for a pair of nodes
MIN_PREFIX_FETCHES: Final = 3
MAX_PREFIX_FETCH_AGE_S: Final = 120.0
UNMEASURED_S: Final = 0.01  # assumed duration of a fetch between nodes without samples
LEAST_PATIENCE_S: Final = 0.25
PATIENCE_S: Final = 10.0  # with ALWAYS, where costs are not compared

Pair = tuple[str, str]
"""The names of the source and of the prefill node of a remote prefix fetch."""


class Sample(NamedTuple):
    """One remote prefix fetch: `num_tokens` tokens came in `seconds` seconds."""

    at_s: float
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefixFetchCosts:
    """Estimate remote prefix fetches between pairs of nodes from recent ones."""

    fetches: str = NEVER
    samples: Mapping[Pair, Sequence[Sample]] = field(default_factory=dict)

    def seconds(self, pair: Pair, num_tokens: int) -> float:
        """Return the seconds of a fetch of `num_tokens` tokens.

        A longer fetch than a measured one counts in proportion and a shorter one as long as that: the estimate is never
        below a measurement.
        """
        if self.fetches == ALWAYS:
            return 0.0
        known = self.samples.get(pair, ())
        if len(known) < MIN_PREFIX_FETCHES:
            return UNMEASURED_S
        return median(each.seconds * max(1.0, num_tokens / each.num_tokens) for each in known)

    def is_worth(self, pair: Pair, num_tokens: int, computed_s: float) -> bool:
        """Return whether to fetch `num_tokens` tokens that would take `computed_s` seconds to compute."""
        if self.fetches == NEVER or num_tokens <= 0:
            return False
        return self.fetches == ALWAYS or self.seconds(pair, num_tokens) < computed_s

    def patience_s(self, computed_s: float) -> float:
        """Return how long, in seconds, to wait for a fetch."""
        return PATIENCE_S if self.fetches == ALWAYS else max(LEAST_PATIENCE_S, computed_s)


class PrefixFetches:
    """Measure remote prefix fetches as they happen.

    Samples expire, and fewer than MIN_PREFIX_FETCHES samples count as none: otherwise a few slow fetches, as when
    connections are made, would stop all fetches, and no later one could show that they have become faster."""

    def __init__(self, fetches: str = NEVER) -> None:
        """Start without samples. `lends`: one of PREFIX_FETCHES."""
        self._fetches = fetches
        self._samples: dict[Pair, deque[Sample]] = {}

    def ended(self, pair: Pair, num_tokens: int, seconds: float, now: float) -> None:
        """Record a fetch of `num_tokens` tokens, which have come in this time or should have."""
        if num_tokens > 0:
            self._drop_old(now)
            samples = self._samples.setdefault(pair, deque(maxlen=MAX_PREFIX_FETCHES))
            samples.append(Sample(now, num_tokens, max(0.0, seconds)))

    def costs(self, now: float) -> PrefixFetchCosts:
        """Return the present estimates. Use them at once: they change with the samples."""
        self._drop_old(now)
        return PrefixFetchCosts(self._fetches, self._samples)

    def _drop_old(self, now: float) -> None:
        for pair, samples in list(self._samples.items()):
            while samples and now - samples[0].at_s > MAX_PREFIX_FETCH_AGE_S:
                samples.popleft()
            if not samples:
                del self._samples[pair]


MAX_HANDOVERS: Final = 31
MAX_HANDOVER_AGE_S: Final = 30.0
MIN_HANDOVERS: Final = 3


@dataclass(frozen=True, slots=True)
class HandoverCosts:
    """Estimates from recent requests: medians, in seconds.

    `credit_s` is the wait for credit, from the start of the attempt. `transfer_s` is the time from the first token, or
    the credit if that is later, to the first decode step: transfer and decode queue. `prefix fetches` estimates remote
    prefix fetches."""

    credit_s: float = 0.0
    transfer_s: float = 0.0
    prefix_fetches: PrefixFetchCosts = field(default_factory=PrefixFetchCosts)


class Handover:
    """Measure KV transfers as they happen.

    Samples expire, and fewer than MIN_HANDOVERS samples count as none: otherwise a few slow transfers, as when
    connections are made, would keep requests away, and no later transfer could show that they have become faster.
    """

    def __init__(self, fetches: str = NEVER) -> None:
        """Start without samples. `lends`: one of PREFIX_FETCHES, when to use remote prefix fetches."""
        self._credits, self._migrations = _Samples(), _Samples()
        self.prefix_fetches = PrefixFetches(fetches)

    def granted(self, attempt: Attempt, now: float) -> None:
        """Record that the decode node has given credit to the attempt now."""
        self._credits.add(now - attempt.started_s, now)

    def migrated(self, attempt: Attempt, step_start_s: float, now: float) -> None:
        """Record that the first decode step of the attempt began at `step_start_s`."""
        if attempt.is_local or attempt.granted_s is None or attempt.first_token_s is None:
            return
        self._migrations.add(step_start_s - max(attempt.granted_s, attempt.first_token_s), now)

    def costs(self, now: float) -> HandoverCosts:
        return HandoverCosts(
            self._credits.median_s(now), self._migrations.median_s(now), self.prefix_fetches.costs(now)
        )


class _Samples:
    """Keep the latest durations."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_HANDOVERS)  # time of the measurement, seconds

    def add(self, seconds: float, now: float) -> None:
        self._samples.append((now, max(0.0, seconds)))

    def median_s(self, now: float) -> float:
        while self._samples and now - self._samples[0][0] > MAX_HANDOVER_AGE_S:
            self._samples.popleft()
        return median([seconds for _, seconds in self._samples]) if len(self._samples) >= MIN_HANDOVERS else 0.0
