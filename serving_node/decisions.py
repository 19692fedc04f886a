"""What a node's logic decides; the runner carries it out, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving_core.node_requests import NodeRequest, Offer
from serving_core.tiers import Copies


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the coordinator: one field of fleet_pb2.NodeEvent by name."""

    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Beat:
    """Tell the coordinator how the node does, at once."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Open the request's blocks, so many, to the node that has its KV; report `granted`, then `received`."""

    node_request: NodeRequest
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send by the request's descriptor; these leading blocks are final. Report `caught_up` when those that are
    have left, and `sent` when it is over."""

    node_request: NodeRequest
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class SendMore:
    """These leading blocks of what is being sent are final by now."""

    node_request: NodeRequest
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class FinishSend:
    """These are all blocks of what is being sent, and they are final; `tail` is to follow the last one."""

    node_request: NodeRequest
    block_ids: list[int]
    tail: bytes


@dataclass(frozen=True, slots=True)
class Borrow:
    """Open these blocks, but for those that are here already, to the node that makes the offer; report `granted`, then
    `received`."""

    offer: Offer
    block_ids: list[int]
    num_cached: int


@dataclass(frozen=True, slots=True)
class Lend:
    """Send these blocks, which are final, by the descriptor, with the tail behind them; report `sent` when it is
    over."""

    epoch: int
    descriptor: bytes
    block_ids: list[int]
    tail: bytes


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """End the transfer of this epoch, in whichever direction."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Spill:
    """Copy blocks that the pool gives up to the second tier, on every rank, before anything is written to them."""

    copies: Copies


@dataclass(frozen=True, slots=True)
class Load:
    """Read these slots of the second tier into these blocks, on every rank; report `loaded`."""

    load_id: int
    slots: list[int]
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """Write nothing more of this load."""

    load_id: int


@dataclass(frozen=True, slots=True)
class OpenAnnex:
    """Put leading blocks of the request, in whole tiles, on a host that has room for some; report `opened`."""

    node_request: NodeRequest
    block_ids: list[int]
    is_again: bool  # none had room when they were last asked: now they are to make some


@dataclass(frozen=True, slots=True)
class RecallAnnex:
    """Take the blocks of another node's annex back; `hosted` is to follow."""

    number: int


@dataclass(frozen=True, slots=True)
class CloseAnnexes:
    """Nothing is to be asked of them any more."""

    annexes: Sequence[Any]


Decision = (
    Tell
    | Beat
    | Receive
    | Send
    | SendMore
    | FinishSend
    | Borrow
    | Lend
    | CancelTransfer
    | Spill
    | Load
    | CancelLoad
    | OpenAnnex
    | RecallAnnex
    | CloseAnnexes
)
