"""Define a node's limits of prefill and decode. A role is a preset of a shape. A shape restricts new work; a node
completes work it already has, even if its shape changes.
"""

from dataclasses import dataclass
from typing import Final

from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
ROLES: Final = (PREFILL, DECODE, MIXED)


@dataclass(frozen=True, slots=True)
class Shape:
    """The limits of one node's work."""

    prompt_tokens: int  # most prompt tokens in one step; 0: no prefill
    slots: int  # running slots; 0: no decode
    accepts_transfers: bool  # whether the node decodes requests that other nodes prefill

    @property
    def prefills(self) -> bool:
        """Return whether the node prefills."""
        return self.prompt_tokens > 0

    @property
    def decodes(self) -> bool:
        """Return whether the node decodes."""
        return self.slots > 0


def common(one: Shape, other: Shape) -> Shape:
    """Return the largest shape within both shapes, possibly an empty one."""
    return Shape(
        min(one.prompt_tokens, other.prompt_tokens),
        min(one.slots, other.slots),
        one.accepts_transfers and other.accepts_transfers,
    )


def preset(role: str, *, max_num_batched_tokens: int, max_num_seqs: int) -> Shape:
    """Return the shape of a role on a node with these limits: prompt tokens in a step, and running slots.

    Raises RequestError for an unknown role.
    """
    match role:
        case "prefill":
            return Shape(max_num_batched_tokens, 0, False)
        case "decode":
            return Shape(0, max_num_seqs, True)
        case "mixed":
            return Shape(max_num_batched_tokens, max_num_seqs, True)
    raise RequestError(BAD_PARAM, f"a role is {', '.join(ROLES[:-1])} or {ROLES[-1]}, not {role!r:.80}", field="role")


def role_of(shape: Shape) -> str:
    """Return the role that a shape amounts to: prefill, decode or mixed."""
    if shape.prefills and shape.decodes:
        return MIXED
    return PREFILL if shape.prefills else DECODE


def check_shape(shape: Shape, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Raise RequestError unless a node with these limits can take the shape."""
    for name, value, limit_name, limit in (
        ("prompt_tokens", shape.prompt_tokens, "max_num_batched_tokens", max_num_batched_tokens),
        ("slots", shape.slots, "max_num_seqs", max_num_seqs),
    ):
        if value > limit:
            message = f"{name} of a shape is {value}, the node's {limit_name} is {limit}"
            raise RequestError(BAD_PARAM, message, field=f"shape.{name}")
    if not shape.prefills and not shape.decodes:
        message = "a shape needs prompt_tokens or slots above 0: a node that does neither does nothing"
        raise RequestError(BAD_PARAM, message, field="shape")
    if shape.accepts_transfers and not shape.decodes:
        message = "a shape that accepts KV transfers needs slots above 0"
        raise RequestError(BAD_PARAM, message, field="shape.accepts_transfers")
