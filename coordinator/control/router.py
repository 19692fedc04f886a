"""Picks the node for a request, when it is clear which role is to be filled. Pure.

A node costs what the request would find there, in tokens; the cheapest takes it:

    prefill   tokens assigned and not finished + tokens of the request that the node would have to compute
    decode    (tokens assigned + tokens of the request that the node does not hold) / tokens of its KV pool

For prefill both terms are computed before the first token of the answer, one token at about the same price as the
other. So a node that holds the beginning of the request wins, unless its queue is longer than the others' by more
than what it saves; a popular beginning spreads over more nodes just when one of them has become the slower choice.
For decode it is the part of the pool that is taken once the request is there. A block that is held needs neither a
transfer nor a free block, and pools may differ in size. Hints change the cost alone, never who may be chosen.
"""

from collections.abc import Collection, Iterable

from coordinator.control.ledger import Ledger
from coordinator.control.prompts import Prompt
from coordinator.control.registry import Node
from serving_core.errors import RequestError
from serving_core.reasons import NO_DECODE_WORKER, NO_PREFILL_WORKER

_NO_NODE = {"prefill": NO_PREFILL_WORKER, "decode": NO_DECODE_WORKER}


def choose(
    nodes: Collection[Node],
    ledger: Ledger,
    role: str,
    prompt: Prompt,
    num_tokens: int,
    avoid: Collection[Node] = (),
) -> Node:
    """The cheapest ready node of the role that num_tokens tokens of the request fit on, the first by name of equals;
    one of `avoid` only when there is no other. Raises RequestError when there is none at all.
    """
    cost = prefill_cost if role == "prefill" else decode_cost
    able = candidates(nodes, role, num_tokens)
    return min(able, key=lambda node: (node in avoid, cost(node, ledger, prompt), node.name))


def candidates(nodes: Collection[Node], role: str, num_tokens: int) -> list[Node]:
    """The ready nodes of the role that num_tokens tokens of one request fit on: one at least. Raises RequestError when
    there is none."""
    able = fitting(nodes, role, num_tokens)
    if not able:
        problem = f"can hold {num_tokens} tokens" if fitting(nodes, role, 0) else "is ready"
        raise RequestError(_NO_NODE[role], f"no {role} node {problem}")
    return able


def fitting(nodes: Iterable[Node], role: str, num_tokens: int) -> list[Node]:
    """The ready nodes of the role that num_tokens tokens of one request fit on."""
    return [node for node in nodes if node.role == role and node.is_ready and num_tokens <= node.max_request_tokens]


def writes(node: Node) -> bool:
    """Whether answers are to be written there."""
    return node.role == "decode"


def roomiest(nodes: Iterable[Node], ledger: Ledger, num_tokens: int, max_tokens: int) -> Node | None:
    """Of the ready nodes that write, have room for num_tokens tokens of a running answer now and can hold max_tokens of
    one, the one with most room, the first by name of equals. None when there is none."""

    def free(node: Node) -> int:
        return node.pool_tokens - ledger.of(node).tokens_held

    def has_seat(node: Node) -> bool:
        return not node.hello.max_num_seqs or ledger.of(node).num_answers < node.hello.max_num_seqs

    able = [node for node in fitting(nodes, "decode", max_tokens) if has_seat(node) and free(node) >= num_tokens]
    return min(able, key=lambda node: (-free(node), node.name), default=None)


def prefill_cost(node: Node, ledger: Ledger, prompt: Prompt) -> float:
    """Of a prefill node, in tokens."""
    return ledger.of(node).tokens_to_compute + prompt.tokens_to_compute(node)


def decode_cost(node: Node, ledger: Ledger, prompt: Prompt) -> float:
    """Of a decode node, as a part of its pool."""
    return (ledger.of(node).tokens_held + len(prompt) - prompt.tokens_held(node)) / node.pool_tokens
