"""Manage the blocks of a node's requests, shared by block hash. Pure."""

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
)
from serving_core.node.requests import NodeRequest, RequestState


class PrefixFetch(NamedTuple):
    """Blocks of a remote prefix fetch: the first ones are in the pool, the others are still to come from another
    node.
    """

    lease: BlockLease
    names: list[bytes]  # block hashes of the first blocks
    numerics_ids: list[bytes]  # numerics ids of the same blocks


class Leases:
    """Takes, grows, publishes and gives back the leases of requests on one pool."""

    def __init__(
        self, allocator: BlockAllocator, layout: KVLayout, numerics: bytes, *, is_batch_invariant: bool
    ) -> None:
        """Manage the leases of one allocator. `numerics` is the node's (serving_core/node/prefix.py);
        `is_batch_invariant` tells whether prefill chunks and decode steps give the same bits.
        """
        self._allocator = allocator
        self._layout = layout
        self.num_state_blocks: Final = layout.num_state_blocks  # that lead the blocks of a request
        self._numerics = numerics
        self._of_chunk, self._of_step = (numerics + (EITHER if is_batch_invariant else kind) for kind in (CHUNK, STEP))
        self.on_remote_kv_left: Callable[[Sequence[Any]], None] | None = None
        """Called with the remote KV of a request that has given its blocks back."""
        self._numerics_ids = [*dict.fromkeys((self._of_chunk, self._of_step)), MIXED_NUMERICS]

    @property
    def numerics_ids(self) -> list[bytes]:
        """Return the numerics ids of all blocks that the pool may hold, in search order: this node's, then those of
        nodes that sent blocks, then MIXED_NUMERICS.
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
        """Return the tokens of one block."""
        return self._layout.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return self._layout.num_blocks_for(num_tokens)

    def num_needed(self, node_request: NodeRequest, num_tokens: int, *, num_cacheable: int) -> int:
        """Return by how much `take` with the same arguments would lower num_free."""
        names, _ = self._find(node_request, num_cacheable)
        return self._allocator.num_needed(self.blocks_for(num_tokens), names)

    def take(self, node_request: NodeRequest, num_tokens: int, *, num_cacheable: int, num_spare: int) -> bool:
        """Lease blocks for num_tokens tokens if at least num_spare blocks stay free; return whether it did.

        Cached blocks of the leading num_cacheable tokens are shared, and their tokens count as computed.
        """
        names, numerics_ids = self._find(node_request, num_cacheable)
        num_blocks = self.blocks_for(num_tokens)
        if self._allocator.num_needed(num_blocks, names) + num_spare > self._allocator.num_free:
            return False
        node_request.lease = self._allocator.allocate(num_blocks, names)
        node_request.names.begin(names, numerics_ids)
        if node_request.num_found_blocks is None:
            node_request.num_found_blocks = node_request.num_cached_blocks
        node_request.num_computed = node_request.num_cached_blocks * self._layout.block_size
        return True

    def num_missing(self, node_request: NodeRequest, num_tokens: int) -> int:
        """Return how many blocks the lease lacks for num_tokens tokens in all."""
        return max(0, self._layout.num_blocks_for(num_tokens) - self._num_held(node_request))

    def num_tokens_held(self, node_request: NodeRequest) -> int:
        """Return how many tokens the request has blocks for, on this node and in remote KV."""
        return (self._num_held(node_request) - self.num_state_blocks) * self._layout.block_size

    def _num_held(self, node_request: NodeRequest) -> int:
        lease, distributed = node_request.lease, node_request.distributed
        assert lease is not None
        return len(lease.block_ids) if distributed is None else distributed.num_remote_blocks + len(lease.block_ids)

    def shed(self, node_request: NodeRequest, num_blocks: int) -> None:
        """Release the leading blocks, which remote KV now holds."""
        assert node_request.lease is not None
        assert node_request.distributed is not None
        node_request.lease.shed(num_blocks)
        node_request.distributed.num_remote_blocks += num_blocks

    def trim(self, node_request: NodeRequest, num_blocks: int) -> None:
        """Release the last `num_blocks` blocks of a request, none of which was published (asserted).

        Tokens without a block no longer count as computed.
        """
        assert node_request.lease is not None
        node_request.lease.trim(num_blocks)
        node_request.num_computed = min(node_request.num_computed, self.num_tokens_held(node_request))

    def grow(self, node_request: NodeRequest, num_blocks: int) -> None:
        """Add blocks. Raises OutOfBlocks."""
        assert node_request.lease is not None
        node_request.lease.grow(num_blocks)

    def publish_all(self, node_requests: Iterable[NodeRequest]) -> None:
        """Publish the blocks of these requests. Costs little for a request without a new full block."""
        block_size = self._layout.block_size
        for node_request in node_requests:
            lease = node_request.lease
            if lease is None or node_request.num_computed // block_size > lease.num_published:
                self.publish(node_request)

    def publish(self, node_request: NodeRequest) -> None:
        """Publish the blocks that are full of computed KV, so that other requests can share them.

        Blocks that became full since the last call, and were not passed to `copied`, were computed by this node in the
        way that the request's state tells.
        """
        lease = node_request.lease
        assert lease is not None
        num_full = node_request.num_computed // self._layout.block_size
        if num_full <= lease.num_published or not self._allocator.caching or node_request.distributed is not None:
            return
        names = node_request.names
        if (num_new := num_full - len(names.names)) > 0:
            others = [self._own_numerics_id(node_request)] * (num_new - 1)
            names.add(node_request.request.token_ids, self._numerics_id(node_request), *others)
        lease.publish(names.names)

    def copied(self, node_request: NodeRequest, made: Sequence[tuple[bytes, int]]) -> None:
        """Record that the KV behind the blocks found here has arrived from another node.

        `made` gives the numerics ids of all blocks on that node, run by run. Copies keep their hashes, unless other
        blocks precede them here or `made` does not cover them.
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
        """Return the numerics ids of all blocks with computed KV; none if the blocks have no hashes."""
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
        """Return the leading blocks that no later step writes to; none where they begin with a fixed state."""
        if node_request.lease is None or self._layout.state_bytes:
            return []
        return node_request.lease.block_ids[: self._full_blocks(node_request.num_computed)]

    def filled_blocks(self, node_request: NodeRequest) -> list[int]:
        """Return the blocks that hold any KV."""
        assert node_request.lease is not None
        return node_request.lease.block_ids[: self.blocks_for(node_request.num_computed)]

    def give_back(self, node_request: NodeRequest) -> None:
        """Free the request's blocks, if any; published blocks stay cached."""
        if node_request.lease is not None:
            node_request.lease.release()
            node_request.lease = None
            node_request.names.begin([], [])
            node_request.num_computed = 0
            if node_request.distributed is not None:
                node_request.distributed.num_remote_blocks = 0
            if node_request.request.remote_kvs and self.on_remote_kv_left is not None:
                self.on_remote_kv_left(node_request.request.remote_kvs)
                node_request.request.remote_kvs, node_request.request.remote_kv_error = (), ""

    def num_cached_tokens(self, node_request: NodeRequest) -> int:
        """Return the tokens whose KV was cached when the request first got blocks."""
        return (node_request.num_found_blocks or 0) * self._layout.block_size

    def may_share(self, node_request: NodeRequest, other: NodeRequest) -> bool:
        """Return whether one request finds what the other publishes of the same tokens."""
        return (
            self._allocator.caching
            and node_request.distributed is other.distributed is None
            and node_request.names.root == other.names.root
        )

    def blocks_found(self, node_request: NodeRequest, num_cacheable: int) -> list[int]:
        """Return the full blocks of the leading num_cacheable tokens that the pool holds."""
        return [self._allocator.blocks_by_name[name] for name in self._find(node_request, num_cacheable)[0]]

    def num_held_tokens(self, node_request: NodeRequest, num_cacheable: int) -> int:
        """Return how many of the leading num_cacheable tokens lie in full blocks that the pool holds."""
        return len(self._find(node_request, num_cacheable)[0]) * self._layout.block_size

    def names_in(
        self, names: BlockNames, token_ids: Sequence[int], num_tokens: int, is_held: Callable[[bytes], bool]
    ) -> list[bytes]:
        """Return the hashes of the leading full blocks of num_tokens of these tokens for which `is_held` is true."""
        return names.find(token_ids, self._full_blocks(num_tokens), self._numerics_ids, is_held)[0]

    def send_prefix(self, names: BlockNames, token_ids: Sequence[int]) -> tuple[BlockLease, list[bytes]]:
        """Lease the leading full blocks of these tokens that the pool has, for a remote prefix fetch; return the lease
        and their numerics ids.
        """
        found, numerics_ids = self._find_named(names, token_ids, len(token_ids))
        return self._allocator.allocate(len(found), found), numerics_ids

    def begin_prefix_fetch(self, node_request: NodeRequest, num_tokens: int) -> PrefixFetch:
        """Lease blocks for the leading full blocks of num_tokens tokens: the cached ones, and empty ones for a remote
        prefix fetch.

        Raises OutOfBlocks.
        """
        names, numerics_ids = self._find(node_request, num_tokens)
        return PrefixFetch(self._allocator.allocate(self._full_blocks(num_tokens), names), names, numerics_ids)

    def lent(
        self, node_request: NodeRequest, prefix_fetch: PrefixFetch, num_blocks: int, made: Sequence[tuple[bytes, int]]
    ) -> None:
        """Record that num_blocks leading blocks of a remote prefix fetch have arrived; `made` is as for `copied`.

        The prompt then finds them in the pool, unless it has begun without them.
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
        that its tokens were generated from.
        """
        if node_request.distributed is not None:
            return [], []
        names, numerics_ids = self._find_named(node_request.names, node_request.request.token_ids, num_tokens)
        num_found = num_alike(numerics_ids) if node_request.is_arriving else len(numerics_ids)
        return names[:num_found], numerics_ids[:num_found]

    def _find_named(
        self, names: BlockNames, token_ids: Sequence[int], num_tokens: int
    ) -> tuple[list[bytes], list[bytes]]:
        if not self._allocator.caching:
            return [], []
        is_held = self._allocator.blocks_by_name.__contains__
        return names.find(token_ids, self._full_blocks(num_tokens), self._numerics_ids, is_held)

    def _full_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._layout.block_size
