"""Manage the blocks of a node's requests, shared by block hash. Pure.

A model with a fixed state can continue a cached prefix only behind a checkpoint of the state at its end. A checkpoint
is the request's own state blocks, published under hashes derived from the last KV block's; the request goes on in new
ones, so nothing is copied. A prompt stops for a checkpoint behind its last full block, and where the KV blocks that it
found in the cache end without one: there several prompts diverge. KV blocks are published with their checkpoint.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from serving_core.layout import KVLayout
from serving_core.node.blocks import BlockAllocator, BlockLease
from serving_core.node.prefix import (
    CHUNK,
    EITHER,
    MAX_NUMERICS_IDS,
    MIXED_NUMERICS,
    NUMERICS_BYTES,
    STEP,
    BlockNames,
    num_alike,
    state_names,
)
from serving_core.node.requests import NodeRequest, RequestState
from serving_core.requests import Work

MAX_CHECKPOINT_SHARE: Final = 1 / 4  # of the pool's blocks: then the least recently used checkpoint is dropped
MIN_CHECKPOINT_TOKENS: Final = 64  # that a checkpoint saves, beyond an earlier one


class PrefixFetch(NamedTuple):
    """Blocks of a remote prefix fetch: the first ones are in the pool, the others are still to come."""

    lease: BlockLease
    names: list[bytes]  # block hashes of the first blocks
    numerics_ids: list[bytes]  # numerics ids of the same blocks


class Leases:
    """Take, grow, publish and give back the leases of requests on one pool."""

    def __init__(
        self, allocator: BlockAllocator, layout: KVLayout, numerics: bytes, *, is_batch_invariant: bool
    ) -> None:
        """Manage the leases of one allocator, whose blocks have this layout.

        `numerics` is the node's (serving_core/node/prefix.py); `is_batch_invariant` says whether prefill chunks and
        decode steps give the same bits.
        """
        self._allocator = allocator
        self._layout = layout
        self.num_state_blocks: Final = layout.num_state_blocks  # that lead the blocks of a request
        self._numerics = numerics
        self._of_chunk, self._of_step = (numerics + (EITHER if is_batch_invariant else kind) for kind in (CHUNK, STEP))
        self.on_remote_kv_left: Callable[[Sequence[Any]], None] | None = None
        """Called with the remote KV of a request that has given its blocks back."""
        self._numerics_ids = [*dict.fromkeys((self._of_chunk, self._of_step)), MIXED_NUMERICS]
        self._checkpoints: OrderedDict[bytes, None] = OrderedDict()  # by the hash of the last KV block; perhaps evicted
        num_checkpoint_blocks = int(allocator.num_blocks * MAX_CHECKPOINT_SHARE)
        self._max_checkpoints = num_checkpoint_blocks // self.num_state_blocks if self.num_state_blocks else 0

    @property
    def numerics_ids(self) -> list[bytes]:
        """Return the numerics ids of all blocks that the pool may hold, in search order.

        These are this node's own, then those of nodes that sent blocks, then MIXED_NUMERICS.
        """
        return self._numerics_ids

    @property
    def num_free(self) -> int:
        """Return the number of blocks that can be leased."""
        return self._allocator.num_free

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the whole pool."""
        return self._allocator.num_blocks

    @property
    def block_size(self) -> int:
        """Return the number of tokens in one block."""
        return self._layout.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return self._layout.num_blocks_for(num_tokens)

    def num_needed(self, node_request: NodeRequest, num_tokens: int, *, num_cacheable: int) -> int:
        """Return by how much `take` with the same arguments would lower num_free."""
        names, _ = self._find(node_request, num_cacheable)
        return self._num_needed(self.blocks_for(num_tokens), names, self._state_names(names))

    def take(self, node_request: NodeRequest, num_tokens: int, *, num_cacheable: int, num_spare: int) -> bool:
        """Lease blocks for `num_tokens` tokens of a request if `num_spare` blocks stay free; return whether it did.

        Cached blocks of the leading `num_cacheable` tokens are shared, and their tokens count as computed.
        """
        names, numerics_ids = self._find(node_request, num_cacheable)
        num_blocks, states = self.blocks_for(num_tokens), self._state_names(names)
        if self._num_needed(num_blocks, names, states) + num_spare > self._allocator.num_free:
            return False
        if self.num_state_blocks:
            node_request.checkpoint_ends = self._checkpoint_ends(node_request, len(names), num_cacheable)
        if states:  # before other blocks, which might evict them
            node_request.state_source = self._allocator.allocate(self.num_state_blocks, states)
            self._checkpoints.move_to_end(names[-1])
        node_request.lease = self._allocator.allocate(num_blocks, names, self.num_state_blocks)
        node_request.names.begin(names, numerics_ids)
        if node_request.num_found_blocks is None:
            node_request.num_found_blocks = node_request.num_cached_blocks
        node_request.num_computed = node_request.num_cached_blocks * self._layout.block_size
        return True

    def num_missing(self, node_request: NodeRequest, num_tokens: int) -> int:
        """Return how many blocks the request lacks for `num_tokens` tokens; blocks on KV holders are not lacking."""
        return max(0, self._layout.num_blocks_for(num_tokens) - self._num_held(node_request))

    def num_tokens_held(self, node_request: NodeRequest) -> int:
        """Return how many tokens the request has blocks for, on this node and on KV holders."""
        return (self._num_held(node_request) - self.num_state_blocks) * self._layout.block_size

    def _num_held(self, node_request: NodeRequest) -> int:
        lease, distributed = node_request.lease, node_request.distributed
        assert lease is not None
        return len(lease.block_ids) if distributed is None else distributed.num_remote_blocks + len(lease.block_ids)

    def shed(self, node_request: NodeRequest, num_blocks: int) -> None:
        """Free the leading `num_blocks` blocks of a request, whose KV KV holders now have (distributed KV)."""
        assert node_request.lease is not None
        assert node_request.distributed is not None
        node_request.lease.shed(num_blocks)
        node_request.distributed.num_remote_blocks += num_blocks

    def trim(self, node_request: NodeRequest, num_blocks: int) -> None:
        """Free the last `num_blocks` blocks of a request, none of which was published (asserted).

        Tokens without a block no longer count as computed.
        """
        assert node_request.lease is not None
        node_request.lease.trim(num_blocks)
        node_request.num_computed = min(node_request.num_computed, self.num_tokens_held(node_request))

    def grow(self, node_request: NodeRequest, num_blocks: int) -> None:
        """Add `num_blocks` blocks to a request's lease, all or none. Raises OutOfBlocks when too few are free."""
        assert node_request.lease is not None
        node_request.lease.grow(num_blocks)

    def publish_all(self, node_requests: Iterable[NodeRequest]) -> None:
        """Publish the full blocks of these requests, as `publish` does.

        Costs little for a request without a new full block.
        """
        block_size = self._layout.block_size
        for node_request in node_requests:
            lease = node_request.lease
            if node_request.state_source is not None:  # the step has read it
                node_request.state_source.release()
                node_request.state_source = None
            if lease is None or node_request.num_computed // block_size > lease.num_published:
                self.publish(node_request)

    def publish(self, node_request: NodeRequest) -> None:
        """Publish the request's blocks that are full of computed KV, so that other requests can share them.

        Blocks that became full since the last call, and were not passed to `copied`, were computed by this node: in
        prefill chunks or decode steps, by the request's state. With a fixed state, publishes only behind the tokens of
        a checkpoint. Does nothing without caching, and for distributed KV.
        """
        lease = node_request.lease
        assert lease is not None
        num_full = node_request.num_computed // self._layout.block_size
        if num_full <= lease.num_published or not self._allocator.caching or node_request.distributed is not None:
            return
        if not self.num_state_blocks:
            self._publish(node_request, lease, num_full)
        elif node_request.num_computed in node_request.checkpoint_ends:
            self._publish(node_request, lease, num_full)
            self._take_checkpoint(node_request, lease)

    def _publish(self, node_request: NodeRequest, lease: BlockLease, num_full: int) -> None:
        names = node_request.names
        if (num_new := num_full - len(names.names)) > 0:
            others = [self._own_numerics_id(node_request)] * (num_new - 1)
            names.add(node_request.request.token_ids, self._numerics_id(node_request), *others)
        lease.publish(names.names)

    def is_checkpoint_due(self, node_request: NodeRequest, num_computed: int) -> bool:
        """Return whether a sequence is to take a checkpoint of its fixed state behind `num_computed` tokens, before the
        step that computes the next ones.
        """
        if not self.num_state_blocks or num_computed % self._layout.block_size or not self._allocator.caching:
            return False
        is_here = node_request.state is RequestState.RUNNING and node_request.migration is None
        last = (node_request.num_cached_blocks * self._layout.block_size, *node_request.checkpoint_ends)[-1]
        return is_here and node_request.distributed is None and num_computed - last >= MIN_CHECKPOINT_TOKENS

    def take_checkpoint(self, node_request: NodeRequest, work: Work) -> Work:
        """Take the checkpoint that is due in place of the sequence's last one; return `work`, which reads from it.

        A checkpoint of the prompt stays. `work` is the sequence's part of the next step, and must become part of it:
        only that step fills the state blocks that the sequence has from now on.
        """
        lease, ends, size = node_request.lease, node_request.checkpoint_ends, self._layout.block_size
        assert lease is not None
        self._publish(node_request, lease, work.start // size)
        node_request.checkpoint_ends = (work.start,)
        if ends and ends[-1] >= node_request.request.num_prompt_tokens:
            last = node_request.names.names[ends[-1] // size - 1]
            self._checkpoints.pop(last, None)
            self._allocator.drop(self._state_names([last]))
        self._take_checkpoint(node_request, lease)
        source = node_request.state_source
        return work if source is None else work._replace(state_ids=source.block_ids)

    def _take_checkpoint(self, node_request: NodeRequest, lease: BlockLease) -> None:
        """Publish the state behind the request's full blocks, unless it is cached or blocks are short."""
        name = node_request.names.names[-1]
        is_short = self._allocator.num_free < 2 * self.num_state_blocks
        if is_short or not self._max_checkpoints or self._num_continuable([name]):
            return
        self._allocator.drop(self._state_names([name]))  # what eviction has left of an earlier one
        while len(self._checkpoints) >= self._max_checkpoints:
            oldest, _ = self._checkpoints.popitem(last=False)
            self._allocator.drop(self._state_names([oldest]))
        node_request.state_source = lease.publish_private(self._state_names([name]))
        self._checkpoints[name] = None
        self._checkpoints.move_to_end(name)

    def _checkpoint_ends(self, node_request: NodeRequest, num_found: int, num_cacheable: int) -> tuple[int, ...]:
        """Return the tokens behind which a request with `num_found` cached blocks takes checkpoints."""
        is_elsewhere = node_request.incoming is not None or node_request.distributed is not None
        if is_elsewhere or not self._allocator.caching:
            return ()
        num_cacheable = _num_before_last(node_request, num_cacheable)
        known, _ = self._find_named(node_request.names, node_request.request.token_ids, num_cacheable)
        ends, size = list[int](), self._layout.block_size
        for end in (len(known) * size, self._full_blocks(num_cacheable) * size):
            if end - (ends[-1] if ends else num_found * size) >= MIN_CHECKPOINT_TOKENS:
                ends.append(end)
        return tuple(ends)

    def copied(self, node_request: NodeRequest, made: Sequence[tuple[bytes, int]]) -> None:
        """Record that the KV of a request's tokens has arrived from another node, behind the blocks found here.

        `made` has the numerics ids of all blocks on that node, as runs (numerics id, number of blocks). Copies keep
        their hashes, unless other blocks precede them here or `made` does not cover them.
        """
        if not self._allocator.caching:
            return
        num_tokens = node_request.num_computed
        names, num_full = node_request.names, self._full_blocks(num_tokens)
        numerics_ids = self._numerics_ids_there(names.numerics_ids, self.blocks_for(num_tokens), made)
        names.add(node_request.request.token_ids, *numerics_ids[len(names.numerics_ids) : num_full])
        names.begun_by = b"".join(numerics_ids[num_full:])

    def _numerics_ids_there(
        self, found: list[bytes], num_blocks: int, made: Sequence[tuple[bytes, int]]
    ) -> list[bytes]:
        """Return the numerics ids of num_blocks blocks copied behind the blocks `found` here: from `made`, or
        MIXED_NUMERICS.
        """
        is_told = sum(num_made for _, num_made in made) == num_blocks
        numerics_ids = [numerics_id for numerics_id, num_made in made for _ in range(num_made)] if is_told else []
        is_alike = is_told and numerics_ids[: len(found)] == found
        return numerics_ids if is_alike and self._know(numerics_ids) else [MIXED_NUMERICS] * num_blocks

    def numerics_ids_of(self, node_request: NodeRequest) -> list[bytes]:
        """Return the numerics ids of the request's blocks with computed KV; none if the blocks have no hashes."""
        if self.num_state_blocks:
            return []
        numerics_ids = list(node_request.names.numerics_ids)
        if self._allocator.caching and node_request.num_computed % self._layout.block_size:
            numerics_ids.append(self._numerics_id(node_request))
        return numerics_ids

    def _numerics_id(self, node_request: NodeRequest) -> bytes:
        """Return the numerics id of the first block that has no hash yet."""
        begun_by = node_request.names.begun_by
        if begun_by and begun_by[:NUMERICS_BYTES] != self._numerics:
            return MIXED_NUMERICS
        return self._own_numerics_id(node_request)

    def _own_numerics_id(self, node_request: NodeRequest) -> bytes:
        """Return the numerics id of what this node computes for the request in its present state."""
        return (
            self._of_chunk if node_request.state in (RequestState.PREFILLING, RequestState.PREFILLED) else self._of_step
        )

    def _know(self, numerics_ids: Sequence[bytes]) -> bool:
        """Search for blocks of these numerics ids from now on; return whether there is room for them."""
        new = [numerics_id for numerics_id in dict.fromkeys(numerics_ids) if numerics_id not in self._numerics_ids]
        if len(self._numerics_ids) + len(new) > MAX_NUMERICS_IDS:
            return False
        self._numerics_ids[-1:-1] = new
        return True

    def final_blocks(self, node_request: NodeRequest) -> list[int]:
        """Return the request's leading blocks that no later step writes to; none for a model with a fixed state."""
        if node_request.lease is None or self._layout.state_bytes:
            return []
        return node_request.lease.block_ids[: self._full_blocks(node_request.num_computed)]

    def filled_blocks(self, node_request: NodeRequest) -> list[int]:
        """Return the request's blocks that hold any KV."""
        assert node_request.lease is not None
        return node_request.lease.block_ids[: self.blocks_for(node_request.num_computed)]

    def give_back(self, node_request: NodeRequest) -> None:
        """Release the request's lease, if any; published blocks stay cached. No token counts as computed afterwards.

        KV of the request that other processes (KV holders) keep is given back too.
        """
        if node_request.lease is not None:
            node_request.lease.release()
            node_request.lease = None
            if node_request.state_source is not None:
                node_request.state_source.release()
                node_request.state_source = None
            node_request.names.begin([], [])
            node_request.num_computed = 0
            if node_request.distributed is not None:
                node_request.distributed.num_remote_blocks = 0
            if node_request.request.remote_kvs and self.on_remote_kv_left is not None:
                self.on_remote_kv_left(node_request.request.remote_kvs)
                node_request.request.remote_kvs, node_request.request.remote_kv_error = (), ""

    def num_cached_tokens(self, node_request: NodeRequest) -> int:
        """Return the number of tokens whose KV was cached when the request first got blocks."""
        return (node_request.num_found_blocks or 0) * self._layout.block_size

    def may_share(self, node_request: NodeRequest, other: NodeRequest) -> bool:
        """Return whether one request finds the blocks that the other publishes for the same tokens."""
        return (
            self._allocator.caching
            and not self.num_state_blocks  # whether a checkpoint will be where they diverge is not known
            and node_request.distributed is other.distributed is None
            and node_request.names.root == other.names.root
        )

    def blocks_found(self, node_request: NodeRequest, num_cacheable: int) -> list[int]:
        """Return the full blocks of the request's leading `num_cacheable` tokens that the pool holds."""
        return [self._allocator.blocks_by_name[name] for name in self._find(node_request, num_cacheable)[0]]

    def num_held_tokens(self, node_request: NodeRequest, num_cacheable: int) -> int:
        """Return how many of the request's leading `num_cacheable` tokens lie in full blocks that the pool holds."""
        return len(self._find(node_request, num_cacheable)[0]) * self._layout.block_size

    def names_in(
        self, names: BlockNames, token_ids: Sequence[int], num_tokens: int, is_held: Callable[[bytes], bool]
    ) -> list[bytes]:
        """Return the hashes of the leading full blocks of the first `num_tokens` tokens for which `is_held` is true.

        `names` computes the hashes.
        """
        return names.find(token_ids, self._full_blocks(num_tokens), self._numerics_ids, is_held)[0]

    def send_prefix(self, names: BlockNames, token_ids: Sequence[int]) -> tuple[BlockLease, list[bytes]]:
        """Lease the leading full blocks of these tokens that the pool has, to send them in a remote prefix fetch.

        `names` computes the hashes. Returns the lease and the blocks' numerics ids.
        """
        found, numerics_ids = self._find_named(names, token_ids, len(token_ids))
        return self._allocator.allocate(len(found), found), numerics_ids

    def begin_prefix_fetch(self, node_request: NodeRequest, num_tokens: int) -> PrefixFetch:
        """Lease blocks for the leading full blocks of `num_tokens` tokens: the cached ones, and empty ones for a fetch.

        Raises OutOfBlocks when too few are free.
        """
        names, numerics_ids = self._find(node_request, num_tokens)
        return PrefixFetch(self._allocator.allocate(self._full_blocks(num_tokens), names), names, numerics_ids)

    def lent(
        self, node_request: NodeRequest, prefix_fetch: PrefixFetch, num_blocks: int, made: Sequence[tuple[bytes, int]]
    ) -> None:
        """Record that the leading `num_blocks` blocks of a remote prefix fetch have arrived, and publish them.

        `made` is as for `copied`. The prompt then finds them in the pool, unless it has begun without them.
        """
        names = node_request.names.of_others()
        names.begin(list(prefix_fetch.names), list(prefix_fetch.numerics_ids))
        names.add(
            node_request.request.token_ids,
            *self._numerics_ids_there(prefix_fetch.numerics_ids, num_blocks, made)[len(prefix_fetch.numerics_ids) :],
        )
        prefix_fetch.lease.publish(names.names)

    def _find(self, node_request: NodeRequest, num_tokens: int) -> tuple[list[bytes], list[bytes]]:
        """Return hashes and numerics ids of the leading full blocks of num_tokens tokens that the pool holds.

        Returns none if some blocks are to go to remote KV. For a migrating request, returns only blocks with the bits
        that its tokens were generated from. With a fixed state, returns blocks that end at a checkpoint, and none for a
        request whose KV and state come from another node, or that fills the pool by itself.
        """
        if node_request.distributed is not None:
            return [], []
        token_ids = node_request.request.token_ids
        if self.num_state_blocks:
            num_blocks = self.blocks_for(len(token_ids) + 1) + self.num_state_blocks
            if node_request.incoming is not None or num_blocks > self._allocator.num_blocks:
                return [], []
            num_tokens = _num_before_last(node_request, num_tokens)
        names, numerics_ids = self._find_named(node_request.names, token_ids, num_tokens)
        num_found = num_alike(numerics_ids) if node_request.is_arriving else len(numerics_ids)
        if self.num_state_blocks:
            num_found = self._num_continuable(names[:num_found])
        return names[:num_found], numerics_ids[:num_found]

    def _num_continuable(self, names: Sequence[bytes]) -> int:
        """Return how many of the leading blocks end at a checkpoint of the fixed state; 0 without one."""
        is_held = self._allocator.blocks_by_name.__contains__
        for index in range(len(names) - 1, -1, -1):
            if names[index] in self._checkpoints and all(map(is_held, self._state_names([names[index]]))):
                return index + 1
        return 0

    def _state_names(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the hashes of the checkpoint behind these blocks; none without blocks or without a fixed state."""
        return state_names(names[-1], self.num_state_blocks) if names and self.num_state_blocks else []

    def _num_needed(self, num_blocks: int, names: Sequence[bytes], states: Sequence[bytes]) -> int:
        return self._allocator.num_needed(num_blocks, names) + self._allocator.num_needed(len(states), states)

    def _find_named(
        self, names: BlockNames, token_ids: Sequence[int], num_tokens: int
    ) -> tuple[list[bytes], list[bytes]]:
        if not self._allocator.caching:
            return [], []
        is_held = self._allocator.blocks_by_name.__contains__
        return names.find(token_ids, self._full_blocks(num_tokens), self._numerics_ids, is_held)

    def _full_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._layout.block_size


def _num_before_last(node_request: NodeRequest, num_tokens: int) -> int:
    """Return at most `num_tokens` of the tokens that the node is to compute: all but the last one, whose step reads the
    state of a checkpoint and writes the request's own.
    """
    return min(num_tokens, node_request.num_computed + node_request.num_to_compute - 1)
