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
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.native import NativeAttention, NativePlan
from engine.attention.partial import TILE_KEYS, plan_of, splits_of_row, units_of_rows
from engine.forward_batch import ForwardBatch

PART_ROWS: Final = 64  # rows of a chunk sent together: fewer leave nodes idle less, but make each computation smaller


class Annex(Protocol):
    """Whole tiles of one request on a KV holder, behind the tiles of the annex before it. All methods may raise
    OSError.
    """

    @property
    def address(self) -> str:
        """Return the KV holder's address."""

    @property
    def num_tiles(self) -> int: ...

    @property
    def is_silent(self) -> bool:
        """Return whether the annex failed because the KV holder did not answer in time."""

    def ask(self, layer: int, query: memoryview) -> None:
        """Request the partials of this row, in the pool's compute dtype."""

    def answer(self, layer: int) -> memoryview:
        """Return the partials [num_tiles, partial_floats] of the row requested in this layer, float32."""

    def carry(self, layer: int, queries: memoryview, partials: memoryview) -> memoryview:
        """Return the partials [rows, partial_floats] of these rows over all keys up to the annex's last one.

        `partials` are those over all keys before the annex; empty if there are none. Any thread may call this, one at a
        time.
        """


@dataclass(frozen=True, slots=True)
class _RowPlan:
    """The plans of one row: the node's own tiles, then the merge of all tiles."""

    own: NativePlan
    merging: NativePlan
    annexed: npt.NDArray[np.float32]  # [tiles, partial_floats], where the kernel finds the annexes' partials


@dataclass(frozen=True, slots=True)
class _Part:
    """The plan of some rows of a chunk: the node's own keys, behind the keys of the annexes."""

    first_row: int
    end_row: int
    native: NativePlan
    annexed: npt.NDArray[np.float32]  # [rows, partial_floats], where the kernel finds the annexes' partials


class AnnexedAttention:
    """Attention for one request with annexes. The block table counts from token 0; its entries for annexed blocks are
    not read.
    """

    name = "annexed"

    def __init__(self, attention: NativeAttention, annexes: Sequence[Annex]) -> None:
        assert annexes, "a request without annexes is like any other"
        self._attention = attention
        self.pool = attention.pool
        self.score_scale, self.softcap = attention.score_scale, attention.softcap
        self._annexes = annexes
        self._num_tiles = sum(annex.num_tiles for annex in annexes)

    def plan(self, batch: ForwardBatch, window: int | None) -> "_RowPlan | list[_Part]":
        assert window is None, "an engine with windows takes no annexes"
        assert len(batch.kv_lengths) == 1, "each request with annexes is computed by itself"
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
        for annex in self._annexes:
            annex.ask(layer, _bytes_of(query))
        self._attention.attend(query, layer, plan.own)
        at = 0
        for annex in self._annexes:
            partials = np.frombuffer(annex.answer(layer), np.float32).reshape(annex.num_tiles, -1)
            plan.annexed[at : at + annex.num_tiles] = partials
            at += annex.num_tiles
        return self._attention.attend(query, layer, plan.merging)

    def _attend_parts(self, query: torch.Tensor, layer: int, parts: list[_Part]) -> torch.Tensor:
        """Attend parts of a chunk: one thread per annex sends all parts to it in order, and this thread computes the
        last stage.
        """
        queries = [query[part.first_row : part.end_row] for part in parts]
        carried: list[Future[memoryview]] | None = None
        with ExitStack() as threads:
            for annex in self._annexes:
                thread = ThreadPoolExecutor(1, thread_name_prefix="annexed")
                threads.callback(thread.shutdown, cancel_futures=True)
                before: Sequence[Future[memoryview] | None] = carried or [None] * len(parts)
                carried = [
                    thread.submit(_carry, annex, layer, rows, partials)
                    for rows, partials in zip(queries, before, strict=True)
                ]
            assert carried is not None
            outputs = []
            for part, rows, partials in zip(parts, queries, carried, strict=True):
                part.annexed[:] = np.frombuffer(partials.result(), np.float32).reshape(part.annexed.shape)
                outputs.append(self._attention.attend(rows, layer, part.native))
        return torch.cat(outputs)

    def _plan_row(self, block_tables: torch.Tensor, length: int) -> _RowPlan:
        attention, num_annexed = self._attention, self._num_tiles
        num_splits = -(-length // TILE_KEYS)
        partials = np.empty((num_splits, attention.num_partial_floats), np.float32)
        num_finished = np.zeros(1, np.int32)
        own = splits_of_row(attention, num_annexed, length, num_splits)
        merging = own[-1:].copy()
        merging["first_key"] = merging["end_key"]
        own_plan, merging_plan = (
            plan_of(attention, block_tables, units, partials, num_finished) for units in (own, merging)
        )
        return _RowPlan(own_plan, merging_plan, partials[:num_annexed])

    def _plan_part(self, block_tables: torch.Tensor, start: int, first_row: int, end_row: int) -> _Part:
        """Plan a part of a chunk; its rows are counted from the part's first row."""
        partials = np.empty((end_row - first_row, self._attention.num_partial_floats), np.float32)
        units = units_of_rows(self._attention, end_row - first_row)
        units["first_position"] = start + first_row + units["first_row"]
        units["first_key"] = self._num_tiles * TILE_KEYS
        units["end_key"] = units["first_position"] + units["num_rows"]
        units["first_partial"] = units["first_row"]
        return _Part(first_row, end_row, plan_of(self._attention, block_tables, units, partials), partials)


def _carry(annex: Annex, layer: int, queries: torch.Tensor, before: "Future[memoryview] | None") -> memoryview:
    return annex.carry(layer, _bytes_of(queries), memoryview(b"") if before is None else before.result())


def _bytes_of(queries: torch.Tensor) -> memoryview:
    data: memoryview = queries.contiguous().view(torch.uint8).numpy().data.cast("B")
    return data
