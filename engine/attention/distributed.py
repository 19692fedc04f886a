"""Attend over tokens whose oldest blocks lie in other nodes' pools (distributed KV).

The kernel takes keys in tiles of TILE_KEYS positions and merges the tiles in order. A *partial* is the result of some
keys for a row: for each head the weighted values, the largest score and the sum of the weights. Any node that holds the
keys may compute it, and the bits equal those of one pool if all nodes use the same kernel.

- A decode row: all KV holders compute the partials of their tiles at the same time, and the node that owns the request
  merges them.
- The rows of a prefill chunk pass through the KV holders, the oldest tiles first: each continues from the partials
  before it, as one pool does from tile to tile. So the traffic does not grow with the number of tiles. The chunk is
  sent in parts, and each node works on a different part at a time.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.native import NativeAttention, NativePlan
from engine.forward_batch import ForwardBatch

TILE_KEYS: Final = 256  # native/attention.h
_TILE_ROWS: Final = 192  # native/attention.h
# Number of splits of a row that is never reached: the node that computes partials merges nothing
_NEVER: Final = 2**31 - 1
_UNITS_EACH: Final = 4  # units per thread where rows are plenty, so that all threads end at about the same time

_UNIT: Final = np.dtype(  # Unit of native/attention.h
    [
        (name, np.int32)
        for name in (
            "request",
            "kv_head",
            "num_kv_heads",
            "first_row",
            "num_rows",
            "first_position",
            "first_key",
            "end_key",
            "partial",
            "first_partial",
            "num_splits",
        )
    ]
)
Units = npt.NDArray[Any]  # of _UNIT

PART_ROWS: Final = 64  # rows of a chunk sent together: fewer leave nodes idle less, but make each computation smaller


class RemoteKV(Protocol):
    """The KV of some whole tiles of one request, in the pool of a KV holder (another node).

    Tiles follow those of the remote KV before it. All methods may raise OSError.
    """

    @property
    def address(self) -> str:
        """Return the KV holder's network address."""

    @property
    def num_tiles(self) -> int: ...

    @property
    def is_silent(self) -> bool:
        """Return whether a call failed because the KV holder did not answer in time."""

    def send_query(self, layer: int, query: memoryview) -> None:
        """Send the query of one row, in the pool's compute dtype, to the KV holder.

        `receive_partials` returns the result.
        """

    def receive_partials(self, layer: int) -> memoryview:
        """Wait for the partials, float32 [num_tiles, partial_floats], of the row that `send_query` sent."""

    def carry(self, layer: int, queries: memoryview, partials: memoryview) -> memoryview:
        """Send query rows to the KV holder; return their partials [rows, partial_floats] over all keys up to its last.

        `queries` are the rows' bytes. `partials` are those of the same rows over all keys before this remote KV; empty
        if there are none. Any thread may call this, one at a time.
        """


@dataclass(frozen=True, slots=True)
class _RowPlan:
    """The plans of one row: the node's own tiles, then the merge of all tiles."""

    own: NativePlan
    merging: NativePlan
    from_holders: npt.NDArray[np.float32]  # [tiles, partial_floats], where the kernel finds the KV holders' partials


@dataclass(frozen=True, slots=True)
class _Part:
    """The plan of some rows of a chunk: the node's own keys, behind the keys of the remote KV."""

    first_row: int
    end_row: int
    native: NativePlan
    from_holders: npt.NDArray[np.float32]  # [rows, partial_floats], where the kernel finds the KV holders' partials


