"""Attend on CPUs with the compiled kernels of engine/native, which read the paged pool in place."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch
from engine.native.library import ELEMENTS, NativeLibrary, Plan, native_library, wanted_variants
from engine.native.program import NativeProgram, parallel_function

_SHARED_WORK: Final = 8192  # scores; less work is done sooner than other threads wake up

Move: TypeAlias = Callable[[], int]


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What the kernel needs of one batch: the address of its Plan, and the owners of the memory that this points to."""

    address: int
    parallel: int | None
    owners: tuple[Any, ...]


class NativeAttention:
    """Attends in CPU pools of every dtype; batch-invariant.

    The bits of a row's output depend only on the row and its keys, not on its chunk, its batch or torch's number of
    threads. One thread at a time may call its methods; `plan` may run beside another method.
    """

    name = "native"

    def __init__(
        self,
        pool: PagedKVPool,
        num_heads: int,
        variant: str | None = None,
        score_scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        """Load the named kernel variant, by default the best for the CPU.

        Raises ValueError if there is none, SettingsError for a pool whose K and V widths differ between layers.
        """
        self.pool = pool
        self.score_scale, self.softcap = score_scale, softcap
        self._cache = pool.layout.cache_shape
        self.variant, self._library, self._kernel = _find_kernel(pool, variant)
        self.num_heads: Final = num_heads
        self._query_dtype = pool.compute_dtype
        self._caches = {layer: _cache_addresses(pool, layer) for layer in pool.layout.layers}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._template: Final = self._make_template()
        self.head_dim: Final[int] = self._cache.width
        self.num_partial_floats: Final[int] = self._library.partial_floats(ctypes.addressof(self._template))
        """float32 numbers in the partial of one split."""

    def plan(self, batch: ForwardBatch, window: int | None) -> NativePlan:
        plan = self.empty_plan(batch.block_tables, window)
        units, counts = self._units(ctypes.addressof(plan), batch)
        num_units, num_partials, num_scores = counts
        partials = torch.empty(num_partials * self.num_partial_floats)
        num_finished = torch.zeros(num_partials, dtype=torch.int32)
        plan.num_units, plan.units = num_units, units.data_ptr()
        plan.partials, plan.num_finished = partials.data_ptr(), num_finished.data_ptr()
        return self.finish(plan, (batch, units, partials, num_finished), num_scores)

    def move(self, batch: ForwardBatch, plan: NativePlan, moves_rows: bool) -> Move:
        """Return a function that makes `plan` that of the next step of its decode batch, in place.

        With `moves_rows` it moves the batch to its next tokens first, which the block tables must hold. It returns 0 if
        the plan's memory is too small, so that the batch needs another plan. Only for plans that a program runs:
        whether `attend` uses several threads stays.
        """
        _, _, units, partials, *_ = plan.owners
        rows = (batch.positions.data_ptr(), batch.slots.data_ptr()) if moves_rows else (None, None)
        lengths = batch.query_starts.data_ptr(), batch.kv_lengths.data_ptr(), len(batch.context_lengths)
        memory = units.numel() // self._library.unit_bytes, partials.numel() // self.num_partial_floats
        return functools.partial(self._library.move, plan.address, *rows, *lengths, *memory)

    def finish(self, plan: Plan, owners: tuple[Any, ...], num_scores: int) -> NativePlan:
        """Give `plan` its scratch memory, and return it as a NativePlan.

        The plan's units must be set; `owners` keeps their memory alive. `num_scores` is the number of query-key
        products: `attend` computes few with one thread.
        """
        address, num_threads = ctypes.addressof(plan), plan.num_threads
        scratch_bytes, scratch = self._library.scratch_bytes(address), self._scratch
        if scratch.numel() < num_threads * scratch_bytes:
            scratch = self._scratch = torch.empty(num_threads * scratch_bytes, dtype=torch.uint8)
        plan.partial_floats = self.num_partial_floats
        plan.scratch, plan.scratch_bytes = scratch.data_ptr(), scratch_bytes
        owners = (plan, *owners, scratch)
        is_shared = num_threads > 1 and num_scores >= _SHARED_WORK
        return NativePlan(address, parallel_function() if is_shared else None, owners)

    def another(self) -> "NativeAttention":
        """Return a new NativeAttention over the same pool, for another thread."""
        return NativeAttention(self.pool, self.num_heads, self.variant, self.score_scale, self.softcap)

    def attend(self, query: torch.Tensor, layer: int, plan: NativePlan) -> torch.Tensor:
        num_rows, num_heads, head_dim = query.shape
        row, head, element = query.stride()
        if element != 1 or head != head_dim:
            query = query.contiguous()
            row = num_heads * head_dim
        output = torch.empty((num_rows, num_heads, head_dim), dtype=query.dtype)
        keys, values = self._caches[layer]
        self._library.attend(
            plan.address,
            plan.parallel,
            query.data_ptr(),
            row * query.itemsize,
            keys,
            values,
            output.data_ptr(),
        )
        return output

    def record(
        self, program: NativeProgram, plan: ctypes.c_void_p, queries: torch.Tensor, layer: int, output: torch.Tensor
    ) -> None:
        """Append to `program` the work of `attend` for one layer, from `queries` into `output`.

        When the program runs, `plan` must hold the address of a NativePlan. Rows of queries [T, at least H, D] and of
        the output [T, H, D] are contiguous.
        """
        row_bytes = queries.shape[1] * queries.shape[2] * queries.itemsize
        program.add(
            self._library.add,
            ctypes.addressof(plan),
            queries.data_ptr(),
            row_bytes,
            *self._caches[layer],
            output.data_ptr(),
        )

    def empty_plan(self, block_tables: torch.Tensor, window: int | None) -> Plan:
        """Return a Plan for these block tables [B, max_blocks] without units, which the caller sets before `finish`.

        `window`: None for all tokens.
        """
        plan = Plan.from_buffer_copy(self._template)
        plan.window = window or 0
        plan.num_threads = torch.get_num_threads()
        plan.block_tables = block_tables.data_ptr()
        plan.table_stride = block_tables.stride(0)
        return plan

    def _make_template(self) -> Plan:
        """Return the parts common to all plans."""
        cache = self._cache
        return Plan(
            num_heads=self.num_heads,
            num_kv_heads=cache.num_heads,
            head_dim=cache.width,
            block_size=cache.block_size,
            pool_element=ELEMENTS[cache.dtype],
            query_element=ELEMENTS[str(self._query_dtype).removeprefix("torch.")],
            cache_bytes=cache.num_bytes,
            data_bytes=cache.data_bytes,
            score_scale=cache.width**-0.5 if self.score_scale is None else self.score_scale,
            softcap=self.softcap or 0.0,
            kernel=self._kernel,
        )

    def _units(self, plan: int, batch: ForwardBatch) -> tuple[torch.Tensor, list[int]]:
        """Return the units of a batch, as bytes, and the numbers of units, partials and scores."""
        num_requests = len(batch.context_lengths)
        counts = (ctypes.c_int64 * 3)()
        capacity = 2 * num_requests * self.pool.layout.num_kv_heads
        while True:
            units = torch.empty(capacity * self._library.unit_bytes, dtype=torch.uint8)
            self._library.units(
                plan,
                batch.query_starts.data_ptr(),
                batch.kv_lengths.data_ptr(),
                num_requests,
                units.data_ptr(),
                capacity,
                ctypes.addressof(counts),
            )
            if counts[0] <= capacity:
                return units, list(counts)
            capacity = counts[0]


def _find_kernel(pool: PagedKVPool, variant: str | None) -> tuple[str, NativeLibrary, int]:
    library = native_library()
    if library is None:
        raise ValueError("the native kernels are not there")
    if pool.device.type != "cpu":
        raise ValueError(f"the native kernels compute on the CPU, and the pool is on {pool.device.type}")
    query_dtype = str(pool.compute_dtype).removeprefix("torch.")
    for name in wanted_variants() if variant is None else (variant,):
        kernel = library.kernel(name, pool.layout.dtype, query_dtype)
        if kernel is not None:
            return name, library, kernel
    raise ValueError(f"no native kernel for a pool of {pool.layout.dtype} and queries of {query_dtype}")


def _cache_addresses(pool: PagedKVPool, layer: int) -> tuple[int, int]:
    """Return the addresses of block 0 of K and of V; the other blocks follow."""
    keys, values = pool.read_tensors(layer, [0])
    return keys.data_ptr(), values.data_ptr()
