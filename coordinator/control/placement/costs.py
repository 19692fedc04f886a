"""Predict what a request would cost on each node, in seconds of all requests. Pure.

    prefill  (prompt tokens queued on the node + tokens to compute there) / its rate
             + its step time for each chunk of them, when it decodes sequences meanwhile
    two      max(prefill, wait for credit) + transfer and decode queue, as measured on recent requests
             or, if that is later, until the decode node has prefilled its own queued prompts, which slow it down
    one      wait for credit + prefill
    others   sequences that the prefill node decodes meanwhile * tokens to compute there / its rate
    fetch    a remote prefix fetch, where it is measured to take less time than computing the tokens
    append   one, on a decode node that holds most of the prompt and computes the rest of it
    again    RECOMPUTED_SHARE * the seconds for the tokens that another prefill node would not have to compute

`others` is the cost to other requests: each sequence waits while the node computes the prompt. Counted are the
sequences that the node decodes, those whose prompts it prefills before this one, and the share of the expected KV
transfers that arrive in the meantime. A pure prefill node delays no sequence, but its KV has to travel. The wait for
credit counts where the decode node is full; another node prefills during that wait, the decode node itself after it.
Tokens to compute are those that the node neither has cached nor is about to compute for another prompt with the same
beginning: the node with the longest prefix wins, unless its queue is longer by more than what the prefix saves. `again`
is the cost to the requests behind: without it, n sequences of one prompt that arrive at the same moment would be
prefilled by n nodes, to save one block each.

Load is counted from what the coordinator has assigned itself, since heartbeats are up to a second old; rates and step
times come from heartbeats. A node whose rate is unknown counts as the median of the others. While no rate is known,
tokens are compared.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Final, NamedTuple

from coordinator.control.load import NO_ARRIVALS, Arrivals, Ledger, Prompt
from coordinator.control.nodes import Node
from coordinator.control.request import Attempt, PrefixFetch
from serving_core.slo import Due

FETCH_AUTO: Final = "auto"
FETCH_ALWAYS: Final = "always"
FETCH_NEVER: Final = "never"
PREFIX_FETCHES: Final = (FETCH_AUTO, FETCH_ALWAYS, FETCH_NEVER)

MAX_PREFIX_FETCHES: Final = 7  # samples kept for a pair of nodes
MIN_PREFIX_FETCHES: Final = 3
MAX_PREFIX_FETCH_AGE_S: Final = 120.0
UNMEASURED_S: Final = 0.01  # assumed duration of a fetch between nodes without samples
MIN_PATIENCE_S: Final = 0.25
PATIENCE_S: Final = 10.0  # with FETCH_ALWAYS, where costs are not compared

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

    fetches: str = FETCH_NEVER
    samples: Mapping[Pair, Sequence[Sample]] = field(default_factory=dict)

    def seconds(self, pair: Pair, num_tokens: int) -> float:
        """Return the estimated seconds of a fetch of `num_tokens` tokens between a pair of nodes.

        This is the median of recent fetches, UNMEASURED_S with fewer than MIN_PREFIX_FETCHES, and 0 with FETCH_ALWAYS.
        A longer fetch than a measured one counts in proportion and a shorter one as long as that: the estimate is never
        below a measurement.
        """
        if self.fetches == FETCH_ALWAYS:
            return 0.0
        known = self.samples.get(pair, ())
        if len(known) < MIN_PREFIX_FETCHES:
            return UNMEASURED_S
        return median(each.seconds * max(1.0, num_tokens / each.num_tokens) for each in known)

    def is_worth(self, pair: Pair, num_tokens: int, computed_s: float) -> bool:
        """Return whether to fetch `num_tokens` tokens that would take `computed_s` seconds to compute."""
        if self.fetches == FETCH_NEVER or num_tokens <= 0:
            return False
        return self.fetches == FETCH_ALWAYS or self.seconds(pair, num_tokens) < computed_s

    def patience_s(self, computed_s: float) -> float:
        """Return the seconds to wait for a fetch of tokens that would take `computed_s` seconds to compute."""
        return PATIENCE_S if self.fetches == FETCH_ALWAYS else max(MIN_PATIENCE_S, computed_s)


class PrefixFetchEstimator:
    """Measure remote prefix fetches as they happen.

    Samples expire, and fewer than MIN_PREFIX_FETCHES samples count as none: otherwise a few slow fetches, as when
    connections are made, would stop all fetches, and no later one could show that they have become faster."""

    def __init__(self, fetches: str = FETCH_NEVER) -> None:
        """Create an estimator without samples. `fetches`, one of PREFIX_FETCHES, says when to use fetches at all."""
        self._fetches = fetches
        self._samples: dict[Pair, deque[Sample]] = {}

    def ended(self, pair: Pair, num_tokens: int, seconds: float, now: float) -> None:
        """Record a fetch of `num_tokens` tokens in `seconds`: of those that came, or else of those that should have.

        A fetch of 0 tokens is ignored.
        """
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


MAX_TRANSFERS: Final = 31
MAX_TRANSFER_AGE_S: Final = 30.0
MIN_TRANSFERS: Final = 3


@dataclass(frozen=True, slots=True)
class TransferEstimates:
    """Estimates from recent requests: medians, in seconds.

    `credit_s` is the wait for credit, from the start of the attempt. `transfer_s` is the time from the first token, or
    the credit if that is later, to the first decode step: transfer and decode queue. `prefix_fetches` estimates remote
    prefix fetches."""

    credit_s: float = 0.0
    transfer_s: float = 0.0
    prefix_fetches: PrefixFetchEstimates = field(default_factory=PrefixFetchEstimates)


class TransferEstimator:
    """Measure KV transfers as they happen.

    Samples expire, and fewer than MIN_TRANSFERS samples count as none: otherwise a few slow transfers, as when
    connections are made, would keep requests away, and no later transfer could show that they have become faster.
    """

    def __init__(self, fetches: str = FETCH_NEVER) -> None:
        """Create an estimator without samples.

        `fetches`, one of PREFIX_FETCHES, says when to use remote prefix fetches.
        """
        self._credits, self._transfers = _Samples(), _Samples()
        self.prefix_fetches = PrefixFetchEstimator(fetches)

    def reserved(self, attempt: Attempt, now: float) -> None:
        """Record that the decode node has reserved blocks for the attempt at `now`, and so the wait for credit."""
        self._credits.add(now - attempt.started_s, now)

    def decoding(self, attempt: Attempt, step_start_s: float, now: float) -> None:
        """Record that the first decode step of the attempt began at `step_start_s`, and so the time of its KV transfer.

        Ignored for an attempt on one node.
        """
        if attempt.is_local or attempt.reserved_s is None or attempt.first_token_s is None:
            return
        self._transfers.add(step_start_s - max(attempt.reserved_s, attempt.first_token_s), now)

    def estimates(self, now: float) -> TransferEstimates:
        """Return the present estimates. Use them at once: they change with the samples."""
        credit_s, transfer_s = self._credits.median_s(now), self._transfers.median_s(now)
        return TransferEstimates(credit_s, transfer_s, self.prefix_fetches.estimates(now))


class _Samples:
    """Keep the latest durations."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_TRANSFERS)  # time of the measurement, seconds

    def add(self, seconds: float, now: float) -> None:
        self._samples.append((now, max(0.0, seconds)))

    def median_s(self, now: float) -> float:
        while self._samples and now - self._samples[0][0] > MAX_TRANSFER_AGE_S:
            self._samples.popleft()
        return median([seconds for _, seconds in self._samples]) if len(self._samples) >= MIN_TRANSFERS else 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Describe what an attempt needs.

    prompt, num_tokens   the tokens to prefill, and the most tokens of prompt and output together
    avoid                nodes to choose last
    due                  planned deadlines; None without an SLO
    num_output           output tokens that have come before
    num_left             output tokens expected; None: all that num_tokens leaves room for
    arrivals             requests expected to arrive
    num_ahead            deferred requests per decode node, which get the next running slots first
    num_spare            running slots to leave free for requests that come back
    tpot_margin          factor by which TPOT rarely exceeded the planned one
    """

    prompt: Prompt
    num_tokens: int
    avoid: Collection[Node] = ()
    due: Due | None = None
    num_output: int = 0
    num_left: int | None = None
    arrivals: Arrivals = NO_ARRIVALS
    num_ahead: int = 0
    num_spare: int = 0
    tpot_margin: float = 1.0

    @property
    def num_expected(self) -> int:
        """Return the output tokens expected from now on."""
        return self.num_tokens - len(self.prompt) if self.num_left is None else self.num_left


RECOMPUTED_SHARE: Final = 0.2
# A decode node appends to so many tokens of a prompt at least, and at most so large a share of it: a prefill node
# computes short prompts as fast, and disturbs no sequence.
LEAST_APPENDED_TO_TOKENS: Final = 512
MAX_APPENDED_SHARE: Final = 0.5


class _PrefillCost(NamedTuple):
    """Seconds until a node has prefilled the prompt, seconds that its sequences wait for that, and the remote prefix
    fetch."""

    own_s: float
    others_s: float
    prefix_fetch: PrefixFetch | None = None


class _DecodeCost(NamedTuple):
    """The state of a decode node for the sequence: whether it is full, the seconds of waiting for credit and until its
    own queued prompts are prefilled, and the share of its pool that would be taken."""

    is_full: bool
    credit_s: float
    backlog_s: float
    part: float


class Costs:
    """Predict the cost of one request on these nodes, in seconds of all requests."""

    def __init__(self, nodes: Sequence[Node], ledger: Ledger, prompt: Prompt, transfers: TransferEstimates) -> None:
        self._ledger, self._prompt, self.transfers = ledger, prompt, transfers
        rates = {node: node.load.prefill_tokens_per_s for node in nodes}
        known = [rate for rate in rates.values() if rate > 0]
        self.are_known = bool(known)
        other_rate = median(known) if known else 1.0  # without any, costs compare tokens
        self._rate = {node: rate or other_rate for node, rate in rates.items()}
        prefill_nodes = [node for node in nodes if node.prefills]
        self._cached: dict[Node, int] = {}
        self._to_compute = {node: self._num_to_compute(node) for node in prefill_nodes}
        self._least_to_compute = min(self._to_compute.values(), default=0)
        self._num_queued = sum([ledger.of(node).tokens_to_compute for node in prefill_nodes])
        self._rates = sum([self._rate[node] for node in prefill_nodes])
        self._source = self._find_source(nodes)
        self.appending: Final = [node for node in nodes if self._may_append(node)]
        """Decode nodes that hold most of the prompt, and may compute the rest of it."""
        self.prefill: Final = {node: self._prefill_cost(node) for node in [*prefill_nodes, *self.appending]}
        """Costs of the prefill on each node. A half-computed queued prompt counts as a whole one."""
        self.decode: Final = {node: self._decode_cost(node) for node in nodes if node.decodes}
        """States of the decode nodes. A node is full if the request would have to wait for credit."""

    def seconds(self, prefill_node: Node, decode_node: Node) -> float:
        prefill, decode = self.prefill[prefill_node], self.decode[decode_node]
        if prefill_node is decode_node:
            return decode.credit_s + prefill.own_s + prefill.others_s
        there_s = max(prefill.own_s, decode.credit_s) + self.transfers.transfer_s
        return max(there_s, decode.backlog_s) + prefill.others_s

    def queue_s(self, node: Node) -> float:
        """Return the seconds that the node needs for the prompt tokens that it has been given and not computed.

        The rate is the one that the node reports, else the median of the others'. 0 while no node's rate is known.
        """
        return self._ledger.of(node).tokens_to_compute / self._rate[node] if self.are_known else 0.0

    def num_fetched(self, node: Node) -> int:
        """Return how many tokens of the prompt the node would fetch from another node's prefix cache.

        0 for a node that does not prefill, or is unknown.
        """
        cost = self.prefill.get(node)
        return 0 if cost is None or cost.prefix_fetch is None else cost.prefix_fetch.num_fetched

    def _prefill_cost(self, node: Node) -> _PrefillCost:
        num_own_tokens, rate, fetch_s = self._to_compute[node], self._rate[node], 0.0
        prefix_fetch = None if self._source is None else self._prefix_fetch(self._source, node)
        if prefix_fetch is not None:
            num_own_tokens -= prefix_fetch.num_fetched
            fetch_s = self.transfers.prefix_fetches.seconds(
                (prefix_fetch.source.name, node.name), prefix_fetch.num_fetched
            )
        account = self._ledger.of(node)
        num_tokens = account.tokens_to_compute + num_own_tokens
        own_s = fetch_s + num_tokens / rate
        num_others: float = account.num_sequences
        if account.num_arriving:
            num_queued = self._num_queued - account.tokens_to_compute  # on the nodes that prefill for this one
            part = min(1.0, own_s * (self._rates - rate) / num_queued) if num_queued else 1.0
            num_others -= account.num_arriving * (1.0 - part)
        if num_others:
            own_s += ceil(num_tokens / node.chunk_tokens) * node.load.step_s
        num_again = max(0, num_own_tokens - self._least_to_compute)
        return _PrefillCost(own_s, (num_others * num_own_tokens + RECOMPUTED_SHARE * num_again) / rate, prefix_fetch)

    def _may_append(self, node: Node) -> bool:
        """Return whether a node that only decodes holds so much of the prompt that it may compute the rest."""
        if node.prefills or not (node.decodes and node.is_ready and node.hints and node.chunk_tokens):
            return False
        least = max(LEAST_APPENDED_TO_TOKENS, (1 - MAX_APPENDED_SHARE) * len(self._prompt))
        if len(self._prompt) < least or self._num_cached(node) < least:
            return False
        self._to_compute[node] = self._num_to_compute(node)
        return True

    def _num_to_compute(self, node: Node) -> int:
        coming = self._ledger.prefill_hashes(node)
        if not coming and not node.hints:
            return len(self._prompt)
        return self._prompt.tokens_to_compute(node, coming, self._num_cached(node))

    def _num_cached(self, node: Node) -> int:
        if not node.hints:
            return 0
        if node not in self._cached:
            self._cached[node] = self._prompt.tokens_cached(node)
        return self._cached[node]

    def _tokens_not_held(self, node: Node) -> int:
        return self._prompt.tokens_beyond(node, self._num_cached(node))

    def _find_source(self, nodes: Sequence[Node]) -> Node | None:
        """Return the node that has most of the prompt cached; None where remote prefix fetches are off."""
        if self.transfers.prefix_fetches.fetches == FETCH_NEVER or not self.are_known:
            return None
        ready = [node for node in nodes if node.is_ready and not node.hello.keeps_sequences]
        return min(ready, key=lambda node: (self._tokens_not_held(node), node.name), default=None)

    def _prefix_fetch(self, source: Node, node: Node) -> PrefixFetch | None:
        """Return the remote prefix fetch that is worth while for the node; None for none."""
        if source is node or node.hello.keeps_sequences:  # a node with vLLM fetches nothing
            return None
        num_left = self._tokens_not_held(source)
        num_fetched = self._to_compute[node] - num_left
        computed_s, prefix_fetches = num_fetched / self._rate[node], self.transfers.prefix_fetches
        if not prefix_fetches.is_worth((source.name, node.name), num_fetched, computed_s):
            return None
        return PrefixFetch(source, len(self._prompt) - num_left, num_fetched, prefix_fetches.patience_s(computed_s))

    def _decode_cost(self, node: Node) -> _DecodeCost:
        account, num_taken = self._ledger.of(node), self._ledger.tokens_taken(node) + len(self._prompt)
        num_shared = num_cached = 0
        if node.hints:
            num_shared, num_cached = self._ledger.tokens_shared(node, self._prompt), self._num_cached(node)
        is_full = node.usable.slots <= account.num_sequences or num_taken - num_shared > node.pool_tokens
        return _DecodeCost(
            is_full,
            self.transfers.credit_s if is_full else 0.0,
            account.tokens_to_compute / self._rate[node],
            (num_taken - max(num_shared, num_cached)) / node.pool_tokens,
        )
