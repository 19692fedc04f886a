"""The transfers that bring prompts' KV to a decode node, from the grant of blocks until all of it is there."""

from collections.abc import Callable

from decode_node.attempt import Attempt
from decode_node.ranks import DecodeRanks
from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.errors import TransferError
from kv_transfer.results import Received, TransferFailed
from kv_transfer.ticket import Ticket
from protos import convert, fleet_pb2
from protos.attempts import Attempts
from protos.ranks import Followers
from serving_core import reasons
from serving_core.layout import KVLayout


class Transfers:
    """Each begins with `grant`, and ends with `on_received` or with the end of its attempt."""

    def __init__(
        self,
        receiver: KVReceiver,
        followers: Followers,
        model_layout: KVLayout,
        attempts: Attempts[Attempt],
        *,
        ttl_s: float,
        send: Callable[..., None],
        on_received: Callable[[Attempt, Received], None],
    ) -> None:
        """`send` is the link's."""
        self.ranks = DecodeRanks(receiver, followers, self._granted, self._ended)
        self.num_kv_bytes = 0  # received, over all ranks
        self.num_failed = 0
        self._decode_tp = 1 + len(followers)
        self._model_layout = model_layout
        self._attempts = attempts
        self._ttl_s = ttl_s
        self._send = send
        self._on_received = on_received
        self._receiving: dict[int, Attempt] = {}  # by epoch

    def grant(self, attempt: Attempt, prefill_tp: int) -> None:
        """Opens the attempt's blocks to a prefill node of so many ranks; the ticket goes out when every rank awaits
        them."""
        assert attempt.reservation.lease is not None
        try:
            attempt.ticket = self._draw_ticket(attempt, prefill_tp)
        except TransferError as error:
            self._attempts.fail(attempt, reasons.TRANSFER_FAILED, str(error))
            return
        self._receiving[attempt.ticket.epoch] = attempt
        block_ids = attempt.reservation.lease.block_ids[: attempt.ticket.num_blocks]
        self.ranks.grant(attempt.ticket, block_ids)

    def _draw_ticket(self, attempt: Attempt, prefill_tp: int) -> Ticket:
        return Ticket.draw(
            epoch=attempt.request.epoch,
            layout=self._model_layout,
            prefill_tp=prefill_tp,
            decode_tp=self._decode_tp,
            addresses=self.ranks.addresses,
            num_blocks=self._model_layout.num_blocks_for(len(attempt.request.token_ids)),
            num_cached_blocks=attempt.reservation.num_cached_blocks,
            ttl_s=self._ttl_s,
        )

    def _granted(self, epoch: int) -> None:
        """Every rank awaits the blocks: the prefill node may send them."""
        attempt = self._receiving[epoch]
        assert attempt.ticket is not None
        if not self._attempts.is_ending(attempt):
            wire = convert.attempt_of(attempt.request)
            self._send(reserved=fleet_pb2.Reserved(attempt=wire, ticket=attempt.ticket.encode()))

    def _ended(self, epoch: int, result: Received | TransferFailed) -> None:
        attempt = self._receiving.pop(epoch)
        attempt.ticket = None
        if isinstance(result, Received):
            self.num_kv_bytes += result.num_bytes
        else:
            self.num_failed += 1
        if self._attempts.is_ending(attempt):
            self._attempts.settle(attempt)
        elif isinstance(result, TransferFailed):
            # The prefill node's own word on an abort, perhaps the last token, may still be on its way to the
            # coordinator, which cancels this attempt then; a failure from here could overtake it.
            if result.reason != reasons.TRANSFER_ABORTED:
                self._attempts.fail(attempt, result.reason, result.message)
        else:
            self._on_received(attempt, result)
