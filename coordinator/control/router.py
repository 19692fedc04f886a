"""Which nodes may do a part of a request. Pure.

A request has two parts: a node reads the prompt, and the same or another one writes the answer. Which nodes do which
part is a matter of their shapes.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from coordinator.control.registry import Node
from serving_core.errors import RequestError
from serving_core.reasons import NO_DECODE_WORKER, NO_PREFILL_WORKER
from serving_core.shapes import DECODE, PREFILL, Shape

PARTS: Final = {PREFILL: ("reads prompts", NO_PREFILL_WORKER), DECODE: ("writes answers", NO_DECODE_WORKER)}


def candidates(nodes: Iterable[Node], role: str, num_tokens: int) -> list[Node]:
    """The ready nodes that do this part and that num_tokens tokens of one request fit on: one at least. Raises
    RequestError when there is none."""
    ready = fitting(nodes, role, 0)
    able = [node for node in ready if num_tokens <= node.max_request_tokens]
    if not able:
        part, reason = PARTS[role]
        raise RequestError(reason, f"no node that {part} {f'can hold {num_tokens} tokens' if ready else 'is ready'}")
    return able


def fitting(nodes: Iterable[Node], role: str, num_tokens: int) -> list[Node]:
    """The ready nodes that read prompts (prefill) or write answers (decode), and that num_tokens tokens of one request
    fit on."""
    return [node for node in nodes if does(node, role) and node.is_ready and num_tokens <= node.max_request_tokens]


def does(node: Node, role: str) -> bool:
    """Whether the node may be given prompts to read (prefill) or answers to write (decode)."""
    return node.usable.reads if role == PREFILL else node.usable.writes


def has_path(nodes: Iterable[Node], *others: Shape, embeds: bool = False) -> bool:
    """Whether a request can be served by the ready nodes, and others of these shapes: one both reads and writes, or one
    reads and another one takes its hand-overs. Where requests are for embeddings alone, one reads."""
    shapes = [*(node.usable for node in nodes if node.is_ready), *others]
    if any(shape.reads and (shape.writes or embeds) for shape in shapes):
        return True
    return any(shape.reads for shape in shapes) and any(shape.writes and shape.takes_handovers for shape in shapes)


def why_no_path(nodes: Sequence[Node], *, embeds: bool = False) -> str:
    """What a request lacks that cannot be served; empty where it can. `embeds` as has_path takes it."""
    if has_path(nodes, embeds=embeds):
        return ""
    for role, (part, _) in PARTS.items():
        if not fitting(nodes, role, 0):
            return f"no node that {part} is ready"
    return "no node that is ready takes what another one reads"
