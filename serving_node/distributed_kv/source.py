"""Move the oldest tiles of requests that are longer than this node's pool to other nodes (distributed KV). Pure.

Such a request comes with the nodes that may hold its KV, its *KV holders*. Its blocks have no hashes, since not all of
them are here; it does not migrate and has no draft tokens. A tile that has left is final and never comes back. If a KV
holder is lost, the attempt is lost and begins again elsewhere."""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from decode_node.preemption import Preemption
from kv_transfer.distributed_kv.wire import TileRequest
from protos import inference_pb2
from serving_core import reasons
from serving_core.node.blocks import BlockAllocator, BlockLease
from serving_core.node.leases import Leases
from serving_core.node.requests import Distributed, NodeRequest, NodeRequests
from serving_node.admission import Admission
from serving_node.decisions import CloseRemoteKV, OpenRemoteKV, RevokeRemoteKV
from serving_node.distributed_kv.holder import HOLD_S, LAPSE_S, HeldKV, TileReservation
from serving_node.sources import StepSource
from serving_node.transfers import Endings

RETRY_S: Final = 0.2
PATIENCE_S: Final = 30.0  # total wait for holders without room, until one has room


class Opened(Protocol):
    """Tiles of a request of this node that another node holds."""

    @property
    def num_tiles(self) -> int: ...

    @property
    def is_revoked(self) -> bool:
        """Return whether the KV holder has revoked the blocks."""