class DistributedAttention:
    """Attention for one request whose oldest KV lies in other nodes' pools (`remote_kvs`, the oldest first).

    The block table counts from token 0; its entries for remote blocks are not read.
    """

    name = "distributed"

    def __init__(self, attention: NativeAttention, remote_kvs: Sequence[RemoteKV]) -> None:
        assert remote_kvs, "a request without remote KV is like any other"
        self._attention = attention
        self.pool = attention.pool
        self.score_scale, self.softcap = attention.score_scale, attention.softcap
        self._remote_kvs = remote_kvs
        self._num_tiles = sum(remote_kv.num_tiles for remote_kv in remote_kvs)

    def plan(self, batch: ForwardBatch, window: int | None) -> "_RowPlan | list[_Part]":
        assert window is None, "an engine with windows takes no remote KV"
        assert len(batch.kv_lengths) == 1, "each request with remote KV is computed by itself"
        length, num_rows = int(batch.kv_lengths[0]), batch.longest_query
        start = length - num_rows
        assert start >= self._num_tiles * TILE_KEYS, "rows are behind what has left"
        if num_rows == 1:
            return self._plan_row(batch.block_tables, length)
        parts = -(-num_rows // PART_ROWS)
        ends = [num_rows * part // parts for part in range(parts + 1)]
        return [self._plan_part(batch.block_tables, start, *rows) for rows in pairwise(ends)]

    def attend(self, query: torch.Tensor, layer: int, plan: "_RowPlan | list[_Part]") -> torch.Tensor:
        if isinstance(plan, _RowPlan):
            return self._attend_row(query, layer, plan)
        return self._attend_parts(query, layer, plan)

    def _attend_row(self, query: torch.Tensor, layer: int, plan: _RowPlan) -> torch.Tensor:
        for remote_kv in self._remote_kvs:
            remote_kv.send_query(layer, _bytes_of(query))
        self._attention.attend(query, layer, plan.own)
        at = 0
        for remote_kv in self._remote_kvs:
            partials = np.frombuffer(remote_kv.receive_partials(layer), np.float32).reshape(remote_kv.num_tiles, -1)
            plan.from_holders[at : at + remote_kv.num_tiles] = partials
            at += remote_kv.num_tiles
        return self._attention.attend(query, layer, plan.merging)

    def _attend_parts(self, query: torch.Tensor, layer: int, parts: list[_Part]) -> torch.Tensor:
        """Attend parts of a chunk: one thread per remote KV sends all parts to it in order, and this thread computes
        the last stage."""
        queries = [query[part.first_row : part.end_row] for part in parts]
        carried: list[Future[memoryview]] | None = None
        with ExitStack() as threads:
            for remote_kv in self._remote_kvs:
                thread = ThreadPoolExecutor(1, thread_name_prefix="kv-holder")
                threads.callback(thread.shutdown, cancel_futures=True)
                before: Sequence[Future[memoryview] | None] = carried or [None] * len(parts)
                carried = [
                    thread.submit(_carry, remote_kv, layer, rows, partials)
                    for rows, partials in zip(queries, before, strict=True)
                ]
            assert carried is not None
            outputs = []
            for part, rows, partials in zip(parts, queries, carried, strict=True):
                part.from_holders[:] = np.frombuffer(partials.result(), np.float32).reshape(part.from_holders.shape)
                outputs.append(self._attention.attend(rows, layer, part.native))
        return torch.cat(outputs)

    def _plan_row(self, block_tables: torch.Tensor, length: int) -> _RowPlan:
        attention, num_remote = self._attention, self._num_tiles
        num_splits = -(-length // TILE_KEYS)
        partials = np.empty((num_splits, attention.num_partial_floats), np.float32)
        num_finished = np.zeros(1, np.int32)
        own = _splits_of_row(attention, num_remote, length, num_splits)
        merging = own[-1:].copy()
        merging["first_key"] = merging["end_key"]
        own_plan, merging_plan = (
            _plan_of(attention, block_tables, units, partials, num_finished) for units in (own, merging)
        )
        return _RowPlan(own_plan, merging_plan, partials[:num_remote])

    def _plan_part(self, block_tables: torch.Tensor, start: int, first_row: int, end_row: int) -> _Part:
        """Plan a part of a chunk; its rows are counted from the part's first row."""
        partials = np.empty((end_row - first_row, self._attention.num_partial_floats), np.float32)
        units = _units_of_rows(self._attention, end_row - first_row)
        units["first_position"] = start + first_row + units["first_row"]
        units["first_key"] = self._num_tiles * TILE_KEYS
        units["end_key"] = units["first_position"] + units["num_rows"]
        units["first_partial"] = units["first_row"]
        return _Part(first_row, end_row, _plan_of(self._attention, block_tables, units, partials), partials)


def _carry(remote_kv: RemoteKV, layer: int, queries: torch.Tensor, before: "Future[memoryview] | None") -> memoryview:
    return remote_kv.carry(layer, _bytes_of(queries), memoryview(b"") if before is None else before.result())


def _bytes_of(queries: torch.Tensor) -> memoryview:
    data: memoryview = queries.contiguous().view(torch.uint8).numpy().data.cast("B")
    return data


class PartialAttention:
    """Computes, on a KV holder, the attention of another node's rows over keys in this node's pool.

    The keys are whole tiles, and all rows attend to all of them. One thread at a time may use it.
    """

    def __init__(self, attention: NativeAttention) -> None:
        """Compute like `attention`, concurrently with it."""
        self._attention = attention.another()
        # Bytes of one row's partial, over any number of keys
        self.partial_bytes: Final = 4 * self._attention.num_partial_floats
        self.row_bytes: Final = attention.num_heads * attention.head_dim * attention.pool.compute_dtype.itemsize

    def partials(self, query: bytes | bytearray | memoryview, layer: int, block_ids: Sequence[int]) -> Any:
        """Return the partials of one row over each tile of these blocks, float32 [tiles, partial_floats].

        A partial is the attention over some keys, not yet normalized (see the module's docstring). `query` holds the
        row's bytes in the pool's compute dtype.
        """
        attention, num_keys = self._attention, self._num_keys(block_ids)
        partials = np.empty((num_keys // TILE_KEYS, attention.num_partial_floats), np.float32)
        units = _splits_of_row(attention, 0, num_keys, _NEVER)
        self._compute(query, layer, block_ids, units, partials)
        return partials

    def carry(
        self,
        queries: bytes | bytearray | memoryview,
        partials: bytes | bytearray | memoryview,
        layer: int,
        block_ids: Sequence[int],
    ) -> Any:
        """Return the partials [rows, partial_floats] of these rows over the blocks' keys and all keys before them.

        They are float32. `queries` holds the rows' bytes in the pool's compute dtype. `partials` are those over all
        keys before the blocks; empty if there are no such keys.
        """
        attention, num_keys = self._attention, self._num_keys(block_ids)
        num_rows = len(queries) // self.row_bytes
        units = _units_of_rows(attention, num_rows)
        units["first_position"] = units["end_key"] = num_keys
        units["partial"] = units["first_row"]
        units["first_partial"] = units["first_row"] if partials else -1
        carried = np.empty((num_rows, attention.num_partial_floats), np.float32)
        if partials:
            carried[:] = np.frombuffer(partials, np.float32).reshape(carried.shape)
        self._compute(queries, layer, block_ids, units, carried)
        return carried

    def _num_keys(self, block_ids: Sequence[int]) -> int:
        return len(block_ids) * self._attention.pool.layout.block_size

    def _compute(
        self,
        queries: bytes | bytearray | memoryview,
        layer: int,
        block_ids: Sequence[int],
        units: Units,
        partials: npt.NDArray[np.float32],
    ) -> None:
        attention = self._attention
        query = torch.frombuffer(queries, dtype=attention.pool.compute_dtype)
        table = torch.tensor([list(block_ids)], dtype=torch.int32)
        plan = _plan_of(attention, table, units, partials)
        attention.attend(query.view(-1, attention.num_heads, attention.head_dim), layer, plan)


def _splits_of_row(attention: NativeAttention, first_tile: int, num_keys: int, num_splits: int) -> Units:
    """Return the units of one row with num_keys keys: a split for each tile from first_tile on, over all heads.

    Partials are indexed from tile 0; the thread that finishes the last of num_splits splits merges them.
    """
    tiles = np.arange(first_tile, -(-num_keys // TILE_KEYS), dtype=np.int32)
    units = np.zeros(len(tiles), _UNIT)
    units["num_kv_heads"], units["num_rows"] = attention.pool.layout.num_kv_heads, 1
    units["first_position"] = num_keys - 1
    units["first_key"], units["end_key"] = tiles * TILE_KEYS, np.minimum((tiles + 1) * TILE_KEYS, num_keys)
    units["partial"], units["num_splits"] = tiles, num_splits
    return units


def _units_of_rows(attention: NativeAttention, num_rows: int) -> Units:
    """Return units for num_rows rows, from the first row on, with outputs and no keys. The caller fills in the keys."""
    num_kv_heads = attention.pool.layout.num_kv_heads
    for_all_threads = -(-num_rows * num_kv_heads // (_UNITS_EACH * torch.get_num_threads()))
    step = max(1, min(_TILE_ROWS * num_kv_heads // attention.num_heads, for_all_threads))
    kv_heads, first_rows = np.meshgrid(np.arange(num_kv_heads), np.arange(0, num_rows, step), indexing="ij")
    units = np.zeros(kv_heads.size, _UNIT)
    units["kv_head"], units["num_kv_heads"] = kv_heads.ravel(), 1
    units["first_row"] = first_rows.ravel()
    units["num_rows"] = np.minimum(step, num_rows - units["first_row"])
    units["partial"] = units["first_partial"] = -1
    return units


def _plan_of(
    attention: NativeAttention,
    block_tables: torch.Tensor,
    units: Units,
    partials: npt.NDArray[np.float32],
    num_finished: npt.NDArray[np.int32] | None = None,
) -> NativePlan:
    """Return a plan of these units, which read and write their partials in `partials`."""
    if num_finished is None:
        num_finished = np.zeros(1, np.int32)
    plan = attention.empty_plan(block_tables, None)
    plan.num_units, plan.units = len(units), units.ctypes.data
    plan.partials, plan.num_finished = partials.ctypes.data, num_finished.ctypes.data
    num_seen = int(((units["end_key"] - units["first_key"]) * units["num_rows"] * units["num_kv_heads"]).sum())
    num_scores = num_seen * attention.num_heads // attention.pool.layout.num_kv_heads
    return attention.finish(plan, (block_tables, units, partials, num_finished), num_scores)
