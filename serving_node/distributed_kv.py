"""Move the oldest tiles of requests that are longer than this node's pool to other nodes (distributed KV). Pure.

Such a request comes with the nodes that may hold its KV, its *hosts*. Its blocks have no hashes, since not all of them
are here; it does not migrate and has no draft tokens. A tile that has left is final and never comes back. If a KV
holder is lost, the attempt is lost and begins again elsewhere.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from serving_core import reasons
from serving_core.node.leases import Leases
from serving_core.node.requests import Distributed, NodeRequest, NodeRequests
from serving_node.claims import HOLD_S, LAPSE_S, Claim
from serving_node.decisions import CloseRemoteKV, OpenRemoteKV
from serving_node.outputs import Endings

RETRY_S: Final = 0.2
PATIENCE_S: Final = 30.0  # total wait for hosts without room, until one has room


class Opened(Protocol):
    """Describe tiles that are held on another node."""

    @property
    def num_tiles(self) -> int: ...

    @property
    def is_recalled(self) -> bool:
        """Return whether the KV holder has recalled the blocks."""


class DistributedKV:
    """Track the distributed KV of one node's requests."""

    def __init__(
        self, node_requests: NodeRequests, leases: Leases, endings: Endings, claim: Claim, tile_tokens: int
    ) -> None:
        self._node_requests, self._leases, self._endings, self._claim = node_requests, leases, endings, claim
        self._tile_tokens = tile_tokens
        self._held_up: dict[
            NodeRequest, tuple[float, float]
        ] = {}  # time of the next attempt, and time up to which the wait is counted
        self.num_opened = 0
        leases.on_remote_kv_left = self._close

    @property
    def wake_at_s(self) -> float | None:
        """Return when the next `tick` is due, or None."""
        return min((retry_s for each, (retry_s, _) in self._held_up.items() if not each.is_busy), default=None)

    def fit(self, node_request: NodeRequest, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens have blocks, growing the lease.

        If not all have, the oldest tiles of the request are being moved.
        """
        leases = self._leases
        if node_request.is_moving or node_request.in_step:
            return 0
        num_missing = leases.num_missing(node_request, node_request.num_computed + num_tokens)
        num_free = leases.num_free - self._claim.num_kept_from(node_request.age)
        if (num_got := min(num_missing, num_free)) > 0:
            leases.grow(node_request, num_got)
        if num_got >= num_missing:
            self._held_up.pop(node_request, None)
        elif node_request not in self._held_up:
            self._begin(node_request)
            if node_request.is_moving:
                return 0
        return min(num_tokens, leases.num_tokens_held(node_request) - node_request.num_computed)

    def makes_room_for(self, node_request: NodeRequest) -> bool:
        """Return whether hosts may still make room for a request.

        False once the request has waited so long that every request that can be preempted would have been, which
        happens between steps.
        """
        if node_request not in self._held_up:
            return False
        distributed = _distributed_of(node_request)
        return distributed.waited_s < HOLD_S + LAPSE_S + distributed.longest_step_s

    def youngest_held_up(self, age: int) -> NodeRequest | None:
        """Return the youngest request younger than `age` whose hosts had no room at the last attempt, or None."""
        waiting = [each for each in self._held_up if each.age > age and each.lease is not None and not each.is_busy]
        return max((each for each in waiting if not each.is_ending), key=lambda each: each.age, default=None)

    def opened(self, node_request: NodeRequest, remote_kv: Opened | None, now: float) -> None:
        """Record the end of an `OpenRemoteKV`; `remote KV` is None if no host has room."""
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
        """Ask hosts again that had no room."""
        for node_request in list(self._held_up):
            self._try_again(node_request, now)

    def is_recalled(self, node_request: NodeRequest) -> bool:
        """Return whether a host has recalled blocks of the request, which then begins again."""
        return any(remote_kv.is_recalled for remote_kv in node_request.request.remote_kvs)

    def check(self, node_request: NodeRequest, now: float, step_s: float) -> None:
        """Fail a request that lost remote blocks in a step, and ask hosts again if an attempt is due."""
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
        """Send the full tiles of a request to a host, if it has any."""
        assert node_request.lease is not None
        each = self._tile_tokens // self._leases.block_size
        num_tiles = node_request.num_computed // self._tile_tokens - node_request.num_remote_blocks // each
        if num_tiles and not node_request.is_busy:
            _distributed_of(node_request).is_moving, is_again = True, node_request in self._held_up
            self._endings.decide(OpenRemoteKV(node_request, node_request.lease.block_ids[: num_tiles * each], is_again))

    def _hold_up(self, node_request: NodeRequest, now: float) -> None:
        """Note that hosts have no room. The first time the request asks again at once, so that hosts make room."""
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
        self._endings.decide(CloseRemoteKV(remote_kvs))


def _distributed_of(node_request: NodeRequest) -> Distributed:
    assert node_request.distributed is not None
    return node_request.distributed
