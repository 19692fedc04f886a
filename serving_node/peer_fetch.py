"""Fetch blocks from prefix caches of other nodes, and send cached blocks to them (remote prefix fetch). Pure.

The coordinator decides by cost whether a fetch pays, and names the source (`Job.fetch_prefix`). A prompt that is about
to start waits in the queue while its blocks arrive: this node reserves blocks (`FetchPrefix`), the transfer descriptor
travels by way of the coordinator to the source, and received blocks enter the prefix cache. Then the prompt starts as
any other; other prompts start meanwhile. Blocks that do not arrive in time are computed. A prompt is offered one fetch.

At the source the blocks are leased until they are sent, so that no other tokens can take them. Blocks in the host or
disk tier are read back first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.results import Received, Sent, TransferError, TransferFailed
from prefill_node.scheduler import PrefillScheduler, num_cacheable
from protos import fleet_pb2
from protos.convert import MAX_NUMERICS_RUNS, attempt_of, from_tail, to_tail
from serving_core import reasons
from serving_core.node.blocks import BlockLease
from serving_core.node.leases import Leases, PrefixFetch
from serving_core.node.prefix import BlockNames, root_name
from serving_core.node.requests import NodeRequest, Offer
from serving_node.decisions import CancelTransfer, Decisions, FetchPrefix, FinishSend, Send
from serving_node.kv_offload import KVOffload
from serving_node.sources import KVSource
from serving_node.transfers import Transfer, Transfers

MAX_PREFIX_FETCHES: Final = 16  # at a time


@dataclass(slots=True)
class _PrefixFetch:
    """Hold one fetch to this node."""

    node_request: NodeRequest
    offer: Offer
    prefix_fetch: PrefixFetch
    started_s: float
    is_over: bool = False  # no request waits for the fetch; its blocks may still be written
    cancelled: fleet_pb2.Attempt | None = None  # by the coordinator, which waits for the acknowledgement


class PeerFetch(KVSource):
    """Tracks remote prefix fetches to this node, by epoch."""

    kind = "remote prefix fetch"

    def __init__(
        self, leases: Leases, prefill: PrefillScheduler, decisions: Decisions, transfers: Transfers, block_bytes: int
    ) -> None:
        """Create an empty tracker.

        `block_bytes` is the size of one block over all ranks and layers.
        """
        self._leases = leases
        self._prefill = prefill
        self._decisions = decisions
        self._transfers = transfers
        self._block_bytes = block_bytes
        self._under_way: dict[int, _PrefixFetch] = {}  # by epoch

    @property
    def held(self) -> dict[int, BlockLease]:
        """Return the leases of blocks that are being fetched from other nodes, by epoch."""
        return {epoch: each.prefix_fetch.lease for epoch, each in self._under_way.items()}

    @property
    def wake_at_s(self) -> float | None:
        """Return the time at which the next `tick` is due; None if no fetch runs."""
        return min((_late_at_s(each) for each in self._under_way.values() if not each.is_over), default=None)

    def must_wait(self, node_request: NodeRequest, num_spare: int, now: float) -> bool:
        """Return whether a prompt that might start must wait for fetched blocks; begin the fetch that it was offered.

        The start of the prompt must leave `num_spare` blocks free.
        """
        waiting = node_request.waiting
        if waiting is None or (offer := waiting.offer) is None:
            return False
        if waiting.is_loading:
            return True
        if self._prefill.num_needed(node_request) + num_spare > self._leases.num_free:
            return False  # without enough free blocks to start it either
        if self._leases.num_state_blocks:  # the state behind the blocks is not sent
            waiting.offer = None
            return False
        num_tokens = min(offer.num_tokens, num_cacheable(node_request))
        num_missing = num_tokens - self._leases.num_held_tokens(node_request, num_tokens)
        is_known = offer.epoch in self._under_way
        if num_missing < self._leases.block_size or len(self._under_way) >= MAX_PREFIX_FETCHES or is_known:
            waiting.offer = None
            return False
        waiting.is_loading = True
        self._begin(node_request, offer, num_tokens, now)
        return True

    def _credited(self, fetch: _PrefixFetch, descriptor: bytes) -> None:
        """Report the descriptor by which the source may send, or give up the fetch of a request that is ending."""
        if fetch.node_request.is_ending:
            self._give_up(fetch)
        elif not fetch.is_over:
            wire = attempt_of(fetch.node_request.request)
            self._decisions.report(prefix_fetch_begun=fleet_pb2.PrefixFetchBegun(attempt=wire, descriptor=descriptor))

    def _received(self, fetch: _PrefixFetch, result: Received | TransferFailed, now: float) -> None:
        """Record the end of a fetch: its blocks are not written any more."""
        del self._under_way[fetch.offer.epoch]
        num_blocks = self._adopt(fetch, result) if isinstance(result, Received) else 0
        fetch.prefix_fetch.lease.release()
        self._let_start(fetch)
        self._decisions.report(
            prefix_fetch_ended=fleet_pb2.PrefixFetchEnded(
                attempt=attempt_of(fetch.node_request.request),
                num_blocks=num_blocks,
                num_bytes=num_blocks * self._block_bytes,
                seconds=now - fetch.started_s,
            )
        )
        if fetch.cancelled is not None:
            self._decisions.report(cancelled=fleet_pb2.Cancelled(attempt=fetch.cancelled))

    def cancel_fetch(self, attempt: fleet_pb2.Attempt) -> bool:
        """Cancel the fetch with the epoch of this attempt; return False if there is none.

        The coordinator, which has cancelled it, gets an acknowledgement when its blocks are not written any more.
        """
        fetch = self._under_way.get(attempt.epoch)
        if fetch is None:
            return False
        fetch.cancelled = attempt
        self._give_up(fetch)
        return True

    def detached(self) -> None:
        """Cancel all fetches: the coordinator is gone."""
        for fetch in list(self._under_way.values()):
            self._give_up(fetch)

    def tick(self, now: float) -> None:
        """Cancel fetches that have passed their deadline; their prompts start without the blocks."""
        for fetch in list(self._under_way.values()):
            if now >= _late_at_s(fetch):
                self._give_up(fetch)

    def _begin(self, node_request: NodeRequest, offer: Offer, num_tokens: int, now: float) -> None:
        prefix_fetch = self._leases.begin_prefix_fetch(node_request, num_tokens)
        self._under_way[offer.epoch] = fetch = _PrefixFetch(node_request, offer, prefix_fetch, now)
        transfer = Transfer(on_credited=partial(self._credited, fetch), on_received=partial(self._received, fetch))
        self._transfers.begin(offer.epoch, transfer)
        self._decisions.add(FetchPrefix(offer, prefix_fetch.lease.block_ids, prefix_fetch.lease.num_cached))

    def _adopt(self, fetch: _PrefixFetch, received: Received) -> int:
        """Put received blocks into the prefix cache, and return their number; 0 if they do not match the fetch."""
        prefix_fetch = fetch.prefix_fetch
        try:
            token_ids, made = from_tail(received.tail)
        except ValueError:
            return 0
        num_blocks = sum(num_made for _, num_made in made)
        num_new = num_blocks - len(prefix_fetch.names)
        is_odd = token_ids or num_blocks > len(prefix_fetch.lease.block_ids) or num_new < 0
        if is_odd or received.num_bytes < num_new * self._block_bytes:
            return 0
        self._leases.lent(fetch.node_request, prefix_fetch, num_blocks, made)
        return num_new

    def _give_up(self, fetch: _PrefixFetch) -> None:
        if not fetch.is_over:
            fetch.is_over = True
            self._let_start(fetch)
            self._decisions.add(CancelTransfer(fetch.offer.epoch))

    def _let_start(self, fetch: _PrefixFetch) -> None:
        waiting = fetch.node_request.waiting
        if waiting is not None and waiting.offer is fetch.offer:
            waiting.is_loading, waiting.offer = False, None


def _late_at_s(fetch: _PrefixFetch) -> float:
    return fetch.started_s + fetch.offer.patience_s


MAX_SERVED: Final = 64  # at a time


class _ServeRequest(NamedTuple):
    """Hold a fetch that another node requests."""

    send_prefix: fleet_pb2.SendPrefix
    descriptor: TransferDescriptor
    names: BlockNames
    token_ids: list[int]  # tokens of the blocks that the other node has reserved


class PeerServe(KVSource):
    """Tracks remote prefix fetches from this node by other nodes, by epoch."""

    kind = "remote prefix fetch of another node"

    def __init__(
        self,
        leases: Leases,
        offload: KVOffload | None,
        decisions: Decisions,
        transfers: Transfers,
        fingerprint: Mapping[str, str],
    ) -> None:
        """Create an empty tracker. Blocks in `offload` are read back before they are sent."""
        self._leases = leases
        self._offload = offload
        self._decisions = decisions
        self._transfers = transfers
        self._fingerprint = fingerprint
        self._awaited: dict[int, _ServeRequest] = {}  # by epoch: waiting for blocks from KV offload
        self._under_way: dict[int, tuple[fleet_pb2.Attempt, BlockLease]] = {}  # by epoch

    @property
    def held(self) -> dict[int, BlockLease]:
        """Return the leases of blocks that other nodes fetch, by epoch."""
        return {epoch: lease for epoch, (_, lease) in self._under_way.items()}

    def send_prefix(self, send_prefix: fleet_pb2.SendPrefix, num_spare: int, now: float) -> None:
        """Begin to send cached blocks as this command says, by the descriptor of the fetching node, or report why not.

        Blocks in KV offload are read back first, which leaves `num_spare` blocks free. Does nothing for an epoch that
        is being served.
        """
        epoch = send_prefix.attempt.epoch
        if epoch in self._under_way or epoch in self._awaited:
            return
        try:
            request = self._checked(send_prefix)
        except TransferError as error:
            self._fail(send_prefix.attempt, str(error))
            return
        self._awaited[epoch] = request
        num_known, on_end = request.descriptor.num_cached_blocks, partial(self._send, request)
        if self._offload is None or not self._offload.fetch(
            request.names, request.token_ids, num_known, num_spare, now, on_end
        ):
            self._send(request)

    def _sent(self, epoch: int, result: Sent | TransferFailed, now: float) -> None:
        attempt, lease = self._under_way.pop(epoch)
        lease.release()
        if isinstance(result, TransferFailed):
            self._fail(attempt, result.message)

    def detached(self) -> None:
        """Cancel all fetches: the coordinator is gone."""
        self._awaited.clear()
        for epoch in self._under_way:
            self._decisions.add(CancelTransfer(epoch))

    def _checked(self, send_prefix: fleet_pb2.SendPrefix) -> _ServeRequest:
        """Return the checked fetch. Raises TransferError if nothing can be sent."""
        if len(self._under_way) + len(self._awaited) >= MAX_SERVED:
            raise TransferError(f"{MAX_SERVED} prefix fetches are under way, the limit")
        descriptor, epoch, block_size = (
            TransferDescriptor.decode(send_prefix.descriptor),
            send_prefix.attempt.epoch,
            self._leases.block_size,
        )
        if descriptor.epoch != epoch:
            raise TransferError(f"the descriptor is for epoch {descriptor.epoch}, and the prefix fetch's is {epoch}")
        names = BlockNames(root_name(self._fingerprint, send_prefix.cache_salt, send_prefix.adapter), block_size)
        token_ids = list(send_prefix.token_ids[: descriptor.num_blocks * block_size])
        return _ServeRequest(send_prefix, descriptor, names, token_ids)

    def _send(self, request: _ServeRequest) -> None:
        """Send the cached blocks; blocks of KV offload are read back by now."""
        epoch = request.send_prefix.attempt.epoch
        if self._awaited.get(epoch) is not request:
            return  # the coordinator is gone
        del self._awaited[epoch]
        lease, numerics_ids = self._leases.send_prefix(request.names, request.token_ids)
        numerics_ids = _fitting_tail(numerics_ids)
        if len(numerics_ids) <= request.descriptor.num_cached_blocks:
            lease.release()
            self._fail(request.send_prefix.attempt, "the node holds no more of the tokens than the other one")
            return
        self._under_way[epoch] = request.send_prefix.attempt, lease
        self._transfers.begin(epoch, Transfer(on_sent=partial(self._sent, epoch)))
        block_ids = lease.block_ids[: len(numerics_ids)]
        self._decisions.add(Send(epoch, request.send_prefix.descriptor, block_ids))
        self._decisions.add(FinishSend(epoch, block_ids, to_tail([], numerics_ids)))

    def _fail(self, attempt: fleet_pb2.Attempt, message: str) -> None:
        self._decisions.report(
            failed=fleet_pb2.Failed(attempt=attempt, reason=reasons.TRANSFER_FAILED, message=message)
        )


def _fitting_tail(numerics_ids: list[bytes]) -> list[bytes]:
    """Return the longest prefix of numerics ids that fits in a tail."""
    runs = list(accumulate(len(list(run)) for _, run in groupby(numerics_ids)))
    return numerics_ids[: runs[MAX_NUMERICS_RUNS - 1]] if len(runs) > MAX_NUMERICS_RUNS else numerics_ids
