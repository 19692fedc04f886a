"""Track KV transfers from prefill node to decode node, at both ends. Pure.

The decode node grants credit (`Receive`), and its transfer descriptor reaches the prefill node by way of the
coordinator; the prefill node then sends (`Send`, `FinishSend`). A revoked credit voids its descriptor: the prefill node
keeps the prefilled prompt and waits for another descriptor, or for the command to decode the prompt itself.

A migrating sequence is received in the same way, except for the tokens that come with it; moves.py is its sending side.
"""

from collections.abc import Callable, Iterable
from typing import Final

from decode_node.credit import Credit
from kv_transfer.results import Received, Sent, TransferFailed
from prefill_node.reading import Reading
from protos import fleet_pb2
from protos.convert import attempt_of, from_tail, to_tail
from serving_core import reasons
from serving_core.node.leases import Leases
from serving_core.node.requests import (
    DecodePlace,
    IncomingTransfer,
    NodeRequest,
    NodeRequests,
    Outgoing,
    RequestEvent,
    RequestState,
    drop_outgoing,
)
from serving_node.decisions import CancelTransfer, FinishSend, Receive, Send
from serving_node.outputs import Endings

MAY_WAIT: Final = (RequestState.WAITING_FOR_BLOCKS, RequestState.PREFILLED, RequestState.FROZEN)


