"""Choose the nodes of a request: what a placement policy gets and returns, and the policies. Pure.

`auto` chooses the pair of nodes that makes the fewest requests miss their SLO, and of those the cheapest in seconds.
Predicted violations are those of coordinator/control/placement/slo_forecast.py, requests to come included. Seconds are
those of all requests (coordinator/control/placement/costs.py) and, with SLOs, those of decode steps for this sequence
alone. A decode node that holds most of a prompt may compute the rest of it: so the turns of a session stay where their
KV is, as long as that is cheaper than a prefill node and makes nobody late. Without SLOs the seconds decide; while no
rate is known, pure prefill nodes come first. Among decode nodes of equal cost the one with most of its pool left is
chosen; blocks that it has cached count as left. Nodes that have failed the request come last, and full decode nodes
after those with room. Baselines to compare with:

    sum            the seconds alone, without predicted violations
    never, always  one node for both phases, or two nodes, wherever that is possible
    round-robin    prefill and decode: the fewest requests so far
    least-loaded   prefill: the fewest prompt tokens to compute; decode: the fewest sequences
    lmetric        the least product of the prompt tokens to compute, this prompt's included, and the sequences
    arrow          the least load of the other phase (tokens of sequences for prefill, prompt tokens for decode), then
                   of the own phase

lmetric follows "LMetric" (arXiv 2603.15202) and arrow follows "Arrow" (arXiv 2505.11916), as far as the rules can be
separated from the systems around them. Under round-robin, least-loaded and lmetric, which are rules for mixed nodes, a
prefill node that can also decode keeps the sequence; arrow chooses the two nodes independently.

Some requests leave a policy no choice. A request for an embedding needs no decode node. A decode node prefills an
output that is restarted after it has become longer than the pool of every prefill node, and a request that is longer
than the pools of nodes with one phase each, of which other nodes hold the oldest blocks (distributed KV).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import nsmallest
from operator import itemgetter
from typing import Final, NamedTuple, Protocol

from coordinator.control.load import Ledger, Prompt
from coordinator.control.nodes import Node, candidates, fitting
from coordinator.control.placement.costs import Costs, TransferEstimates, Wanted
from coordinator.control.placement.slo_forecast import SloForecast, spared_node
from coordinator.control.request import PrefixFetch
from serving_core.errors import RequestError
from serving_core.reasons import NO_DECODE_WORKER
from serving_core.shapes import DECODE, PREFILL


class Placed(NamedTuple):
    """The prefill node and the decode node of a request: one node for both, or two with a KV transfer.

    The fields from num_late to num_late_beside are predicted only where some request has an SLO.
    """

    prefill_node: Node
    decode_node: Node
    num_late: int = 0  # requests with an SLO that are expected to miss it because of this one, itself included
    tpot_ratio: float = 0.0  # a step of all sequences on the decode node, as a multiple of their tightest limit on TPOT
    wait_s: float = 0.0
    """Time until the first token would be in time and there is room, or until this request and those before it have
    running slots, as far as that is known."""
    prefill_s: float = 0.0  # of the prefill itself
    begins_s: float = 0.0  # until the prompt is prefilled; inf where no time is better
    least_prefill_s: float = 0.0  # the same, if prompts got all of the prefill node's time
    num_late_beside: int = 0  # late sequences on a crowded decode node, with this one
    prefix_fetch: PrefixFetch | None = None
    queue_s: float = 0.0  # of work queued on the prefill node; 0 where its rate is unknown
    is_full: bool = False  # the sequence has to wait for others to end
    displaces_prompt: bool = False  # the one late request is a prompt that takes longer and gives way to this one
    is_prefill_timely: bool = False  # the prompt is one of the most that the prefill node can prefill in time

    @property
    def is_timely(self) -> bool:
        """Return whether all sequences are expected to attain their SLOs beside this one."""
        return not self.num_late and self.tpot_ratio <= 1


class Policy(Protocol):
    """Choose the nodes of a request."""

    def place(
        self, nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, transfers: TransferEstimates, now: float
    ) -> Placed:
        """Return the nodes for a request, and what the policy predicts there.

        Nodes that are full may be chosen too (see Placed.is_full). Raises RequestError if no pair of the ready nodes
        among these could hold the request, however idle.
        """
        ...


def within_pools(
    prefill_nodes: Sequence[Node], decode_nodes: Sequence[Node], wanted: Wanted
) -> tuple[Sequence[Node], Sequence[Node]]:
    """Return the prefill nodes whose own KV cache holds the prompt, and the decode nodes whose own holds the request.

    A KV transfer goes from cache to cache, without KV holders.
    """
    some_prefill_nodes = [node for node in prefill_nodes if len(wanted.prompt) <= node.pool_tokens]
    return some_prefill_nodes, [node for node in decode_nodes if wanted.num_tokens <= node.pool_tokens]


# ---- auto: the cheapest pair ----

Pair = tuple[Node, Node]

NO_PAIR: Final = "no node that decodes sequences takes the KV transfers of prefill nodes"

MOST_WEIGHED: Final = 9  # cheapest pairs for which violations are predicted
# Share of the delay of the sequences of a decode node, by a prompt that it appends, that counts where there are SLOs:
# sequences that are late by it count as harm, and others only use their slack.
APPENDED_FACTOR: Final = 0.1
MOST_PREFILL_NODES: Final = 2  # cheapest prefill nodes that are paired with decode nodes


class CheapestPlacement:
    """Compare single nodes and pairs of nodes."""

    def __init__(self, *, counts_late: bool = True, may_be_alone: bool = True, may_be_two: bool = True) -> None:
        """Create a policy. With `counts_late`, predicted SLO violations decide before costs in seconds.

        `may_be_alone` and `may_be_two` allow one node, or two, for a request. A form of placement that is not allowed
        is still used where no other is possible.
        """
        self._counts_late = counts_late
        self._may_be_alone, self._may_be_two = may_be_alone, may_be_two

    def place(
        self, nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, transfers: TransferEstimates, now: float
    ) -> Placed:
        """Return the placement, as Policy.place does."""
        prefill_nodes = candidates(nodes, PREFILL, len(wanted.prompt))
        decode_nodes = candidates(nodes, DECODE, wanted.num_tokens)
        costs = Costs(nodes, ledger, wanted.prompt, transfers)
        forecast = SloForecast(ledger, wanted, now, costs.num_fetched) if self._counts_late else None
        if forecast is None or not forecast.has_slos:
            weighing = _Weighing(costs, None, None, wanted.avoid)
        else:
            least = spared_node(prefill_nodes, ledger, now)
            if all(costs.decode[node].is_full for node in decode_nodes if node is not least):
                least = None
            weighing = _Weighing(costs, forecast, least, wanted.avoid)
        alone = weighing.best_alone({*prefill_nodes, *costs.appending}.intersection(decode_nodes))
        two = list(_two(costs, wanted.avoid, *within_pools(prefill_nodes, decode_nodes, wanted)))
        pairs = [*(two if self._may_be_two else ()), *(alone if self._may_be_alone else ())] or [*two, *alone]
        if not pairs:
            raise RequestError(NO_DECODE_WORKER, NO_PAIR)
        return weighing.placed(*weighing.best(pairs))


def _two(
    costs: Costs, avoid: Collection[Node], prefill_nodes: Sequence[Node], decode_nodes: Sequence[Node]
) -> Iterator[Pair]:
    """Yield each of the best prefill nodes with each of the best decode nodes.

    Several of each are tried: the best prefill node may be the only decode node, or have prompts that would be late.
    """
    takers = [node for node in decode_nodes if node.usable.accepts_transfers]
    if not takers:
        return
    credit_s = min(costs.decode[node].credit_s for node in takers)

    def by_seconds(node: Node) -> tuple[bool, bool, float, str]:
        prefill = costs.prefill[node]
        is_second_choice = node.decodes and not costs.are_known
        return node in avoid, is_second_choice, max(prefill.own_s, credit_s) + prefill.others_s, node.name

    best = nsmallest(MOST_WEIGHED, takers, lambda node: (node in avoid, costs.decode[node], node.name))
    for prefill_node in nsmallest(MOST_PREFILL_NODES, prefill_nodes, by_seconds):
        yield from ((prefill_node, decode_node) for decode_node in best if decode_node is not prefill_node)


class _Order(NamedTuple):
    """The order of pairs: less is better."""

    num_avoided: int
    is_second_choice: bool
    harm: int
    is_full: bool
    seconds: float
    by_kind: int  # breaks ties of seconds
    part: float  # share of the decode node's pool that would be taken
    names: tuple[str, str]


class _Weighing:
    """Compare the nodes for one request."""

    def __init__(
        self, costs: Costs, forecast: SloForecast | None, spared_node: Node | None, avoid: Collection[Node]
    ) -> None:
        """Create a comparison. `spared_node` is the node to keep free of sequences, for prompts to come."""
        self._costs, self._forecast, self._spared, self._avoid = costs, forecast, spared_node, avoid
        # Caches, by pair: the chosen pair is needed again.
        self._nums_late: dict[Pair, int] = {}
        self._tpot_ratios: dict[Pair, float] = {}

    def placed(self, prefill_node: Node, decode_node: Node) -> Placed:
        placed = Placed(
            prefill_node,
            decode_node,
            prefix_fetch=self._costs.prefill[prefill_node].prefix_fetch,
            queue_s=self._costs.queue_s(prefill_node),
            is_full=self._costs.decode[decode_node].is_full,
        )
        if self._forecast is None:
            return placed
        prefill, decode = self._forecast.on(prefill_node), self._forecast.on(decode_node)
        num_late, tpot_ratio, wait_s = (
            self._num_late(prefill_node, decode_node),
            self._tpot_ratio(self._forecast, prefill_node, decode_node),
            0.0,
        )
        if num_late or tpot_ratio > 1:
            wait_s = max(prefill.prefill_wait_s(), decode.room_s or decode.decode_wait_s())
        return placed._replace(
            num_late=num_late,
            tpot_ratio=tpot_ratio,
            wait_s=wait_s,
            prefill_s=prefill.own_prefill_s,
            begins_s=math.inf if decode.is_beyond else prefill.own_begins_s,
            least_prefill_s=prefill.least_prefill_s,
            num_late_beside=decode.num_late_beside(prefill.own_begins_s) if tpot_ratio > 1 else 0,
            displaces_prompt=num_late == 1 and prefill.displaces_prompt,
            is_prefill_timely=prefill.is_prefill_timely,
        )

    def best_alone(self, nodes: Iterable[Node]) -> list[Pair]:
        """Return the mixed nodes with the least bounds (see `_bound`), each for both phases."""

        def order(node: Node) -> tuple[bool, bool, float, float, str]:
            decode = self._costs.decode[node]
            return node in self._avoid, decode.is_full, self._least_s(node, node), decode.part, node.name

        return [(node, node) for node in nsmallest(MOST_WEIGHED, nodes, order)]

    def best(self, pairs: Iterable[Pair]) -> Pair:
        """Return the least pair in order.

        Predicting violations is slow: it is done for at most MOST_WEIGHED pairs, the cheapest in seconds first, and for
        no pair that cannot be better than the best so far.
        """
        least: tuple[_Order, Pair] | None = None
        for bound, pair in nsmallest(MOST_WEIGHED, [(self._bound(pair), pair) for pair in pairs], itemgetter(0)):
            if least is not None and least[0] <= bound:
                break
            order = bound
            if self._forecast is not None:
                order = bound._replace(seconds=self._seconds(*pair))
                if least is not None and least[0] <= order:
                    continue  # it would not be better without any harm
                order = order._replace(harm=self._harm(*pair))
            if least is None or order < least[0]:
                least = order, pair
        assert least is not None, "there are pairs"
        return least[1]

    def _bound(self, pair: Pair) -> _Order:
        """Return a lower bound of the pair's order: no violations, and all the time of the prefill node for the
        prompt."""
        prefill_node, decode_node = pair
        decode = self._costs.decode[decode_node]
        return _Order(
            sum(node in self._avoid for node in {prefill_node, decode_node}) if self._avoid else 0,
            prefill_node.decodes and not self._costs.are_known,
            0,
            decode.is_full,
            self._least_s(prefill_node, decode_node),
            0 if not prefill_node.decodes else 1 if prefill_node is decode_node else 2,
            decode.part,
            (prefill_node.name, decode_node.name),
        )

    def _harm(self, prefill_node: Node, decode_node: Node) -> int:
        """Return the predicted violations, requests to come included."""
        num_late = self._num_late(prefill_node, decode_node)
        if self._forecast is None:
            return num_late
        prefill, decode = self._forecast.on(prefill_node), self._forecast.on(decode_node)
        if not num_late:
            num_late = int(prefill.is_own_late or self._tpot_ratio(self._forecast, prefill_node, decode_node) > 1)
        if self._prefills_beside_decode(prefill_node) and not prefill.is_own_late:
            num_late += prefill.lasting_begins_s > prefill.own_due_s
        return num_late + (decode.num_lost(len(self._costs.decode) - 1) if decode_node is self._spared else 0)

    def _prefills_beside_decode(self, prefill_node: Node) -> bool:
        """Return whether the prompt would be prefilled beside sequences to come, while another node is spared those."""
        return self._spared is not None and prefill_node is not self._spared and prefill_node.decodes

    def _tpot_ratio(self, forecast: SloForecast, prefill_node: Node, decode_node: Node) -> float:
        pair = prefill_node, decode_node
        if pair not in self._tpot_ratios:
            self._tpot_ratios[pair] = forecast.on(decode_node).tpot_ratio(forecast.on(prefill_node).least_prefill_s)
        return self._tpot_ratios[pair]

    def _num_late(self, prefill_node: Node, decode_node: Node) -> int:
        if self._forecast is None:
            return 0
        pair = prefill_node, decode_node
        if pair not in self._nums_late:
            self._nums_late[pair] = self._count_late(self._forecast, prefill_node, decode_node)
        return self._nums_late[pair]

    def _count_late(self, forecast: SloForecast, prefill_node: Node, decode_node: Node) -> int:
        decode = forecast.on(decode_node)
        waits_s = max(self._costs.decode[decode_node].credit_s, decode.room_s)
        if prefill_node is decode_node:
            return decode.late_by_both(waits_s)
        prefill = forecast.on(prefill_node)
        transfer_s = self._costs.transfers.transfer_s
        return prefill.late_by_prefill + decode.late_by_decode(waits_s, prefill.own_begins_s, transfer_s)

    def _least_s(self, prefill_node: Node, decode_node: Node) -> float:
        """Return the seconds of the pair, with the decode steps that only this sequence needs."""
        seconds = self._costs.seconds(prefill_node, decode_node)
        if self._forecast is None:
            return seconds
        if not prefill_node.prefills:
            seconds -= (1 - APPENDED_FACTOR) * self._costs.prefill[prefill_node].others_s
        return seconds + self._forecast.added_decode_s(decode_node)

    def _seconds(self, prefill_node: Node, decode_node: Node) -> float:
        """Return the same with the delay by sequences with an SLO on the prefill node."""
        seconds = self._least_s(prefill_node, decode_node)
        if self._forecast is None:
            return seconds
        prefill = self._forecast.on(prefill_node)
        begins_s = prefill.lasting_begins_s if self._prefills_beside_decode(prefill_node) else prefill.own_begins_s
        return seconds + max(0.0, begins_s - self._costs.prefill[prefill_node].own_s)


# ---- baselines ----

Score = Callable[[Node, Ledger, Prompt], tuple[float, ...]]
"""Return the score of a node: less is better."""


class ByScore:
    """Choose the prefill node with the least score, and beside it the decode node with the least score."""

    def __init__(self, prefill: Score, decode: Score, *, keeps: bool) -> None:
        """Create a policy that takes the nodes with the least score, one score for each role.

        With `keeps`, a prefill node that can decode the sequence also decodes it.
        """
        self._prefill, self._decode, self._keeps = prefill, decode, keeps

    def place(
        self, nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, transfers: TransferEstimates, now: float
    ) -> Placed:
        """Return the placement, as Policy.place does."""
        decode_nodes = candidates(nodes, DECODE, wanted.num_tokens)

        def order(node: Node, score: Score) -> tuple[bool, tuple[float, ...], str]:
            return node in wanted.avoid, score(node, ledger, wanted.prompt), node.name

        prefill_nodes = candidates(nodes, PREFILL, len(wanted.prompt))
        senders, takers = within_pools(prefill_nodes, decode_nodes, wanted)
        for prefill_node in sorted(prefill_nodes, key=lambda node: order(node, self._prefill)):
            others = takers if prefill_node in senders else ()
            able = [
                node
                for node in decode_nodes
                if node is prefill_node or (node in others and node.usable.accepts_transfers)
            ]
            if self._keeps and prefill_node in able:
                return Placed(prefill_node, prefill_node)
            if able:
                return Placed(prefill_node, min(able, key=lambda node: order(node, self._decode)))
        raise RequestError(NO_DECODE_WORKER, NO_PAIR)


def _prompts_given(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    return (node.num_prefills,)


def _sequences_given(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    return (node.num_decodes,)


def _tokens_to_compute(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    return (ledger.of(node).tokens_to_compute,)


def _answers(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    return (ledger.of(node).num_sequences,)


def _product(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    account = ledger.of(node)
    return ((account.tokens_to_compute + prompt.tokens_to_compute(node)) * (account.num_sequences + 1),)


def _answers_then_prompts(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    account = ledger.of(node)
    return account.tokens_held, account.tokens_to_compute


def _prompts_then_answers(node: Node, ledger: Ledger, prompt: Prompt) -> tuple[float, ...]:
    account = ledger.of(node)
    return account.tokens_to_compute, account.tokens_held


ROUND_ROBIN: Final = ByScore(_prompts_given, _sequences_given, keeps=True)
LEAST_LOADED: Final = ByScore(_tokens_to_compute, _answers, keeps=True)
LMETRIC: Final = ByScore(_product, _product, keeps=True)
ARROW: Final = ByScore(_answers_then_prompts, _prompts_then_answers, keeps=False)


# ---- requests that leave no choice ----


def best_prefill_node(nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, transfers: TransferEstimates) -> Placed:
    """Return the placement of an embedding request: the prefill node that costs the fewest seconds.

    The delay of other requests counts. Raises RequestError if no ready node can hold the prompt.
    """
    prefill_nodes = candidates(nodes, PREFILL, len(wanted.prompt))
    costs = Costs(nodes, ledger, wanted.prompt, transfers)

    def order(node: Node) -> tuple[bool, float, str]:
        prefill = costs.prefill[node]
        return node in wanted.avoid, prefill.own_s + prefill.others_s, node.name

    prefill_node = min(prefill_nodes, key=order)
    return Placed(prefill_node, prefill_node)


def best_decode_node(
    nodes: Sequence[Node], ledger: Ledger, wanted: Wanted, transfers: TransferEstimates
) -> Placed | None:
    """Return the decode node with most room, for a request that its decode node must prefill too.

    This is a restarted output that no prefill node can hold, or a request that is longer than the pools of nodes
    between which its KV could travel. Returns None for any other request, and where no decode node can hold it.
    """
    if not wanted.num_output and not any(node.has_kv_holders for node in nodes):
        return None
    prefill_nodes, able = fitting(nodes, PREFILL, len(wanted.prompt)), fitting(nodes, DECODE, wanted.num_tokens)
    has_choice = all(within_pools(prefill_nodes, able, wanted)) or not set(prefill_nodes).isdisjoint(able)
    if has_choice or not fitting(nodes, PREFILL, 0):
        return None
    if prefill_nodes or not wanted.num_output:
        able = [node for node in able if node.has_kv_holders]
    costs = Costs(nodes, ledger, wanted.prompt, transfers)

    def order(node: Node) -> tuple[bool, bool, float, str]:
        decode = costs.decode[node]
        return node in wanted.avoid, decode.is_full, decode.part, node.name

    decode_node = min(able, key=order, default=None)
    return None if decode_node is None else Placed(decode_node, decode_node)


AUTO: Final = "auto"
POLICIES: Final[dict[str, Policy]] = {
    AUTO: CheapestPlacement(),
    "sum": CheapestPlacement(counts_late=False),
    "never": CheapestPlacement(may_be_two=False),
    "always": CheapestPlacement(may_be_alone=False),
    "round-robin": ROUND_ROBIN,
    "least-loaded": LEAST_LOADED,
    "lmetric": LMETRIC,
    "arrow": ARROW,
}
