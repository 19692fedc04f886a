"""Decides where a prompt is computed: on a prefill node, or locally, on the decode node that goes on with it. Pure.

`never` and `always` say it all. `auto` takes what adds the fewest seconds over all requests:

    remote   max((tokens queued at the prefill node + tokens to compute there) / its rate, wait for credit)
             + transfer and decode queue, as measured on recent requests
             + what is left by then of the prompts that the decode node computes itself, for they slow it down
    local    wait for credit
             + (prompt tokens given to the decode node before + tokens to compute there) / its rate
             + its step time for each chunk of them, when others decode meanwhile
             + others that decode meanwhile * tokens to compute there / its rate

The last term is what the others pay: each of them waits while the node computes the prompt. They are the answers that
the node goes on with, those whose prompts it computes before this one, and of those that prefill nodes are still to
hand over the part that comes in the meantime. A remote prompt disturbs nobody, but its KV has to travel. The wait for
credit counts where the decode node is full; a remote prompt is computed during it, a local one after it. Tokens to
compute are those that the node does not hold already.

Load is counted from what the coordinator has assigned itself, since heartbeats are up to a second old; rates and step
times come from heartbeats. A node whose rate is not known counts as the median of the others. While none is known,
prompts go to prefill nodes, and where there are none to the decode node with the fewest tokens to go.
"""

from collections.abc import Collection, Sequence
from math import ceil
from statistics import median
from typing import Final

from coordinator.control.handover import HandoverCosts
from coordinator.control.ledger import Ledger
from coordinator.control.prompts import Prompt
from coordinator.control.registry import Node
from coordinator.control.router import candidates, choose, decode_cost, fitting

NEVER, AUTO, ALWAYS = "never", "auto", "always"
ROLES_NEEDED: Final = {NEVER: ("prefill", "decode"), AUTO: ("decode",), ALWAYS: ("decode",)}
CHUNK_TOKENS: Final = 512  # of a prompt that a decode node computes in one step, about

Pair = tuple[Node, Node]


def place(
    nodes: Sequence[Node],
    ledger: Ledger,
    prompt: Prompt,
    num_tokens: int,
    avoid: Collection[Node] = (),
    *,
    policy: str,
    handover: HandoverCosts,
) -> Pair:
    """The node that computes the prompt and the node that decodes: the same one for a local prefill.

    num_tokens are those of prompt and answer together. Nodes of `avoid` come last. Raises RequestError when there is
    no node of a role that is needed.
    """
    if policy == NEVER:
        return _remote(nodes, ledger, prompt, num_tokens, avoid)
    costs = _Costs(nodes, ledger, prompt, handover)

    def local_order(node: Node) -> tuple[bool, bool, float, float, str]:
        return node in avoid, costs.is_full(node), costs.local_s(node), decode_cost(node, ledger, prompt), node.name

    node = min(candidates(nodes, "decode", num_tokens), key=local_order)
    if policy == ALWAYS or not fitting(nodes, "prefill", len(prompt)):
        return node, node
    remote = _remote(nodes, ledger, prompt, num_tokens, avoid)
    if not costs.are_known:
        return remote

    def order(pair: Pair) -> tuple[int, bool, float]:
        return len(set(pair) & set(avoid)), costs.is_full(pair[1]), costs.seconds(*pair)

    return min(remote, (node, node), key=order)


def _remote(nodes: Sequence[Node], ledger: Ledger, prompt: Prompt, num_tokens: int, avoid: Collection[Node]) -> Pair:
    prefill = choose(nodes, ledger, "prefill", prompt, len(prompt), avoid)
    return prefill, choose(nodes, ledger, "decode", prompt, num_tokens, avoid)


class _Costs:
    """What one request would cost on these nodes, in seconds of all requests."""

    def __init__(self, nodes: Sequence[Node], ledger: Ledger, prompt: Prompt, handover: HandoverCosts) -> None:
        self._ledger, self._prompt, self._handover = ledger, prompt, handover
        rates = [node.load.prefill_tokens_per_s for node in nodes if node.load.prefill_tokens_per_s > 0]
        self.are_known = bool(rates)
        self._other_rate = median(rates) if rates else 1.0  # without any, costs compare tokens
        prefill = [node for node in nodes if node.role == "prefill"]
        num_queued = sum(ledger.of(node).tokens_to_compute for node in prefill)
        self._remote_queue_s = num_queued / sum(map(self._rate, prefill)) if num_queued else 0.0

    def seconds(self, prefill: Node, decode: Node) -> float:
        return self.local_s(decode) if prefill is decode else self.remote_s(prefill, decode)

    def remote_s(self, prefill: Node, decode: Node) -> float:
        """A prompt that is half computed counts as a whole one: the coordinator cannot see how far it has come."""
        num_tokens = self._ledger.of(prefill).tokens_to_compute + self._prompt.tokens_to_compute(prefill)
        there_s = max(num_tokens / self._rate(prefill), self._credit_s(decode)) + self._handover.move_s
        return max(there_s, self._ledger.of(decode).tokens_to_compute / self._rate(decode))

    def local_s(self, decode: Node) -> float:
        num_own_tokens = self._prompt.tokens_to_compute(decode)
        num_tokens = self._ledger.of(decode).tokens_to_compute + num_own_tokens
        compute_s = num_tokens / self._rate(decode)
        num_others = self._num_decoding_within(decode, compute_s)
        if num_others:
            compute_s += ceil(num_tokens / CHUNK_TOKENS) * decode.load.step_s
        return self._credit_s(decode) + compute_s + num_others * num_own_tokens / self._rate(decode)

    def is_full(self, decode: Node) -> bool:
        """Whether the request would have to wait for credit."""
        has_no_seat = 0 < decode.hello.max_num_seqs <= self._ledger.of(decode).num_answers
        return has_no_seat or self._ledger.of(decode).tokens_held + len(self._prompt) > decode.pool_tokens

    def _num_decoding_within(self, decode: Node, seconds: float) -> float:
        """Answers that the node goes on with by then, of those that it has."""
        account = self._ledger.of(decode)
        part = min(1.0, seconds / self._remote_queue_s) if self._remote_queue_s else 1.0
        return account.num_answers - account.num_to_come * (1.0 - part)

    def _credit_s(self, decode: Node) -> float:
        return self._handover.credit_s if self.is_full(decode) else 0.0

    def _rate(self, node: Node) -> float:
        return node.load.prefill_tokens_per_s or self._other_rate