class DistributedKV(StepSource):
    """Tracks the distributed KV of one node: tiles of its requests on other nodes, and tiles of theirs here."""

    kind = "distributed KV"

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        allocator: BlockAllocator,
        endings: Endings,
        tile_tokens: int,
    ) -> None:
        """Create an empty tracker for tiles of `tile_tokens` tokens. Call `join` before anything else."""
        self._node_requests, self._leases = node_requests, leases
        self._endings, self._decisions = endings, endings.decisions
        self._tile_tokens = tile_tokens
        self.held_kv = HeldKV(allocator, leases.block_size, tile_tokens, self._revoke)
        self._reservation = TileReservation(node_requests, leases, self.held_kv)
        self._revoked_for: set[NodeRequest] = set()  # tiles of other nodes were revoked for them
        self._held_up: dict[
            NodeRequest, tuple[float, float]
        ] = {}  # time of the next attempt, and time up to which the wait is counted
        self.num_opened = 0
        leases.on_remote_kv_left = self._close

    def join(self, admission: Admission, preemption: Preemption) -> None:
        """Connect the tracker to `admission`, which keeps blocks free for other nodes, and to `preemption`."""
        self._admission, self._preemption = admission, preemption
        admission.reserve = self._reservation

    @property
    def held(self) -> dict[int, BlockLease]:
        """Return the leases of blocks that hold KV of other nodes' requests, by the number of the connection."""
        return self.held_kv.held

    @property
    def is_idle(self) -> bool:
        """Return whether no KV of other nodes' requests is here."""
        return not self.held_kv.num_blocks

    @property
    def wake_at_s(self) -> float | None:
        """Return the time at which the next `tick` is due; None if nothing waits."""
        wakes = [retry_s for each, (retry_s, _) in self._held_up.items() if not each.is_busy]
        if self._reservation.wake_at_s is not None:
            wakes.append(self._reservation.wake_at_s)
        return min(wakes, default=None)

    def fill(self, load: inference_pb2.NodeLoad) -> None:
        """Set the fields of `load` that count tiles of other nodes here and tiles that were placed on other nodes."""
        load.num_remote_kv_blocks, load.num_remote_kvs_revoked = self.held_kv.num_blocks, self.held_kv.num_revoked
        load.num_remote_kvs = self.num_opened

    # ---- tiles of other nodes ----

    def lease_remote_kv(self, number: int, most_tiles: int, tile_request: TileRequest, now: float) -> list[int]:
        """Lease blocks for at most `most_tiles` tiles of another node's request; return them, perhaps none.

        `number` is that of the connection. A request that asks again and gets none has blocks reserved for it.
        """
        if not self.may_hold(tile_request.age):
            return []
        block_ids = self._lease(number, most_tiles, tile_request.age)
        if block_ids:
            self._reservation.serve(tile_request.age, now, tile_request.step_s)
        elif tile_request.is_again and self.held_kv.may_grow_for(tile_request.age):
            self._reservation.put(tile_request.age, now, tile_request.step_s)
        return block_ids

    def may_hold(self, age: int) -> bool:
        """Return whether tiles of a remote request of this age may be placed here.

        False while requests are preempted for an older one, or while a request is here for which tiles were revoked:
        they would be revoked again, with all their computation.
        """
        self._revoked_for.intersection_update(self._node_requests)
        return not self._admission.is_behind(age) and not any(each.age < age for each in self._revoked_for)

    def _lease(self, number: int, most_tiles: int, age: int) -> list[int]:
        """Lease blocks for tiles of another node's request.

        Younger requests of this node that wait for remote blocks themselves are preempted, so that two nodes do not
        wait for each other. If an older remote request waits for blocks, only the surplus is given.
        """
        is_first = age <= self._reservation.age
        block_ids = self.held_kv.lease(number, most_tiles, age, num_spare=0 if is_first else self.held_kv.blocks_each)
        while not block_ids and is_first and self.held_kv.may_grow:
            if (younger := self._youngest_held_up(age)) is None:
                break
            self._preemption.preempt(younger)
            block_ids = self.held_kv.lease(number, most_tiles, age)
        return block_ids

    def _revoke(self, number: int) -> None:
        self._decisions.add(RevokeRemoteKV(number))

    # ---- steps ----

    def before_step(self) -> None:
        """Preempt requests and revoke tiles of other nodes, so that the oldest waiting remote request gets blocks."""
        for victim in self._reservation.victims():
            self._preemption.preempt(victim)
        if self._reservation.revokes():
            self.held_kv.revoke()

    def after_step(self, node_requests: list[NodeRequest], step_s: float, now: float) -> None:
        """Handle failures and ends of remote KV after a step of these requests that took `step_s` seconds.

        Requests whose tiles were revoked begin again, and requests whose tiles are lost fail. Holders that had no room
        are asked again where that is due.
        """
        for node_request in node_requests:
            if any(remote_kv.is_revoked for remote_kv in node_request.request.remote_kvs):
                self._preemption.preempt(node_request)
            self._check(node_request, now, step_s)

    def unblock(self) -> bool:
        """Fail a request that lacks blocks because this node holds tiles of older requests; return whether one failed.

        Another node may have enough blocks. If KV of younger requests can be revoked instead, it is, and the result is
        False.
        """
        node_request = self.stranded()
        if node_request is None or self.revoke(node_request):
            return False
        message = f"{self.held_kv.num_blocks} blocks of this node hold parts of other nodes' requests: too few are left"
        self._endings.fail(node_request, reasons.QUEUE_FULL, message)
        return True

    def stranded(self) -> NodeRequest | None:
        """Return the oldest request that cannot get enough blocks beside the tiles of other nodes, or None.

        For a node that has nothing to compute and nothing to preempt.
        """
        held_kv, admission = self.held_kv, self._admission
        if not held_kv.num_blocks or held_kv.is_revoking or admission.comes_any_free_soon:
            return None
        num_left = self._leases.num_blocks - held_kv.num_blocks
        lacking = [each for each in admission.lacking() if not self._makes_room_for(each)]
        return next((each for each in lacking if admission.num_blocks_for(each) > num_left), None)

    def revoke(self, node_request: NodeRequest) -> bool:
        """Revoke tiles of the youngest remote requests for a stranded request; return whether that was done.

        The blocks come free soon, for this request. False, with nothing revoked, if that would not be enough or the KV
        is of older requests.
        """
        num_left = self._leases.num_blocks - self.held_kv.num_firm(node_request.age)
        if self._admission.num_blocks_for(node_request) > num_left:
            return False
        self._admission.prefer(node_request)
        self._revoked_for.add(node_request)
        self.held_kv.revoke()
        return True

    # ---- tiles on other nodes ----

    def fit(self, node_request: NodeRequest, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens of a request with distributed KV have blocks, after growing its lease.

        If not all have, its oldest tiles are sent to another node; 0 while that happens.
        """
        leases = self._leases
        if node_request.is_moving or node_request.in_step:
            return 0
        num_missing = leases.num_missing(node_request, node_request.num_computed + num_tokens)
        num_free = leases.num_free - self._reservation.num_kept_from(node_request.age)
        if (num_got := min(num_missing, num_free)) > 0:
            leases.grow(node_request, num_got)
        if num_got >= num_missing:
            self._held_up.pop(node_request, None)
        elif node_request not in self._held_up:
            self._begin(node_request)
            if node_request.is_moving:
                return 0
        return min(num_tokens, leases.num_tokens_held(node_request) - node_request.num_computed)

    def _makes_room_for(self, node_request: NodeRequest) -> bool:
        """Return whether holders may still make room for a request.

        False once the request has waited so long that every request that can be preempted would have been, which
        happens between steps.
        """
        if node_request not in self._held_up:
            return False
        distributed = _distributed_of(node_request)
        return distributed.waited_s < HOLD_S + LAPSE_S + distributed.longest_step_s

    def _youngest_held_up(self, age: int) -> NodeRequest | None:
        """Return the youngest request younger than `age` whose holders had no room at the last attempt, or None."""
        waiting = [each for each in self._held_up if each.age > age and each.lease is not None and not each.is_busy]
        return max((each for each in waiting if not each.is_ending), key=lambda each: each.age, default=None)

    def opened(self, node_request: NodeRequest, remote_kv: Opened | None, now: float) -> None:
        """Record the end of an `OpenRemoteKV`; `remote_kv` is None if no holder has room.

        On success the blocks of the sent tiles are freed here.
        """
        distributed = _distributed_of(node_request)
        distributed.is_moving = False
        if remote_kv is not None:
            self.num_opened += 1
            node_request.request.remote_kvs = (*node_request.request.remote_kvs, remote_kv)
            self._leases.shed(node_request, remote_kv.num_tiles * self._tile_tokens // self._leases.block_size)
            self._held_up.pop(node_request, None)
            distributed.waited_s = 0.0
        else:
            self._hold_up(node_request, now)
        self._endings.settle(node_request)

    def tick(self, now: float) -> None:
        """Ask holders again that had no room, where that is due, and fail a request that has waited over PATIENCE_S.

        Also ends the reservation of another node's request that asks no more.
        """
        self._reservation.tick(now)
        for node_request in list(self._held_up):
            self._try_again(node_request, now)

    def _check(self, node_request: NodeRequest, now: float, step_s: float) -> None:
        """Fail a request that lost remote blocks in a step, and ask holders again if an attempt is due."""
        if (distributed := node_request.distributed) is None:
            return
        distributed.longest_step_s = max(distributed.longest_step_s, step_s)
        if error := node_request.request.remote_kv_error:
            message = f"blocks of the request on another node are lost: {error}"
            self._endings.fail(node_request, reasons.TRANSFER_FAILED, message)
        if node_request in self._held_up:
            self._try_again(node_request, now)

    def _try_again(self, node_request: NodeRequest, now: float) -> None:
        if node_request not in self._node_requests or node_request.is_ending or node_request.lease is None:
            del self._held_up[node_request]
        elif now >= self._held_up[node_request][0] and not node_request.is_busy:
            self._hold_up(node_request, now)
            if node_request in self._held_up:
                self._begin(node_request)

    def _begin(self, node_request: NodeRequest) -> None:
        """Send the full tiles of a request to a holder, if it has any."""
        assert node_request.lease is not None
        each = self._tile_tokens // self._leases.block_size
        num_tiles = node_request.num_computed // self._tile_tokens - node_request.num_remote_blocks // each
        if num_tiles and not node_request.is_busy:
            _distributed_of(node_request).is_moving, is_again = True, node_request in self._held_up
            self._decisions.add(OpenRemoteKV(node_request, node_request.lease.block_ids[: num_tiles * each], is_again))

    def _hold_up(self, node_request: NodeRequest, now: float) -> None:
        """Note that holders have no room. The first time the request asks again at once, so that holders make room."""
        retry_s, noted_s = now, now
        if node_request in self._held_up:
            retry_s, (_, noted_s) = now + RETRY_S, self._held_up[node_request]
        self._held_up[node_request] = retry_s, now
        distributed = _distributed_of(node_request)
        distributed.waited_s += now - noted_s
        if distributed.waited_s > PATIENCE_S:
            del self._held_up[node_request]
            message = f"no other node had room for blocks of the request for {PATIENCE_S:g} s"
            self._endings.fail(node_request, reasons.QUEUE_FULL, message)

    def _close(self, remote_kvs: Sequence[Any]) -> None:
        self._decisions.add(CloseRemoteKV(remote_kvs))


def _distributed_of(node_request: NodeRequest) -> Distributed:
    assert node_request.distributed is not None
    return node_request.distributed
