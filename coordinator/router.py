"""Picks the node for a request. Pure.

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

from coordinator.prompts import Prompt
from coordinator.registry import Node
from engine.errors import RequestError
from protos.reasons import NO_DECODE_WORKER, NO_PREFILL_WORKER

_NO_NODE = {"prefill": NO_PREFILL_WORKER, "decode": NO_DECODE_WORKER}


def choose(nodes: Iterable[Node], role: str, prompt: Prompt, num_tokens: int, avoid: Collection[Node] = ()) -> Node:
    """The cheapest ready node of the role that num_tokens tokens of the request fit on, the first by name of equals;
    one of `avoid` only when there is no other. Raises RequestError when there is none at all.
    """
    ready = [node for node in nodes if node.role == role and node.is_ready]
    fitting = [node for node in ready if num_tokens <= node.max_request_tokens]
    if not fitting:
        problem = f"can hold {num_tokens} tokens" if ready else "is ready"
        raise RequestError(_NO_NODE[role], f"no {role} node {problem}")
    return min(fitting, key=lambda node: (node in avoid, _cost(node, prompt), node.name))


def _cost(node: Node, prompt: Prompt) -> float:
    if node.role == "prefill":
        return node.assigned_tokens + prompt.tokens_to_compute(node)
    return (node.assigned_tokens + len(prompt) - prompt.tokens_held(node)) / node.pool_tokens
