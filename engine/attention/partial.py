"""Compute attention over some of a request's keys, and the parts common to all nodes of distributed KV (remote.py)."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.native import NativeAttention, NativePlan

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


class PartialAttention:
    """A KV holder's computation for another node, over keys in this node's pool in whole tiles: all rows attend to all
    of the keys. One thread at a time may use it.
    """

    def __init__(self, attention: NativeAttention) -> None:
        """Compute like `attention`, concurrently with it."""
        self._attention = attention.another()
        # Bytes of one row's partial, over any number of keys
        self.partial_bytes: Final = 4 * self._attention.num_partial_floats
        self.row_bytes: Final = attention.num_heads * attention.head_dim * attention.pool.compute_dtype.itemsize

    def partials(self, query: bytes | bytearray | memoryview, layer: int, block_ids: Sequence[int]) -> Any:
        """Return the partials of one row over each tile of the blocks, [tiles, partial_floats], float32."""
        attention, num_keys = self._attention, self._num_keys(block_ids)
        partials = np.empty((num_keys // TILE_KEYS, attention.num_partial_floats), np.float32)
        units = splits_of_row(attention, 0, num_keys, _NEVER)
        self._compute(query, layer, block_ids, units, partials)
        return partials

    def carry(
        self,
        queries: bytes | bytearray | memoryview,
        partials: bytes | bytearray | memoryview,
        layer: int,
        block_ids: Sequence[int],
    ) -> Any:
        """Return the partials [rows, partial_floats] of these rows over the keys of the blocks and all keys before
        them.

        `partials` are those over all keys before the blocks; empty if there are no such keys.
        """
        attention, num_keys = self._attention, self._num_keys(block_ids)
        num_rows = len(queries) // self.row_bytes
        units = units_of_rows(attention, num_rows)
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
        plan = plan_of(attention, table, units, partials)
        attention.attend(query.view(-1, attention.num_heads, attention.head_dim), layer, plan)


def splits_of_row(attention: NativeAttention, first_tile: int, num_keys: int, num_splits: int) -> Units:
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


def units_of_rows(attention: NativeAttention, num_rows: int) -> Units:
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


def plan_of(
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
