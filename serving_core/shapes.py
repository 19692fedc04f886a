"""What a node does. A role is a preset of a shape, and a shape says which work a node is given; what it has been given
it does, whatever its shape has become."""

from dataclasses import dataclass
from typing import Final

from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
ROLES: Final = (PREFILL, DECODE, BOTH)


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of what one node is to do."""

    prompt_tokens: int  # most tokens of prompts in one step; 0: it is given no prompt to read
    slots: int  # most answers at a time; 0: it is given none to write
    takes_handovers: bool  # whether it is given answers to prompts that other nodes read

    @property
    def reads(self) -> bool:
        return self.prompt_tokens > 0

    @property
    def writes(self) -> bool:
        return self.slots > 0


def common(one: Shape, other: Shape) -> Shape:
    """What both shapes allow; it may be nothing."""
    return Shape(
        min(one.prompt_tokens, other.prompt_tokens),
        min(one.slots, other.slots),
        one.takes_handovers and other.takes_handovers,
    )


def preset(role: str, *, max_num_batched_tokens: int, max_num_seqs: int) -> Shape:
    """The shape of a role on a node with these limits. Raises RequestError for an unknown role."""
    match role:
        case "prefill":
            return Shape(max_num_batched_tokens, 0, False)
        case "decode":
            return Shape(0, max_num_seqs, True)
        case "both":
            return Shape(max_num_batched_tokens, max_num_seqs, True)
    raise RequestError(BAD_PARAM, f"a role is {', '.join(ROLES[:-1])} or {ROLES[-1]}, not {role!r:.80}", field="role")


def role_of(shape: Shape) -> str:
    """The role that a shape amounts to."""
    if shape.reads and shape.writes:
        return BOTH
    return PREFILL if shape.reads else DECODE


def check_shape(shape: Shape, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Raises RequestError unless a node with these limits can take the shape."""
    for name, value, limit_name, limit in (
        ("prompt_tokens", shape.prompt_tokens, "max_num_batched_tokens", max_num_batched_tokens),
        ("slots", shape.slots, "max_num_seqs", max_num_seqs),
    ):
        if value > limit:
            message = f"{name} of a shape is {value}, the node's {limit_name} is {limit}"
            raise RequestError(BAD_PARAM, message, field=f"shape.{name}")
    if not shape.reads and not shape.writes:
        message = "a shape needs prompt_tokens or slots above 0: a node that does neither does nothing"
        raise RequestError(BAD_PARAM, message, field="shape")
    if shape.takes_handovers and not shape.writes:
        message = "a shape that takes hand-overs needs slots above 0 for their answers"
        raise RequestError(BAD_PARAM, message, field="shape.takes_handovers")