class HandOvers:
    """Track the transfers of one node in both directions."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        reading: Reading,
        credit: Credit,
        endings: Endings,
        *,
        block_bytes: int,
        credit_timeout_s: float,
        descriptor_timeout_s: float,
        on_committed: Callable[[], None],
    ) -> None:
        """Create an empty tracker.

        `block_bytes` is the size of one block over all ranks and layers.
        """
        self._node_requests = node_requests
        self._leases = leases
        self._reading = reading
        self._credit = credit
        self._endings = endings
        self._block_bytes = block_bytes
        self._credit_timeout_s = credit_timeout_s
        self._descriptor_timeout_s = descriptor_timeout_s
        self._on_committed = on_committed
        self._under_way: dict[int, NodeRequest] = {}  # both directions, by epoch
        self.num_kv_bytes = 0  # transferred, over all ranks
        self.num_failed = 0  # without transfers of ended requests, and without aborts, which the other node counts

    @property
    def wake_at_s(self) -> float | None:
        """Return when the next `tick` is due, or None."""
        return min((self._deadline_s(each) for each in self._waiting()), default=None)

    def receive(self, node_request: NodeRequest) -> None:
        """Open a transfer to this node for a request that has credit."""
        assert node_request.incoming is not None
        node_request.incoming.transfer = IncomingTransfer()
        self._under_way[node_request.request.epoch] = node_request
        self._endings.decide(Receive(node_request, self._credit.num_blocks(node_request)))

    def deliver(self, deliver: fleet_pb2.Deliver) -> None:
        """Take the descriptor of the node that has reserved blocks, and begin to send."""
        node_request = self._node_requests.find(deliver.attempt)
        if node_request is None or node_request.is_ending or not node_request.is_outgoing:
            return
        if node_request.is_sending:  # by the descriptor of a revoked credit
            outgoing_of(node_request).next_descriptor = deliver.descriptor
        else:
            self._send(node_request, deliver.descriptor)

    def keep(self, node_request: NodeRequest) -> None:
        """Keep a prompt on this node: prefill continues, then the request waits for a running slot only.

        A transfer with a void descriptor may still be ending.
        """
        node_request.decode_place = DecodePlace.HERE_AFTER_ALL
        if node_request.is_sending:
            self._endings.decide(CancelTransfer(node_request.request.epoch))

    def granted(self, epoch: int, descriptor: bytes) -> None:
        """Report the descriptor of a `Receive`, for which every rank is ready."""
        node_request = self._under_way[epoch]
        if not node_request.is_ending and not node_request.is_revoked:
            self._endings.tell(
                reserved=fleet_pb2.Reserved(attempt=attempt_of(node_request.request), descriptor=descriptor)
            )

    def coming(self, epoch: int) -> None:
        """Note that the other node has begun to send."""
        if node_request := self._under_way.get(epoch):
            assert node_request.incoming is not None
            assert node_request.incoming.transfer is not None
            node_request.incoming.transfer.has_begun = True

    def received(self, epoch: int, result: Received | TransferFailed, now: float) -> None:
        """Record the end of a `Receive`."""
        node_request = self._under_way.pop(epoch)
        assert node_request.incoming is not None
        is_revoked, node_request.incoming.transfer = node_request.is_revoked, None
        if isinstance(result, Received):
            self.num_kv_bytes += result.num_bytes
        elif not (is_revoked or node_request.is_ending or result.reason == reasons.TRANSFER_ABORTED):
            self.num_failed += 1
        if node_request.is_ending:
            self._endings.settle(node_request)
        elif isinstance(result, Received):
            self._commit(node_request, result, now)
        elif is_revoked:
            self._credit.take_back(node_request, now)
            self._endings.tell(revoked=fleet_pb2.Revoked(attempt=attempt_of(node_request.request)))
        elif result.reason != reasons.TRANSFER_ABORTED:
            # The sender's own report on an abort, perhaps the last token, may still be in flight to the coordinator,
            # which then cancels this attempt; a failure reported from here could overtake that report.
            self._endings.fail(node_request, result.reason, result.message)

    def sent(self, epoch: int, result: Sent | TransferFailed, now: float) -> None:
        """Record the end of a `Send`."""
        node_request = self._under_way.pop(epoch)
        outgoing = outgoing_of(node_request)
        outgoing.is_sending = False
        if not node_request.only_prefills:
            drop_outgoing(node_request)
        if not node_request.is_outgoing:
            self._endings.settle(node_request)
        elif isinstance(result, Sent):
            self.num_kv_bytes += result.num_bytes
            wire = attempt_of(node_request.request)
            self._endings.end(node_request, transferred=fleet_pb2.Transferred(attempt=wire, num_bytes=result.num_bytes))
        elif result.reason == reasons.TRANSFER_REVOKED and not node_request.is_ending:
            descriptor, outgoing.next_descriptor, outgoing.waiting_since_s = outgoing.next_descriptor, b"", now
            if descriptor:
                self._send(node_request, descriptor)
        else:
            self.num_failed += not node_request.is_ending
            self._endings.fail(node_request, result.reason, result.message)

    def tick(self, now: float) -> None:
        """End waits that have passed their deadline."""
        for node_request in self._waiting():
            if now < self._deadline_s(node_request):
                continue
            if node_request.state is RequestState.WAITING_FOR_BLOCKS and node_request.is_to_share:
                self._credit.wait_no_more(node_request, now)
            elif node_request.state is RequestState.WAITING_FOR_BLOCKS:
                timeout_s = self._credit_timeout_s
                message = f"the decode node had no room for the request within {timeout_s} s"
                self._endings.fail(node_request, reasons.QUEUE_FULL, message)
            else:
                what = (
                    "descriptor"
                    if node_request.state is RequestState.PREFILLED
                    else "word on an answer that has stopped"
                )
                message = f"no {what} came within {self._descriptor_timeout_s} s"
                self._endings.fail(node_request, reasons.TRANSFER_FAILED, message)

    def note_read(self, node_requests: Iterable[NodeRequest], now: float) -> None:
        """Enter the next state for prompts of other nodes whose tokens are all computed."""
        for node_request in node_requests:
            outgoing = node_request.outgoing
            is_prefilling = node_request.state is RequestState.PREFILLING
            if not is_prefilling or outgoing is None or not outgoing.tail or node_request.num_to_compute:
                continue
            self._node_requests.apply(node_request, RequestEvent.PREFILL_ENDED)
            outgoing.waiting_since_s = now
            if node_request.is_sending and node_request.is_outgoing and not node_request.is_ending:
                self.finish_send(node_request)

    def _send(self, node_request: NodeRequest, descriptor: bytes) -> None:
        outgoing = outgoing_of(node_request)
        outgoing.descriptor, outgoing.is_sending = descriptor, True
        self._under_way[epoch := node_request.request.epoch] = node_request
        self._endings.decide(Send(epoch, descriptor, self._leases.final_blocks(node_request)))
        if node_request.state is RequestState.PREFILLED:
            self.finish_send(node_request)

    def finish_send(self, node_request: NodeRequest) -> None:
        """Send the last blocks and the tail of a transfer."""
        tail = to_tail(outgoing_of(node_request).tail, self._leases.makers_of(node_request))
        self._endings.decide(FinishSend(node_request.request.epoch, self._leases.filled_blocks(node_request), tail))

    def _commit(self, node_request: NodeRequest, received: Received, now: float) -> None:
        try:
            token_ids, made = from_tail(received.tail)
            self._credit.check_tail(node_request, len(token_ids), received.num_bytes // self._block_bytes)
        except ValueError as error:
            self._endings.fail(node_request, reasons.TRANSFER_FAILED, str(error))
            return
        self._credit.commit(node_request, token_ids, made)
        node_request.note_first_token(now)  # the coordinator's message may still be in flight
        self._reading.count(node_request)
        committed = fleet_pb2.Committed(
            attempt=attempt_of(node_request.request),
            num_bytes=received.num_bytes,
            num_bytes_saved=node_request.num_cached_blocks * self._block_bytes,
            next_index=node_request.request.num_output_tokens,
        )
        self._endings.tell(committed=committed)
        self._on_committed()

    def revoke(self, node_request: NodeRequest) -> None:
        self._endings.decide(CancelTransfer(node_request.request.epoch))

    def _waiting(self) -> list[NodeRequest]:
        """Return the requests that wait for another node."""
        return [each for each in self._node_requests.in_state(*MAY_WAIT) if _is_waiting(each)]

    def _deadline_s(self, node_request: NodeRequest) -> float:
        is_awaiting = node_request.state is RequestState.WAITING_FOR_BLOCKS
        timeout_s = self._credit_timeout_s if is_awaiting else self._descriptor_timeout_s
        waits = node_request.incoming if is_awaiting else node_request.outgoing
        assert waits is not None
        return waits.waiting_since_s + timeout_s


def outgoing_of(node_request: NodeRequest) -> Outgoing:
    """Return the data of a request whose KV goes to another node."""
    assert node_request.outgoing is not None
    return node_request.outgoing


def _is_waiting(node_request: NodeRequest) -> bool:
    """Return whether a request waits for another node under a deadline."""
    if node_request.is_ending or node_request.is_sending:
        return False
    return node_request.is_outgoing or node_request.state is not RequestState.PREFILLED
