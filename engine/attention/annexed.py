"""Attention over tokens whose oldest blocks lie in other nodes' pools: annexes.

The kernel takes keys in tiles of TILE_KEYS positions and merges what each tile gives from the first to the last. A
*partial* is what some keys gave for a row: of each head the weighted values, the largest score and the sum of the
weights. It may be computed wherever the keys lie, and the bits are those of one pool, if all nodes compute with the
same kernel.

- The row of an answer: all nodes compute the partials of their tiles at the same time, and the node whose request it
  is merges them.
- The rows of a prompt's chunk go through the nodes, the oldest tiles first: each goes on from the partials of those
  before it, as one pool would from tile to tile. So what travels does not grow with the tiles. The chunk goes in
  parts, and each node has another one at a time.
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

PART_ROWS: Final = 64  # of a chunk that go to a node together: fewer leave nodes idle less, and compute less at once


class Annex(Protocol):
    """Whole tiles of one request on another node, behind those of the annex before it. All raise OSError."""

    @property
    def address(self) -> str:
        """Of the other node."""

    @property
    def num_tiles(self) -> int: ...

    @property
    def is_silent(self) -> bool:
        """Whether it has failed because the other node did not answer in time."""

    def ask(self, layer: int, query: memoryview) -> None:
        """Asks for the partials of this row, in the pool's compute dtype."""

    def answer(self, layer: int) -> memoryview:
        """The partials [num_tiles, partial_floats] of the row that was asked for in this layer, float32."""

    def carry(self, layer: int, queries: memoryview, partials: memoryview) -> memoryview:
        """The partials [rows, partial_floats] of these rows over all keys up to the annex's last one, from those over
        all keys before the annex; those of no keys are empty. By any thread, one at a time."""


@dataclass(frozen=True, slots=True)
class _RowPlan:
    """Of one row: own tiles, then what merges all."""

    own: NativePlan
    merging: NativePlan
    annexed: npt.NDArray[np.float32]  # [tiles, partial_floats], where the kernel finds what annexes give


@dataclass(frozen=True, slots=True)
class _Part:
    """Of rows of a chunk: own keys, behind those of annexes."""

    first_row: int
    end_row: int
    native: NativePlan
    annexed: npt.NDArray[np.float32]  # [rows, partial_floats], likewise


class AnnexedAttention:
    """Attention for one request that has annexes. The block table counts from token 0: what stands for annexed blocks
    is not read."""

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
        """A thread for each annex takes all parts to it, one after the other; this one computes them in the end."""
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
        """Its rows are counted from its first one."""
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
