"""Decide the role of each node, by order or by load (`--roles auto`), and how many nodes the load needs. Pure.

Number of nodes needed, for an autoscaler:

    offered   requests per second that arrive, over the last minute, refused ones included
    prefill_s seconds for the tokens of the mean prompt that no node has cached, at the rate of the median node
    decode_s  seconds for the tokens of the mean output, each as its share of a step with as many sequences as a node
              can hold: by its running slots, its KV pool (shared blocks counted once) and the SLOs on TPOT
    needed    (offered + waiting / CATCH_UP_S) * (prefill_s + decode_s) / BUSY, rounded up; at least 1

In a fleet whose nodes have one role each, the prefill nodes needed are those for prefill_s alone, and the decode nodes
those for decode_s.

Means are over the requests that ended recently. The number of nodes and their utilization do not enter: the need of a
load does not depend on the nodes that serve it, so a fleet that has followed the number gets the same number again.
BUSY leaves room for what the figures do not cover; waiting requests raise the number. While costs are unknown the
number is that of the nodes present. It follows the load up and down; smoothing it over time is the autoscaler's part.

Pressure, for roles:

    prefill   waiting prompts would take the prefill nodes LONG_QUEUE_S, and decode nodes have free running slots
    decode    running sequences fill the decode nodes, and prefill nodes have next to nothing to do
    no prefill or no decode node
              no ready node has the one role, and some have the other
    none      the queue is short, and decode nodes would have room without the nodes that have their role temporarily

Prompts and sequences are counted by the ledger. Where requests have an SLO, the medians of the SLOs count: half of the
time until first tokens are due is a long queue too, and a decode node is full with as many sequences as attain their
SLO on TPOT.

A role change takes no request from a node. New capacity counts when the node has confirmed the change; capacity that is
taken away counts from the order on (`Node.usable`). The last prefill node, the last decode node and the last path from
one to the other cannot be taken away. A node to which the coordinator has added the other role keeps mixed roles until
there has been no pressure for a while, and then returns, one node after the other. A node that changes soon after
another one returned stays several times as long, up to a bound, so that a load near the thresholds does not make nodes
alternate. A role that no node has is filled sooner, before the requests that wait for it are refused.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from enum import Enum, auto
from math import ceil, inf
from statistics import fmean, median
from typing import Final, NamedTuple

from coordinator.control.instructions import Send
from coordinator.control.load import Ledger
from coordinator.control.nodes import MAX_NODES, Capacity, Node, Registry, does, has_path
from protos import fleet_pb2
from protos.convert import shape_to_wire
from serving_core.errors import RequestError
from serving_core.node.costs import StepLoad
from serving_core.reasons import DRAINING, NO_OTHER_NODE
from serving_core.shapes import DECODE, MIXED, PREFILL, Shape, check_shape, common, preset

MAX_REMEMBERED: Final = 64  # recent capacities kept


class RecentCapacity:
    """Report what requests may ask of the fleet, counting nodes that were there until a moment ago.

    Such nodes may return while a request waits for them, whereas a request refused as too long is refused for good.
    """

    def __init__(self, registry: Registry, wait_s: float) -> None:
        """Create a report for this registry. `wait_s`: how long requests wait for nodes."""
        self._registry = registry
        self._wait_s = wait_s
        self._seen_s: dict[Capacity, float] = {}  # when the fleet last had the capacity, the latest at the end

    def note(self, now: float) -> None:
        """Record the capacity that the fleet has at `now`. Call it several times a second."""
        there = self._registry.capacity
        self._seen_s.pop(there, None)
        self._seen_s[there] = now
        while now - next(iter(self._seen_s.values())) > self._wait_s or len(self._seen_s) > MAX_REMEMBERED:
            del self._seen_s[next(iter(self._seen_s))]

    def at(self, now: float) -> Capacity:
        """Return the fleet's capacity, with the largest lengths and pools that it had within the last `wait_s`.

        Other fields are those of the present fleet.
        """
        there = self._registry.capacity
        lately = [there, *(seen for seen, seen_s in self._seen_s.items() if now - seen_s <= self._wait_s)]
        if all(seen is there for seen in lately):
            return there
        return replace(
            there,
            max_model_len=_largest(seen.max_model_len for seen in lately),
            prefill_pool_tokens=_largest(seen.prefill_pool_tokens for seen in lately),
            decode_pool_tokens=_largest(seen.decode_pool_tokens for seen in lately),
        )


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


WINDOW_S: Final = 60.0
LEAST_S: Final = 10.0  # shortest window: two requests in the first second are not a rate of two per second
CATCH_UP_S: Final = 30.0  # in which waiting requests should be served, beside new ones
BUSY: Final = 0.8  # share of a node's time that the load may take
MAX_SAMPLES: Final = 256


class EndedRequest(NamedTuple):
    """The sizes and the SLO of a request that has ended by itself."""

    num_prompt: int
    num_computed: int  # prompt tokens that no node had cached
    num_output: int
    tpot_s: float = inf  # SLO on TPOT
    num_spared: float = 0.0  # prompt tokens that others have in the pool for it (Ledger.tokens_spared)


class NodesNeeded(NamedTuple):
    """The numbers of nodes that a load needs: of mixed nodes, or instead of prefill nodes and of decode nodes."""

    mixed: int
    prefill: int
    decode: int


class Demand:
    """Measure the recent load of the fleet, from which the number of nodes that it needs follows."""

    def __init__(self) -> None:
        self._now = 0.0
        self._began_s: float | None = None  # when the first request came
        self._by_second: deque[tuple[int, int]] = deque(maxlen=round(WINDOW_S))  # a second, and its arrivals
        self._ended: deque[EndedRequest] = deque(maxlen=MAX_SAMPLES)

    def tick(self, now: float) -> None:
        """Set the time that `nodes_needed` counts to."""
        self._now = now

    def arrived(self, now: float) -> None:
        """Count a request that arrives, whether it will begin or not."""
        self._now = max(now, self._now)  # requests may get here in another order than they arrived
        self._began_s = self._now if self._began_s is None else self._began_s
        last = self._by_second[-1] if self._by_second else None
        if last is not None and last[0] == int(self._now):
            self._by_second[-1] = (last[0], last[1] + 1)
        else:
            self._by_second.append((int(self._now), 1))

    def ended(self, request: EndedRequest) -> None:
        """Record the sizes of a request that has got all its tokens, for the means."""
        self._ended.append(request)

    def nodes_needed(self, nodes: Sequence[Node], num_waiting: int) -> NodesNeeded:
        """Return the numbers of nodes that the recent load needs, each 1 to MAX_NODES.

        The time is that of the last `tick`; `num_waiting` requests wait for a first token. While step costs are
        unknown, returns the numbers of ready nodes.
        """
        offered_per_s = self._per_s() + num_waiting / CATCH_UP_S
        if not offered_per_s:
            return NodesNeeded(1, 1, 1)
        ready = [node for node in nodes if node.is_ready]
        request_s = self._request_s(ready)
        if request_s is None:
            numbers = len(ready), sum(node.prefills for node in ready), sum(node.decodes for node in ready)
            return NodesNeeded(*(max(1, number) for number in numbers))
        prefill_s, decode_s = request_s
        times_s = prefill_s + decode_s, prefill_s, decode_s
        return NodesNeeded(*(min(MAX_NODES, max(1, ceil(offered_per_s * each / BUSY))) for each in times_s))

    def _per_s(self) -> float:
        if self._began_s is None:
            return 0.0
        number = sum(number for second, number in self._by_second if second >= self._now - WINDOW_S)
        return number / min(WINDOW_S, max(LEAST_S, self._now - self._began_s))

    def _request_s(self, nodes: Sequence[Node]) -> tuple[float, float] | None:
        """Return the seconds of one node that the mean request takes for prefill and for decode; None while unknown."""
        rates = [rate for node in nodes if (rate := node.load.prefill_tokens_per_s) > 0]
        if not self._ended or not rates:
            return None
        prefill_s = fmean(each.num_computed for each in self._ended) / median(rates)
        # The last step of the prefill samples the first token; an embedding has none.
        num_decoded = fmean(max(0, each.num_output - 1) for each in self._ended)
        if num_decoded <= 0:
            return prefill_s, 0.0
        num_before = fmean(each.num_prompt + each.num_output / 2 for each in self._ended)
        num_held = num_before - fmean(each.num_spared for each in self._ended)
        tpot_s = median(each.tpot_s for each in self._ended)
        tokens_s = [seconds for node in nodes if (seconds := _token_s(node, num_before, num_held, tpot_s)) > 0]
        return (prefill_s, num_decoded * median(tokens_s)) if tokens_s else None


def _token_s(node: Node, num_before: float, num_held: float, tpot_s: float) -> float:
    """Return the seconds per token of a sequence on a full node; 0 while unknown.

    The mean sequence has `num_before` tokens and takes `num_held` tokens of the pool. With an SLO on TPOT the node
    counts as full when more sequences would miss it.
    """
    weights = node.step_weights
    in_time = EVEN * weights.num_sequences_within(tpot_s, num_before) if tpot_s < inf else inf
    num_sequences = max(1, int(min(node.hello.max_num_seqs, node.pool_tokens / num_held, in_time)))
    return weights.of_step(StepLoad(num_sequences, round(num_sequences * num_before))) / num_sequences


LONG_QUEUE_S: Final = 1.0
LONG_PART: Final = 0.5  # share of the time until first tokens are due
SHORT_QUEUE_S: Final = 0.2
EVEN: Final = 0.6  # share of the sequences that attain their SLOs together, as the average load varies
FULL: Final = 0.9  # share of the running slots, or of the KV pools, that is taken
ROOMY: Final = 0.6


class Pressure(Enum):
    """The role that the fleet lacks: prefill (PREFILL, NO_PREFILL_NODE), decode (DECODE, NO_DECODE_NODE), or none."""

    PREFILL = auto()
    DECODE = auto()
    NO_PREFILL_NODE = auto()
    NO_DECODE_NODE = auto()
    NONE = auto()


class PressureGauge:
    """Measure the pressure repeatedly, and for how long it has lasted."""

    def __init__(self, ledger: Ledger, *, embeds: bool = False) -> None:
        """Create a gauge that reads loads from `ledger`.

        `embeds`: requests are for embeddings, and decode nodes are not needed.
        """
        self._ledger = ledger
        self._embeds = embeds
        self._seen: Pressure | None = None
        self._since_s = 0.0

    def measure(self, nodes: Collection[Node], now: float) -> tuple[Pressure | None, float]:
        """Return the pressure at `now`, and for how many seconds it has lasted. Call it several times a second.

        The pressure is None between the thresholds: neither so high that a role must change, nor low enough to return.
        """
        seen = self._look([node for node in nodes if node.is_ready], now)
        if seen is not self._seen:
            self._seen, self._since_s = seen, now
        return seen, now - self._since_s

    def _look(self, nodes: Collection[Node], now: float) -> Pressure | None:
        prefill_nodes = [node for node in nodes if node.prefills]
        decode_nodes = [node for node in nodes if node.decodes]
        if decode_nodes and not prefill_nodes:
            return Pressure.NO_PREFILL_NODE
        if prefill_nodes and not decode_nodes and not self._embeds:
            return Pressure.NO_DECODE_NODE
        rate = sum(node.load.prefill_tokens_per_s for node in prefill_nodes)
        if not rate or not decode_nodes:
            return None
        queue_s = sum(self._ledger.of(node).tokens_to_compute for node in prefill_nodes) / rate
        taken = self._taken(decode_nodes)
        if queue_s >= min(LONG_QUEUE_S, LONG_PART * self._usual_left_s(prefill_nodes, now)) and taken < FULL:
            return Pressure.PREFILL
        if taken >= FULL and queue_s <= SHORT_QUEUE_S:
            return Pressure.DECODE
        is_calm = (
            queue_s <= SHORT_QUEUE_S and self._taken([node for node in decode_nodes if node.home.decodes]) <= ROOMY
        )
        return Pressure.NONE if is_calm else None

    def _taken(self, decode_nodes: Collection[Node]) -> float:
        """Return the share of the running slots or pools of these decode nodes that all running sequences take, the
        larger.

        Sequences whose prompts are still to be prefilled are left out: with more prefill nodes they would take nothing
        here.
        """
        if not decode_nodes:
            return math.inf
        num_sequences, num_tokens, num_held = self._ledger.running()
        return max(
            num_sequences / sum(node.usable.slots for node in decode_nodes),
            num_held / sum(node.pool_tokens for node in decode_nodes),
            num_sequences / self._num_in_time(decode_nodes, num_tokens / num_sequences) if num_sequences else 0.0,
        )

    def _num_in_time(self, decode_nodes: Collection[Node], num_cached: float) -> float:
        """Return how many sequences of `num_cached` tokens these decode nodes can serve within the median SLO on TPOT.

        Return inf without SLOs, or where no sequence could attain them.
        """
        tpots_s = [
            due.tpot_s for node in decode_nodes for part, _, due in self._ledger.limited_parts(node) if part.is_decoded
        ]
        limit_s = median([each for each in tpots_s if each < math.inf] or [math.inf])
        slots = [node.step_weights.num_sequences_within(limit_s, num_cached) for node in decode_nodes]
        return EVEN * sum(slots) or math.inf

    def _usual_left_s(self, prefill_nodes: Collection[Node], now: float) -> float:
        """Return the median of the seconds until the first tokens of waiting prompts are due; inf without SLOs."""
        parts = [each for node in prefill_nodes for each in self._ledger.limited_parts(node)]
        all_s = [due.token_s(request.num_output) for part, request, due in parts if part.tokens_to_compute]
        dues_s = [due_s for due_s in all_s if due_s < math.inf]
        return median(dues_s) - now if dues_s else math.inf


FIXED, AUTO = "fixed", "auto"
CONFIRM_S: Final = 10.0  # for a node to confirm a shape; afterwards its old shape counts
LASTS_S: Final = 3.0  # duration of a pressure before it counts
LACKS_S: Final = 2.0  # duration without a role before it is filled: nodes whose streams broke return sooner
CALM_S: Final = 15.0  # duration without pressure before a node returns to its own role
REST_S: Final = 10.0  # between a role change and the next one that adds a role
MIN_STAY_S: Final = 15.0  # initial time between a role change and the next one that returns a node
MAX_STAY_S: Final = 600.0  # longest such time; a role added later than this after a return resets it
STAY_GROWTH: Final = 4.0


class Roles:
    """Change the roles of nodes, by order or by load: decide, and return the commands that request the change."""

    def __init__(self, registry: Registry, ledger: Ledger, *, policy: str) -> None:
        """Create the role controller.

        With `policy` AUTO, a node gets the role that lacks nodes beside its own: it has both roles until they are not
        needed any more, and then returns to its own. Nodes store their own role, so another coordinator knows it too.
        """
        self._registry = registry
        self._gauge = PressureGauge(ledger, embeds=registry.embeds) if policy == AUTO else None
        self._ledger = ledger
        self._requested_s: dict[Node, float] = {}  # nodes that have not confirmed yet, with the time of the request
        self._flipped_s: float | None = None  # when the coordinator last changed a role by load
        self._stay_s = MIN_STAY_S
        self._went_home_s: float | None = None  # when a node last returned, unless a role was added since

    def set_shape(self, name: str, to: str | Shape, now: float) -> tuple[Node, Shape, list[Send]]:
        """Give a node a role or a shape by an operator's order, and end its drain.

        Returns the node, the requested shape, and the commands to send: none if the node has the shape. The node
        confirms the shape later; after CONFIRM_S without confirmation, its `requested_shape` is None again. Raises
        RequestError, in which case nothing has changed: for an unknown or stopping node, a shape that it cannot take,
        and a change after which the fleet could serve no request.
        """
        node = self._registry.named(name)
        shape = preset(to, **_limits(node)) if isinstance(to, str) else to
        check_shape(shape, **_limits(node))
        if node.is_stopping:
            raise RequestError(DRAINING, f"node {name} is stopping, and takes no role any more")
        self._check_others(node, shape)
        self._registry.drain(node, is_drained=False)
        is_so = node.shape == node.home == shape and node.requested_shape is None
        node.home = shape
        return node, shape, [] if is_so else [self._ask(node, shape, now)]

    def tick(self, now: float) -> list[Send]:
        """Forget requests that are unconfirmed for CONFIRM_S; with AUTO, change one role under lasting pressure.

        Returns the command to send, if any.
        """
        for node, asked_s in list(self._requested_s.items()):
            if node not in self._registry or now - asked_s >= CONFIRM_S:
                self._registry.request_shape(node, None)
            if node.requested_shape is None:
                del self._requested_s[node]
        if self._gauge is None:
            return []
        pressure, lasted_s = self._gauge.measure(self._registry.nodes, now)
        if pressure is None or self._requested_s or not self._is_due(pressure, lasted_s, now):
            return []
        flip = self._flip(pressure)
        if flip is None:
            return []
        self._note_flip(pressure, now)
        return [self._ask(*flip, now)]

    def _ask(self, node: Node, shape: Shape, now: float) -> Send:
        self._registry.request_shape(node, shape)
        self._requested_s[node] = now
        reshape = fleet_pb2.Reshape(shape=shape_to_wire(shape), is_temporary=shape != node.home)
        return Send(node, fleet_pb2.NodeCommand(reshape=reshape))

    def _check_others(self, node: Node, shape: Shape) -> None:
        """Raise RequestError unless the fleet can serve requests as before, also until the node has confirmed the
        shape.

        A drained node serves no requests and may take any shape.
        """
        if not node.is_ready:
            return
        others = [other for other in self._registry.nodes if other is not node and other.is_ready]
        for role, does_it, did_it, part in (
            (PREFILL, shape.prefills, node.prefills, "prefills prompts"),
            (DECODE, shape.decodes, node.decodes, "decodes sequences"),
        ):
            if did_it and not does_it and not any(does(other, role) for other in others):
                raise RequestError(NO_OTHER_NODE, f"node {node.name} is the last one that {part}")
        if has_path(self._registry.nodes) and not has_path(others, common(node.usable, shape)):
            message = f"without node {node.name} as it is no node would take the KV transfers of prefill nodes"
            raise RequestError(NO_OTHER_NODE, message)

    # ---- the coordinator's own policy ----

    def _is_due(self, pressure: Pressure, lasted_s: float, now: float) -> bool:
        """Return whether the pressure has lasted, and the last role change was long enough ago."""
        match pressure:
            case Pressure.NONE:
                lasts_s, rests_s = CALM_S, self._stay_s
            case Pressure.NO_PREFILL_NODE | Pressure.NO_DECODE_NODE:
                lasts_s = rests_s = LACKS_S
            case _:
                lasts_s, rests_s = LASTS_S, REST_S
        return lasted_s >= lasts_s and (self._flipped_s is None or now - self._flipped_s >= rests_s)

    def _note_flip(self, pressure: Pressure, now: float) -> None:
        self._flipped_s = now
        if pressure is Pressure.NONE:
            self._went_home_s = now
        elif self._went_home_s is not None:
            is_soon = now - self._went_home_s < MAX_STAY_S
            self._stay_s = min(STAY_GROWTH * self._stay_s, MAX_STAY_S) if is_soon else MIN_STAY_S
            self._went_home_s = None

    def _flip(self, pressure: Pressure) -> tuple[Node, Shape] | None:
        """Return the node whose shape should change, and its new shape; None where there is none."""
        ready = [node for node in self._registry.nodes if node.is_ready]
        if pressure is Pressure.NONE:
            away = [node for node in ready if node.shape != node.home]
            return (away[0], away[0].home) if away and self._may_go_home(away[0]) else None
        lacks_prefill = pressure in (Pressure.PREFILL, Pressure.NO_PREFILL_NODE)
        role, least = (DECODE, self._part_taken) if lacks_prefill else (PREFILL, self._num_to_compute)
        able = [node for node in ready if node.role == role]
        if not able:
            return None
        node = min(able, key=least)
        return node, preset(MIXED, **_limits(node))

    def _may_go_home(self, node: Node) -> bool:
        try:
            self._check_others(node, node.home)
        except RequestError:
            return False
        return True

    def _part_taken(self, node: Node) -> float:
        return self._ledger.tokens_taken(node) / node.pool_tokens

    def _num_to_compute(self, node: Node) -> float:
        return self._ledger.of(node).tokens_to_compute


def _limits(node: Node) -> dict[str, int]:
    hello = node.hello
    return {"max_num_batched_tokens": hello.max_num_batched_tokens, "max_num_seqs": hello.max_num_seqs}
