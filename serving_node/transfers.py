"""Track the KV transfers of one node in both directions, by epoch. Pure.

A prompt: the decode node reserves blocks (`Receive`), and the transfer descriptor reaches the prefill node by way of
the coordinator; the prefill node then sends (`Send`, `FinishSend`). A revoked credit voids its descriptor: the prefill
node keeps the prefilled prompt and waits for another descriptor, or for the command to decode the prompt itself.

A sequence that migrates is received as a prompt is, except for the tokens that come with it (serving_node/migration.py
sends it).

A request that ends during a transfer, as a canceled one may, keeps its blocks until the transfer is over (`Endings`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from decode_node.preallocation import Preallocation
from kv_transfer.results import Received, Sent, TransferFailed
from prefill_node.scheduler import PrefillScheduler
from protos import fleet_pb2
from protos.convert import attempt_of, from_tail, to_tail
from serving_core import reasons
from serving_core.node.leases import Leases
from serving_core.node.requests import (
    DecodePlace,
    IncomingTransfer,
    NodeRequest,
    NodeRequests,
    RequestEvent,
    RequestState,
    drop_outgoing,
    incoming_of,
    outgoing_of,
)
from serving_node.decisions import CancelTransfer, Decisions, FinishSend, Receive, Send

WAITING_TO_SEND: Final = (RequestState.PREFILLED, RequestState.FROZEN)
WAITING_FOR_OTHERS: Final = (*WAITING_TO_SEND, RequestState.WAITING_FOR_BLOCKS)


def _nothing(*_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """The callbacks of one transfer under way, called at its events. Each end of a transfer has some of them."""

    on_credited: Callable[[bytes], None] = _nothing  # with the descriptor, once every rank has opened its blocks
    on_receiving: Callable[[], None] = _nothing
    on_received: Callable[[Received | TransferFailed, float], None] = _nothing
    on_caught_up: Callable[[], None] = _nothing
    on_sent: Callable[[Sent | TransferFailed, float], None] = _nothing


class Transfers:
    """All transfers of one node that are under way, by epoch. Epochs are unique over both directions."""

    def __init__(self) -> None:
        self._under_way: dict[int, Transfer] = {}
        self.num_kv_bytes = 0  # transferred with requests, over all ranks
        self.num_failed = 0  # without transfers of ended requests, and without aborts, which the other node counts

    def begin(self, epoch: int, transfer: Transfer) -> None:
        self._under_way[epoch] = transfer

    def credited(self, epoch: int, descriptor: bytes) -> None:
        """Pass on that every rank has opened the blocks of a transfer to this node, with its descriptor."""
        self._under_way[epoch].on_credited(descriptor)

    def receiving(self, epoch: int) -> None:
        """Pass on that the first blocks of a transfer to this node arrive; unknown epochs are ignored."""
        if transfer := self._under_way.get(epoch):
            transfer.on_receiving()

    def received(self, epoch: int, result: Received | TransferFailed, now: float) -> None:
        """Forget a transfer to this node, which has ended, and pass on its result.

        Raises KeyError for an epoch that is not under way.
        """
        self._under_way.pop(epoch).on_received(result, now)

    def caught_up(self, epoch: int) -> None:
        """Pass on that all ready blocks of a transfer have left; unknown epochs are ignored."""
        if transfer := self._under_way.get(epoch):
            transfer.on_caught_up()

    def sent(self, epoch: int, result: Sent | TransferFailed, now: float) -> None:
        """Forget a transfer from this node, which has ended, and pass on its result.

        Called once for each, also after it was cancelled. Raises KeyError for an epoch that is not under way.
        """
        self._under_way.pop(epoch).on_sent(result, now)


class Endings:
    """Ends requests: by success, failure, cancel or the loss of the coordinator.

    At that moment a request may be in a running step or in a transfer. Its blocks are freed when neither uses them any
    more, and only then is the end reported.
    """

    def __init__(self, node_requests: NodeRequests, leases: Leases, decisions: Decisions) -> None:
        self._node_requests = node_requests
        self._leases = leases
        self.decisions = decisions

    def fail(self, node_request: NodeRequest, reason: str, message: str) -> None:
        """End a request as failed, with a reason of serving_core.reasons and a message, unless it is already ending.

        Cancels its transfer. The failure is reported once no step and no transfer uses the request's blocks.
        """
        wire = attempt_of(node_request.request)
        self.end(node_request, failed=fleet_pb2.Failed(attempt=wire, reason=reason, message=message))

    def end(self, node_request: NodeRequest, **event: Any) -> None:
        """End a request unless it is already ending, and cancel its transfer.

        `event`, if any, is reported once no step and no transfer uses the request's blocks.
        """
        if node_request in self._node_requests and node_request.ending is None:
            node_request.ending = event
            if node_request.is_sending or node_request.is_receiving:
                self.decisions.add(CancelTransfer(node_request.request.epoch))
        self.settle(node_request)

    def settle(self, node_request: NodeRequest) -> None:
        """Free the blocks of a request that is ending, remove it and report its end, once nothing uses its blocks.

        Does nothing for other requests. Call whenever a step or a transfer releases the request.
        """
        if node_request.ending is None or node_request.is_busy or node_request not in self._node_requests:
            return
        self._leases.give_back(node_request)
        self._node_requests.remove(node_request)
        if node_request.ending:
            self.decisions.report(**node_request.ending)


class IncomingTransfers:
    """Receives the KV of prompts that other nodes prefill, and of sequences that migrate here."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        prefill: PrefillScheduler,
        preallocation: Preallocation,
        endings: Endings,
        transfers: Transfers,
        *,
        block_bytes: int,
        credit_timeout_s: float,
        on_committed: Callable[[], None],
    ) -> None:
        """Create the receiving side.

        `block_bytes` is the size of one block over all ranks and layers.
        """
        self._node_requests = node_requests
        self._leases = leases
        self._prefill = prefill
        self._preallocation = preallocation
        self._endings, self._decisions = endings, endings.decisions
        self._transfers = transfers
        self._block_bytes = block_bytes
        self._credit_timeout_s = credit_timeout_s
        self._on_committed = on_committed

    @property
    def wake_at_s(self) -> float | None:
        """Return the time at which the next `tick` is due; None if no request waits."""
        waits = [incoming_of(each).waiting_since_s for each in self._waiting()]
        return min(waits) + self._credit_timeout_s if waits else None

    def receive(self, node_request: NodeRequest) -> None:
        """Begin a transfer to this node for a request that has credit."""
        incoming_of(node_request).transfer = IncomingTransfer()
        transfer = Transfer(
            on_credited=partial(self._credited, node_request),
            on_receiving=partial(self._receiving, node_request),
            on_received=partial(self._received, node_request),
        )
        self._transfers.begin(node_request.request.epoch, transfer)
        self._decisions.add(Receive(node_request, self._preallocation.num_blocks(node_request)))

    def revoke(self, node_request: NodeRequest) -> None:
        """Begin to revoke a credit; its blocks come free when the transfer has ended."""
        self._decisions.add(CancelTransfer(node_request.request.epoch))

    def tick(self, now: float) -> None:
        """Fail requests that have waited too long for credit.

        One that waits for blocks which another request brings waits for free blocks instead.
        """
        for node_request in self._waiting():
            if now < incoming_of(node_request).waiting_since_s + self._credit_timeout_s:
                continue
            if node_request.is_to_share:
                self._preallocation.wait_no_more(node_request, now)
            else:
                message = f"the decode node had no room for the request within {self._credit_timeout_s} s"
                self._endings.fail(node_request, reasons.QUEUE_FULL, message)

    def _waiting(self) -> list[NodeRequest]:
        """Return the requests that wait for credit under a deadline."""
        waiting = self._node_requests.in_state(RequestState.WAITING_FOR_BLOCKS)
        return [each for each in waiting if not each.is_ending]

    def _credited(self, node_request: NodeRequest, descriptor: bytes) -> None:
        if not node_request.is_ending and not node_request.is_revoked:
            attempt = attempt_of(node_request.request)
            self._decisions.report(reserved=fleet_pb2.Reserved(attempt=attempt, descriptor=descriptor))

    def _receiving(self, node_request: NodeRequest) -> None:
        transfer = incoming_of(node_request).transfer
        assert transfer is not None
        transfer.has_begun = True

    def _received(self, node_request: NodeRequest, result: Received | TransferFailed, now: float) -> None:
        is_revoked, incoming_of(node_request).transfer = node_request.is_revoked, None
        if isinstance(result, Received):
            self._transfers.num_kv_bytes += result.num_bytes
        elif not (is_revoked or node_request.is_ending or result.reason == reasons.TRANSFER_ABORTED):
            self._transfers.num_failed += 1
        if node_request.is_ending:
            self._endings.settle(node_request)
        elif isinstance(result, Received):
            self._commit(node_request, result, now)
        elif is_revoked:
            self._preallocation.release(node_request, now)
            self._decisions.report(revoked=fleet_pb2.Revoked(attempt=attempt_of(node_request.request)))
        elif result.reason != reasons.TRANSFER_ABORTED:
            # The sender's own report on an abort, perhaps the last token, may still be in flight to the coordinator,
            # which then cancels this attempt; a failure reported from here could overtake that report.
            self._endings.fail(node_request, result.reason, result.message)

    def _commit(self, node_request: NodeRequest, received: Received, now: float) -> None:
        try:
            token_ids, made = from_tail(received.tail)
            self._preallocation.check_tail(node_request, len(token_ids), received.num_bytes // self._block_bytes)
        except ValueError as error:
            self._endings.fail(node_request, reasons.TRANSFER_FAILED, str(error))
            return
        self._preallocation.commit(node_request, token_ids, made)
        node_request.note_first_token(now)  # the coordinator's message may still be in flight
        self._prefill.count(node_request)
        committed = fleet_pb2.Committed(
            attempt=attempt_of(node_request.request),
            num_bytes=received.num_bytes,
            num_bytes_saved=node_request.num_cached_blocks * self._block_bytes,
            next_index=node_request.request.num_output_tokens,
        )
        self._decisions.report(committed=committed)
        self._on_committed()


class OutgoingTransfers:
    """Sends the KV of prompts that other nodes decode."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        endings: Endings,
        transfers: Transfers,
        *,
        descriptor_timeout_s: float,
    ) -> None:
        self._node_requests = node_requests
        self._leases = leases
        self._endings, self._decisions = endings, endings.decisions
        self._transfers = transfers
        self._descriptor_timeout_s = descriptor_timeout_s

    @property
    def wake_at_s(self) -> float | None:
        """Return the time at which the next `tick` is due; None if no request waits."""
        waits = [outgoing_of(each).waiting_since_s for each in self._waiting()]
        return min(waits) + self._descriptor_timeout_s if waits else None

    def deliver(self, deliver: fleet_pb2.Deliver) -> None:
        """Take the descriptor of the node that has reserved blocks for a prompt, and begin to send.

        Does nothing if the prompt is unknown, ending or decoded here. While a transfer by a void descriptor is ending,
        the new one waits.
        """
        node_request = self._node_requests.find(deliver.attempt)
        if node_request is None or node_request.is_ending or not node_request.is_outgoing:
            return
        if node_request.is_sending:  # by the descriptor of a revoked credit
            outgoing_of(node_request).next_descriptor = deliver.descriptor
        else:
            self._send_prompt(node_request, deliver.descriptor)

    def keep(self, node_request: NodeRequest) -> None:
        """Decode a prompt on this node although it was prefilled for another; it then waits for a running slot only.

        A transfer by a void descriptor may still be ending.
        """
        node_request.decode_place = DecodePlace.HERE_AFTER_ALL
        if node_request.is_sending:
            self._decisions.add(CancelTransfer(node_request.request.epoch))

    def note_prefilled(self, node_requests: Iterable[NodeRequest], now: float) -> None:
        """Mark those prompts of other nodes as prefilled whose tokens are all computed.

        Transfers of them that are under way are finished; the others wait for a descriptor from `now` on.
        """
        for node_request in node_requests:
            outgoing = node_request.outgoing
            is_prefilling = node_request.state is RequestState.PREFILLING
            if not is_prefilling or outgoing is None or not outgoing.tail or node_request.num_to_compute:
                continue
            self._node_requests.apply(node_request, RequestEvent.PREFILL_ENDED)
            outgoing.waiting_since_s = now
            if node_request.is_sending and node_request.is_outgoing and not node_request.is_ending:
                self.finish(node_request)

    def tick(self, now: float) -> None:
        """Fail requests that have waited too long for a descriptor, or for a command after a migration."""
        for node_request in self._waiting():
            if now < outgoing_of(node_request).waiting_since_s + self._descriptor_timeout_s:
                continue
            is_prompt = node_request.state is RequestState.PREFILLED
            what = "descriptor" if is_prompt else "command for a frozen sequence"
            message = f"no {what} came within {self._descriptor_timeout_s} s"
            self._endings.fail(node_request, reasons.TRANSFER_FAILED, message)

    def _waiting(self) -> list[NodeRequest]:
        """Return the requests that wait for a descriptor or a command under a deadline."""
        waiting = self._node_requests.in_state(*WAITING_TO_SEND)
        return [each for each in waiting if not (each.is_ending or each.is_sending or each.is_kept)]

    def _send_prompt(self, node_request: NodeRequest, descriptor: bytes) -> None:
        self.send(node_request, descriptor, Transfer(on_sent=partial(self._prompt_sent, node_request)))
        if node_request.state is RequestState.PREFILLED:
            self.finish(node_request)

    def send(self, node_request: NodeRequest, descriptor: bytes, transfer: Transfer) -> None:
        """Begin a transfer of a request's blocks from this node, by this encoded descriptor.

        Blocks that no later step writes to are sent at once. `transfer` has the callbacks.
        """
        epoch = node_request.request.epoch
        outgoing_of(node_request).is_sending = True
        self._transfers.begin(epoch, transfer)
        self._decisions.add(Send(epoch, descriptor, self._leases.final_blocks(node_request)))

    def finish(self, node_request: NodeRequest) -> None:
        """Send the last blocks of a request's transfer, and the tail: tokens and numerics ids."""
        tail = to_tail(outgoing_of(node_request).tail, self._leases.numerics_ids_of(node_request))
        self._decisions.add(FinishSend(node_request.request.epoch, self._leases.filled_blocks(node_request), tail))

    def _prompt_sent(self, node_request: NodeRequest, result: Sent | TransferFailed, now: float) -> None:
        outgoing = outgoing_of(node_request)
        outgoing.is_sending = False
        if not node_request.only_prefills:
            drop_outgoing(node_request)
        if not node_request.is_outgoing:
            self._endings.settle(node_request)
        elif isinstance(result, Sent):
            self._transfers.num_kv_bytes += result.num_bytes
            wire = attempt_of(node_request.request)
            self._endings.end(node_request, transferred=fleet_pb2.Transferred(attempt=wire, num_bytes=result.num_bytes))
        elif result.reason == reasons.TRANSFER_REVOKED and not node_request.is_ending:
            descriptor, outgoing.next_descriptor, outgoing.waiting_since_s = outgoing.next_descriptor, b"", now
            if descriptor:
                self._send_prompt(node_request, descriptor)
        else:
            self._transfers.num_failed += not node_request.is_ending
            self._endings.fail(node_request, result.reason, result.message)
