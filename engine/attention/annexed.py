"""Attention over tokens whose oldest blocks lie in other nodes' pools: annexes.

The kernel takes keys in tiles of TILE_KEYS positions and merges what each tile gives from the first to the last. So a
tile may be computed wherever its keys lie: the node that holds it gives its *partials* (of each row and head the
weighted values, the largest score and the sum of the weights), and the node whose request it is merges all of them. The
bits are those of one pool, if both nodes compute with the same kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.native import NativeAttention, NativePlan
from engine.forward_batch import ForwardBatch

TILE_KEYS: Final = 256  # native/attention.h
_NEVER: Final = 2**31 - 1  # splits of a row that no one counts up to: whoever computes partials merges nothing

_UNIT: Final = (  # Unit of native/attention.h
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
_Units = npt.NDArray[np.int32]


class Annex(Protocol):
    """Whole tiles of one request on another node, behind those of the annex before it."""

    @property
    def num_tiles(self) -> int: ...

    def ask(self, layer: int, queries: memoryview) -> None:
        """Asks for the partials of these rows of queries, in the pool's compute dtype. Raises OSError, as `answer`."""

    def answer(self) -> memoryview:
        """The partials [rows, num_tiles, partial_floats] of what was asked for, float32."""


class PartialAttention:
    """What a node computes for another one: partials of tiles that lie in its pool. Used by one thread at a time."""

    def __init__(self, attention: NativeAttention) -> None:
        """Computes like this attention, and beside it."""
        self._attention = attention.another()
        self.partial_bytes: Final = 4 * self._attention.num_partial_floats  # of one row and tile
        self.row_bytes: Final = attention.num_heads * attention.head_dim * attention.pool.compute_dtype.itemsize

    def partials(
        self, queries: bytes | bytearray | memoryview, layer: int, block_ids: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        """Of these rows over all tiles that the blocks hold, [rows, tiles, partial_floats]: all keys are seen."""
        attention = self._attention
        query = torch.frombuffer(queries, dtype=attention.pool.compute_dtype)
        query = query.view(-1, attention.num_heads, attention.head_dim)
        num_rows, num_tiles = len(query), len(block_ids) * attention.pool.layout.block_size // TILE_KEYS
        rows, tiles = np.divmod(np.arange(num_rows * num_tiles, dtype=np.int32), np.int32(num_tiles))
        units = _units_of(attention, rows, tiles * TILE_KEYS, (tiles + 1) * TILE_KEYS)
        _set(units, "partial", np.arange(len(units)))
        _set(units, "num_splits", _NEVER)
        partials = np.empty((num_rows, num_tiles, attention.num_partial_floats), np.float32)
        table = torch.tensor([list(block_ids)], dtype=torch.int32)
        plan = _plan(attention, table, units, partials, np.zeros(1, np.int32))
        attention.attend(query, layer, plan)
        return partials


@dataclass(frozen=True, slots=True)
class _AnnexedPlan:
    native: NativePlan
    partials: npt.NDArray[np.float32]  # [rows * splits of each, partial_floats]
    num_finished: npt.NDArray[np.int32]
    requests: "list[_Rows]"


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one request, and where their partials are."""

    first_row: int
    end_row: int
    first_partial: int
    num_splits: list[int]  # of each row, those on other nodes included
    annexes: Sequence[Annex]

    @property
    def num_annexed(self) -> int:
        return sum(annex.num_tiles for annex in self.annexes)


class AnnexedAttention:
    """Attention for requests that all have annexes, in their order in the batch. Block tables count from token 0: what
    stands for annexed blocks is not read."""

    name = "annexed"

    def __init__(self, attention: NativeAttention, annexes: Sequence[Sequence[Annex]]) -> None:
        self._attention = attention
        self.pool = attention.pool
        self.score_scale, self.softcap = attention.score_scale, attention.softcap
        self._annexes = annexes

    def plan(self, batch: ForwardBatch, window: int | None) -> _AnnexedPlan:
        assert window is None, "an engine with windows takes no annexes"
        starts, lengths = batch.query_starts.tolist(), batch.kv_lengths.tolist()
        requests, parts, num_partials = [], [], 0
        for request, annexes in enumerate(self._annexes):
            first_row, end_row = starts[request], starts[request + 1]
            num_seen = np.arange(lengths[request] - (end_row - first_row), lengths[request]) + 1
            num_splits = -(-num_seen // TILE_KEYS)
            rows = _Rows(first_row, end_row, num_partials, num_splits.tolist(), annexes)
            requests.append(rows)
            parts.append(self._units_of(request, rows, num_seen))
            num_partials += int(num_splits.sum())
        units = np.concatenate(parts)
        partials = np.empty((num_partials, self._attention.num_partial_floats), np.float32)
        num_finished = np.zeros(num_partials, np.int32)
        native = _plan(self._attention, batch.block_tables, units, partials, num_finished)
        return _AnnexedPlan(native, partials, num_finished, requests)

    def attend(self, query: torch.Tensor, layer: int, plan: _AnnexedPlan) -> torch.Tensor:
        for rows in plan.requests:
            queries = query[rows.first_row : rows.end_row].contiguous()
            data = queries.view(torch.uint8).numpy().data.cast("B")
            for annex in rows.annexes:
                annex.ask(layer, data)
        for rows in plan.requests:
            self._take_answers(rows, plan)
        return self._attention.attend(query, layer, plan.native)

    def _take_answers(self, rows: _Rows, plan: _AnnexedPlan) -> None:
        """Puts the partials of annexes where the kernel finds them, as if it had computed them itself."""
        answers = [
            np.frombuffer(annex.answer(), np.float32).reshape(rows.end_row - rows.first_row, annex.num_tiles, -1)
            for annex in rows.annexes
        ]
        together, at = np.concatenate(answers, axis=1), rows.first_partial
        for partials, num_splits in zip(together, rows.num_splits, strict=True):
            plan.partials[at : at + rows.num_annexed] = partials
            plan.num_finished[at] = rows.num_annexed
            at += num_splits

    def _units_of(self, request: int, rows: _Rows, num_seen: npt.NDArray[np.int64]) -> _Units:
        """One for each row and tile of a request that lies here."""
        num_annexed, splits = rows.num_annexed, np.array(rows.num_splits)
        num_own = splits - num_annexed
        assert (num_own > 0).all(), "a row's own key lies here"
        first_partials = rows.first_partial + np.cumsum(splits) - splits
        index = np.repeat(np.arange(len(splits)), num_own)
        tiles = np.concatenate([np.arange(num_annexed, end) for end in splits])
        ends = np.minimum((tiles + 1) * TILE_KEYS, num_seen[index])
        units = _units_of(self._attention, rows.first_row + index, tiles * TILE_KEYS, ends)
        _set(units, "request", request)
        _set(units, "first_position", num_seen[index] - 1)
        _set(units, "partial", first_partials[index] + tiles)
        _set(units, "first_partial", first_partials[index])
        _set(units, "num_splits", splits[index])
        return units


def _units_of(attention: NativeAttention, rows: Any, first_keys: Any, end_keys: Any) -> _Units:
    """A split for each, over all heads."""
    units = np.zeros((len(rows), len(_UNIT)), np.int32)
    _set(units, "num_kv_heads", attention.pool.layout.num_kv_heads)
    _set(units, "num_rows", 1)
    for name, values in (("first_row", rows), ("first_key", first_keys), ("end_key", end_keys)):
        _set(units, name, values)
    return units


def _set(units: _Units, name: str, values: Any) -> None:
    units[:, _UNIT.index(name)] = values


def _plan(
    attention: NativeAttention,
    block_tables: torch.Tensor,
    units: _Units,
    partials: npt.NDArray[np.float32],
    num_finished: npt.NDArray[np.int32],
) -> NativePlan:
    units = np.ascontiguousarray(units)
    plan = attention.empty_plan(block_tables, None)
    plan.num_units, plan.units = len(units), units.ctypes.data
    plan.partials, plan.num_finished = partials.ctypes.data, num_finished.ctypes.data
    return attention.finish(plan, (block_tables, units, partials, num_finished), int(units[:, 7].sum()))
