"""Define and collect the decisions of a node's scheduler; the worker carries them out in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serving_core.node.requests import NodeRequest, Offer
from serving_core.node.tiers import Copies
from serving_core.requests import Request


@dataclass(frozen=True, slots=True)
class Report:
    """Report one event to the coordinator; its key is the name of the field in fleet_pb2.NodeEvent."""

    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Send a heartbeat at once."""


@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Compile the grammar of a request, and report `compiled`.

    Requests of one `asker` (API key) wait for each other.
    """

    request: Request
    asker: str


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load a LoRA adapter from a folder on every rank, and report AdapterChanged."""

    name: str
    folder: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Unload a LoRA adapter that no request of the node uses, and report AdapterChanged."""

    name: str


@dataclass(frozen=True, slots=True)
class Receive:
    """Open the request's first `num_blocks` blocks to the node that has its KV.

    The worker reports `credited` when the descriptor is ready, then `received`.
    """

    node_request: NodeRequest
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Send:
    """Begin a transfer by this descriptor; these leading blocks are final.

    The worker reports `caught_up` when all ready blocks have left, and `sent` at the end.
    """

    epoch: int
    descriptor: bytes
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class SendMore:
    """Send more blocks of a transfer under way: these are all that are final, from the first one."""

    epoch: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class FinishSend:
    """Complete a transfer under way: these are all blocks, and all are final; `tail` follows the last one."""

    epoch: int
    block_ids: list[int]
    tail: bytes


@dataclass(frozen=True, slots=True)
class FetchPrefix:
    """Open these blocks, except the first `num_cached`, to the node that offers them.

    The worker reports `credited` when the descriptor is ready, then `received`.
    """

    offer: Offer
    block_ids: list[int]
    num_cached: int


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """End the transfer of this epoch in either direction."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy evicted blocks to KV offload on every rank, before the blocks are overwritten."""

    copies: Copies


@dataclass(frozen=True, slots=True)
class Load:
    """Read these KV offload slots into these blocks on every rank, then report `loaded`."""

    load_id: int
    slots: list[int]
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """End a load: none of its blocks is written afterwards."""

    load_id: int


@dataclass(frozen=True, slots=True)
class OpenRemoteKV:
    """Send leading blocks of the request, in whole tiles, to a KV holder with room, then report `opened`."""

    node_request: NodeRequest
    block_ids: list[int]
    is_again: bool  # no holder had room at the last attempt: holders make room now


@dataclass(frozen=True, slots=True)
class RevokeRemoteKV:
    """Revoke the blocks, of connection `number`, that hold another node's KV; the holder then releases them."""

    number: int


@dataclass(frozen=True, slots=True)
class CloseRemoteKV:
    """Close connections to KV holders that are not needed any more."""

    remote_kvs: Sequence[Any]


Decision = (
    Report
    | SendHeartbeat
    | CompileGrammar
    | LoadAdapter
    | UnloadAdapter
    | Receive
    | Send
    | SendMore
    | FinishSend
    | FetchPrefix
    | CancelTransfer
    | Offload
    | Load
    | CancelLoad
    | OpenRemoteKV
    | RevokeRemoteKV
    | CloseRemoteKV
)


class Decisions:
    """Collects the decisions of one node's scheduler until the worker takes them."""

    def __init__(self) -> None:
        self._decided: list[Decision] = []
        self.decide_first: Callable[[], list[Decision]] | None = None
        """Returns the decisions that must come before all others of the same `take`."""

    def take(self) -> list[Decision]:
        """Return the decisions since the last call, in order, and forget them."""
        decided, self._decided = self._decided, []
        return decided if self.decide_first is None else [*self.decide_first(), *decided]

    def add(self, decision: Decision) -> None:
        self._decided.append(decision)

    def report(self, **event: Any) -> None:
        """Add the decision to report one event, named by its field in fleet_pb2.NodeEvent."""
        self._decided.append(Report(event))
