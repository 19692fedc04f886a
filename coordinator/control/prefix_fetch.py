"""Carry out remote prefix fetches, and estimate how long they take. Pure.

In a remote prefix fetch a prefill node gets blocks of a prompt from another node's prefix cache. Placement chooses the
source (coordinator/control/placement/costs.py), and the Job names it to the prefill node. When that node has reserved
blocks it sends PrefixFetchBegun, whose transfer descriptor goes to the source with the tokens (SendPrefix).
PrefixFetchEnded ends the fetch, whatever its outcome, and tokens that have not come are computed. Where the source has
nothing to send or is lost, the prefill node gets, at once, a Cancel with the fetch's epoch. The end of a fetch
never ends the request.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final, NamedTuple

from coordinator.control.instructions import Instruction, Releases, Send
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Node, Registry
from coordinator.control.request import ON_NODES, Request, State, Transition
from protos import fleet_pb2

AUTO: Final = "auto"
ALWAYS: Final = "always"
NEVER: Final = "never"
PREFIX_FETCHES: Final = (AUTO, ALWAYS, NEVER)

MAX_PREFIX_FETCHES: Final = 7  # samples kept for a pair of nodes
MIN_PREFIX_FETCHES: Final = 3
MAX_PREFIX_FETCH_AGE_S: Final = 120.0
UNMEASURED_S: Final = 0.01  # assumed duration of a fetch between nodes without samples
MIN_PATIENCE_S: Final = 0.25
PATIENCE_S: Final = 10.0  # with ALWAYS, where costs are not compared

Pair = tuple[str, str]
"""The names of the source and of the prefill node of a remote prefix fetch."""


class Sample(NamedTuple):
    """One remote prefix fetch: `num_tokens` tokens came in `seconds` seconds."""

    at_s: float
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefixFetchEstimates:
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
        return PATIENCE_S if self.fetches == ALWAYS else max(MIN_PATIENCE_S, computed_s)


class PrefixFetchEstimator:
    """Measure remote prefix fetches as they happen.

    Samples expire, and fewer than MIN_PREFIX_FETCHES samples count as none: otherwise a few slow fetches, as when
    connections are made, would stop all fetches, and no later one could show that they have become faster."""

    def __init__(self, fetches: str = NEVER) -> None:
        """Start without samples. `fetches`: one of PREFIX_FETCHES."""
        self._fetches = fetches
        self._samples: dict[Pair, deque[Sample]] = {}

    def ended(self, pair: Pair, num_tokens: int, seconds: float, now: float) -> None:
        """Record a fetch of `num_tokens` tokens, which have come in this time or should have."""
        if num_tokens > 0:
            self._drop_old(now)
            samples = self._samples.setdefault(pair, deque(maxlen=MAX_PREFIX_FETCHES))
            samples.append(Sample(now, num_tokens, max(0.0, seconds)))

    def estimates(self, now: float) -> PrefixFetchEstimates:
        """Return the present estimates. Use them at once: they change with the samples."""
        self._drop_old(now)
        return PrefixFetchEstimates(self._fetches, self._samples)

    def _drop_old(self, now: float) -> None:
        for pair, samples in list(self._samples.items()):
            while samples and now - samples[0].at_s > MAX_PREFIX_FETCH_AGE_S:
                samples.popleft()
            if not samples:
                del self._samples[pair]


class PrefixFetches:
    """Follow the remote prefix fetches of requests on nodes."""

    def __init__(
        self, registry: Registry, metrics: Metrics, releases: Releases, estimator: PrefixFetchEstimator
    ) -> None:
        self._registry, self._metrics = registry, metrics
        self._releases, self._estimator = releases, estimator

    def begun(self, request: Request, node: Node, event: fleet_pb2.PrefixFetchBegun, now: float) -> list[Instruction]:
        """Handle that the prefill node has reserved blocks: the source is to send."""
        fetch, prompt = request.attempt.prefix_fetch, request.known
        if fetch is None or node is not request.attempt.prefill:
            return []
        if fetch.source not in self._registry:
            return self.source_gone(request, fetch.source, event, now)
        request.attempt.prefix_fetch = replace(fetch, has_begun=True)
        about = fleet_pb2.Attempt(request_id=request.request_id, epoch=fetch.epoch)
        send_prefix = fleet_pb2.SendPrefix(
            attempt=about,
            descriptor=event.descriptor,
            token_ids=prompt.token_ids[: fetch.num_tokens],
            cache_salt=prompt.cache_salt,
            adapter=prompt.adapter,
        )
        return [Send(fetch.source, fleet_pb2.NodeCommand(send_prefix=send_prefix, attempt=about))]

    def ended(self, request: Request, node: Node, event: fleet_pb2.PrefixFetchEnded, now: float) -> list[Instruction]:
        """Handle the end of a fetch, whatever its outcome."""
        attempt, fetch = request.attempt, request.attempt.prefix_fetch
        if fetch is None or node is not attempt.prefill:
            return []
        attempt.prefix_fetch = None
        num_tokens = event.num_blocks * attempt.prefill.block_size
        pair = fetch.source.name, attempt.prefill.name
        self._estimator.ended(pair, num_tokens or fetch.num_fetched, event.seconds, now)
        request.prefix_fetch_s += event.seconds
        request.num_fetched_kv_bytes += event.num_bytes
        self._metrics.prefix_fetch_ended(event.num_blocks, event.num_bytes, event.seconds)
        return []

    def source_gone(self, request: Request, node: Node, event: object, now: float) -> list[Instruction]:
        """Tell the prefill node to go on without the fetch: its source sends nothing, or no more."""
        attempt, fetch = request.attempt, request.attempt.prefix_fetch
        if fetch is None or request.state is not State.PREFILLING or attempt.prefill not in attempt.holders:
            return []
        return [self._releases.cancel(request, attempt.prefill, fetch.epoch, now)]


TRANSITIONS: Final = (
    Transition(ON_NODES, "prefix_fetch_begun", PrefixFetches.begun),
    Transition(ON_NODES, "prefix_fetch_ended", PrefixFetches.ended),
    Transition((State.PREFILLING,), "prefix_source_failed", PrefixFetches.source_gone),
    Transition((State.PREFILLING,), "prefix_source_lost", PrefixFetches.source_gone),
)
