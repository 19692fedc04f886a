"""Picks the node for a request. Pure."""

from collections.abc import Collection, Iterable

from coordinator.registry import Node
from engine.errors import RequestError
from protos.reasons import NO_DECODE_WORKER, NO_PREFILL_WORKER

_NO_NODE = {"prefill": NO_PREFILL_WORKER, "decode": NO_DECODE_WORKER}


def choose(nodes: Iterable[Node], role: str, num_tokens: int, avoid: Collection[Node] = ()) -> Node:
    """The least loaded ready node of the role that a request of num_tokens fits on; one of `avoid` only when there is
    no other. Raises RequestError when there is none at all.

    Load is what the coordinator has assigned and not seen finished: for prefill the tokens still to compute, for
    decode the share of the KV pool.
    """
    ready = [node for node in nodes if node.role == role and node.is_ready]
    fitting = [node for node in ready if num_tokens <= node.max_request_tokens]
    if not fitting:
        problem = f"can hold {num_tokens} tokens" if ready else "is ready"
        raise RequestError(_NO_NODE[role], f"no {role} node {problem}")
    return min(fitting, key=lambda node: (node in avoid, _load(node), node.name))


def _load(node: Node) -> float:
    tokens = node.assigned_tokens
    return tokens if node.role == "prefill" else tokens / node.pool_tokens
