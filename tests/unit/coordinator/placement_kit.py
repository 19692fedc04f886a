"""Nodes with answers and prompts that have limits, as the coordinator's ledger has them, and one more request."""

import math

from coordinator.control.load import Arrivals, Ledger, Prompt
from coordinator.control.nodes import Registry
from coordinator.control.placement.costs import TransferEstimates, Wanted
from coordinator.control.placement.policy import POLICIES
from coordinator.control.placement.slo_forecast import SloForecast
from serving_core.slo import Due
from tests import fleet_events as events

TOKENS = list(range(1, 101))
# A step takes 10 ms, 2 ms for each answer, nothing for the tokens before; a token of a prompt takes 1 ms. So the 100
# tokens take 110 ms, in a step of their own.
WEIGHTS = [0.010, 0.002, 0.0, 0.0, 0.001, 0.0, 0.0]
NOW = 50.0
COMING = Arrivals(20.0, 100.0)


class Fleet:
    def __init__(self):
        self.registry, self.ledger = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9), Ledger()
        self.num_requests = 0

    def add(self, name, weights=WEIGHTS, margin=1.0, **hello):
        node = self.registry.admit(events.hello(name, num_blocks=1000, **hello).hello, 0.0)
        rates = {"prefill_tokens_per_s": 1000.0, "lone_step_s": 0.012, "step_weights": weights}
        told = events.heartbeat(**rates, decode_margin=margin)
        self.registry.heartbeat(node, told.heartbeat, 0.0)
        return node

    def reads(self, node, num_tokens, due_in_s=math.inf, decode_node=None, tpot_s=math.inf):
        """One more prompt on the node, whose answer another one writes, or itself."""
        request_id = self._next()
        if due_in_s < math.inf:
            self.ledger.set_due(request_id, Due(NOW + due_in_s, tpot_s), 0, 10)
        self.ledger.prefill(request_id, node, num_tokens)
        if decode_node is not None:
            self.ledger.decode(request_id, decode_node, num_tokens)

    def writes(self, node, tpot_s=math.inf, num_output=1, ago_s=0.0, num_left=1000):
        """One more answer, which has had its first token so long ago, has so many now and may have so many more."""
        request_id = self._next()
        if tpot_s < math.inf:
            self.ledger.set_due(request_id, Due(tpot_s=tpot_s, began_s=NOW - ago_s), num_output, num_left)
        self.ledger.prefill(request_id, node, 0)
        self.ledger.decode(request_id, node, 50)
        self.ledger.first_token(request_id, NOW - ago_s)

    def _next(self):
        self.num_requests += 1
        return str(self.num_requests)

    def awaits(self, node, tpot_s, num_tokens):
        """One more answer of at most so many tokens, whose prompt another node reads."""
        request_id = self._next()
        self.ledger.set_due(request_id, Due(tpot_s=tpot_s), 0, num_tokens)
        self.ledger.decode(request_id, node, 50)

    def late(self, node, due=None, num_tokens=10, coming=COMING, num_ahead=0):
        num_all = len(TOKENS) + num_tokens
        wanted = Wanted(Prompt(TOKENS), num_all, due=due, arrivals=coming, num_ahead=num_ahead)
        return SloForecast(self.ledger, wanted, NOW).on(node)

    def place(self, due=None, policy="auto", transfer_s=0.001, num_tokens=10, coming=COMING):
        wanted = Wanted(Prompt(TOKENS), len(TOKENS) + num_tokens, due=due, arrivals=coming)
        return POLICIES[policy].place(self.registry.nodes, self.ledger, wanted, TransferEstimates(0.0, transfer_s), NOW)
