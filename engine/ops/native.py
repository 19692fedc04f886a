"""Compute the ops on CPUs with the compiled kernels of engine/native."""

import ctypes
from collections.abc import Sequence
from typing import Final

import torch

from engine.cache.kv_pool import PagedKVPool
from engine.native.ops_library import HeadStore, NativeNorm, NativeSampling, SamplingBatch, Table, ops_library
from engine.native.program import NativeProgram, threads_for
from engine.ops.base import HeadNorms, KVSlots, Likeliest, Norm, Ops, Routing, Shared
from engine.ops.rope import Rotation
from engine.ops.topk_topp import RowSampling
from serving_core.model_files.differences import GELU_TANH, SILU

ELEMENTS: Final = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS: Final = {SILU: 0, GELU_TANH: 1}
NO_SLOTS: Final = torch.empty(0, dtype=torch.int64)


class NativeOps(Ops):
    """The native CPU backend: one call for each op in float32 and bfloat16, torch for other dtypes.

    Rounds where torch does. The bits of a row depend neither on the other rows nor on torch's number of threads.
    """

    def __init__(self, variant: str) -> None:
        """Use one of VARIANTS. Raises ValueError if it is unavailable."""
        library = ops_library()
        kernel = None if library is None else library.kernel(variant)
        if library is None or kernel is None:
            raise ValueError(f"there are no {variant} ops here")
        self.variant: Final = variant
        self._library, self._kernel = library, kernel
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        return dtype in ELEMENTS

    def norm(self, x: torch.Tensor, norm: Norm, delta: torch.Tensor | None = None) -> torch.Tensor:
        if not _are_usual(x, delta):
            return super().norm(x, norm, delta)
        output = torch.empty_like(x)
        self._run(_native_norm(x, norm, output, delta), x)
        return output

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> None:
        if _are_usual(x, delta):
            self._run(_native_norm(delta, norm, x, increases=True), x)
        else:
            super().add_norm(x, delta, norm)

    def _run(self, norm: NativeNorm, x: torch.Tensor) -> None:
        self._library.norm(self._kernel, *threads_for(x.numel()), ctypes.addressof(norm), x.shape[0])

    def rotate_and_store(
        self, heads: torch.Tensor, rotation: Rotation, kv: KVSlots, norms: HeadNorms | None = None
    ) -> torch.Tensor:
        """Norm and rotate queries and keys of heads [T, H + 2 K, D], and store keys and values in the KV pool.

        Returns the queries [T, H, D]; without `norms` they are only rotated. Raises IndexError, and writes nothing, if
        a slot is outside the pool.
        """
        pool = kv.pool
        element, num_kv_heads = ELEMENTS.get(heads.dtype), pool.layout.num_kv_heads
        num_rows, num_all_heads, head_dim = heads.shape
        is_usual = heads.dtype == pool.compute_dtype and heads.stride() == (num_all_heads * head_dim, head_dim, 1)
        if element is None or not is_usual:
            return super().rotate_and_store(heads, rotation, kv, norms)
        store = _head_store(heads, rotation, kv, norms)
        num_slots = pool.num_blocks * pool.layout.block_size
        failed = self._library.rotate_and_store(
            self._kernel, *threads_for(heads.numel()), ctypes.addressof(store), num_rows, num_slots
        )
        if failed:
            raise IndexError(f"there is a slot outside the {pool.num_blocks} blocks of the KV pool")
        if pool.layout.is_quantized:
            pool.store(kv.layer, kv.slots, heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:])
        return heads[:, : num_all_heads - 2 * num_kv_heads]

    def gate(self, gates_and_ups: torch.Tensor, activation: str = SILU) -> torch.Tensor:
        element = ELEMENTS.get(gates_and_ups.dtype)
        if element is None or gates_and_ups.stride(1) != 1:
            return super().gate(gates_and_ups, activation)
        num_rows, num_columns = gates_and_ups.shape[0], gates_and_ups.shape[1] // 2
        output = gates_and_ups.new_empty((num_rows, num_columns))
        self._library.gate(
            self._kernel,
            *threads_for(num_rows * num_columns),
            element,
            ACTIVATIONS[activation],
            num_rows,
            num_columns,
            gates_and_ups.data_ptr(),
            gates_and_ups.stride(0) * output.itemsize,
            output.data_ptr(),
        )
        return output

    def cap(self, logits: torch.Tensor, cap: float) -> None:
        element = ELEMENTS.get(logits.dtype)
        if element is None or logits.stride(1) != 1:
            super().cap(logits, cap)
            return
        rows = (*logits.shape, logits.data_ptr(), logits.stride(0) * logits.itemsize)
        self._library.cap(self._kernel, *threads_for(logits.numel()), element, *rows, cap)

    def likeliest(self, logits: torch.Tensor) -> Likeliest:
        element = ELEMENTS.get(logits.dtype)
        if element is None or logits.stride(1) != 1:
            return super().likeliest(logits)
        num_rows, num_columns = logits.shape
        highest, tokens = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        self._library.search(
            self._kernel,
            *threads_for(num_rows * num_columns),
            element,
            num_rows,
            num_columns,
            logits.data_ptr(),
            logits.stride(0) * logits.itemsize,
            highest.data_ptr(),
            tokens.data_ptr(),
        )
        return highest, tokens

    def sample(self, logits: torch.Tensor, highest: torch.Tensor, samplings: Sequence[RowSampling]) -> torch.Tensor:
        """Sample a token for each of `samplings` from its row of logits; int64 [len(samplings)].

        `highest` [S], float32, holds the maximum of each row.
        """
        if logits.dtype not in ELEMENTS or logits.stride(1) != 1:
            return super().sample(logits, highest, samplings)
        return self._sampled(logits, highest, samplings)[0]

    def log_totals(self, logits: torch.Tensor, highest: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        if logits.dtype not in ELEMENTS or logits.stride(1) != 1:
            return super().log_totals(logits, highest, rows)
        _, masses = self._sampled(logits, highest, [RowSampling(row, 0.0, 1.0) for row in rows])
        return highest[[*rows]] + masses.log_()

    def _sampled(
        self, logits: torch.Tensor, highest: torch.Tensor, samplings: Sequence[RowSampling]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens, and the masses of all tokens that stayed."""
        num_columns, num_rows = logits.shape[1], len(samplings)
        tokens, masses = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.float64)
        parallel, num_threads = threads_for(num_rows * num_columns)
        num_threads = min(num_threads, num_rows)
        scratch_bytes = self._library.sample_bytes(num_columns)
        scratch = self._take_scratch(num_threads * scratch_bytes)
        native_samplings = (NativeSampling * num_rows)(*(NativeSampling(*each) for each in samplings))
        batch = SamplingBatch(
            ELEMENTS[logits.dtype],
            num_columns,
            logits.data_ptr(),
            logits.stride(0) * logits.itemsize,
            highest.data_ptr(),
            ctypes.addressof(native_samplings),
            scratch.data_ptr(),
            scratch_bytes,
            tokens.data_ptr(),
            masses.data_ptr(),
        )
        self._library.sample(self._kernel, parallel, num_threads, num_rows, ctypes.addressof(batch))
        self._scratch = scratch
        return tokens, masses

    def _take_scratch(self, num_bytes: int) -> torch.Tensor:
        """Return the memory of the last call if large enough, since touching new memory takes longer than sampling.

        No other thread gets it until it is given back.
        """
        scratch, self._scratch = self._scratch, torch.empty(0, dtype=torch.uint8)
        return scratch if len(scratch) >= num_bytes else torch.empty(num_bytes, dtype=torch.uint8)

    def route(self, logits: torch.Tensor, num_chosen: int, is_normalized: bool) -> Routing:
        if logits.dtype not in ELEMENTS:
            return super().route(logits, num_chosen, is_normalized)
        logits = logits.contiguous()
        num_tokens, num_experts = logits.shape
        routing = Routing(
            tokens=torch.empty(num_tokens * num_chosen, dtype=torch.int64),
            starts=torch.empty(num_experts + 1, dtype=torch.int32),
            places=torch.empty((num_tokens, num_chosen), dtype=torch.int64),
            weights=torch.empty((num_tokens, num_chosen)),
        )
        chosen = torch.empty((num_tokens, num_chosen), dtype=torch.int32)
        sizes = (ELEMENTS[logits.dtype], num_tokens, num_experts, num_chosen, is_normalized)
        tensors = (tensor.data_ptr() for tensor in (logits, chosen, *routing))
        self._library.route(*threads_for(logits.numel()), *sizes, *tensors)
        return routing

    def mix(self, rows: torch.Tensor, routing: Routing, shared: Shared | None) -> torch.Tensor:
        if rows.dtype not in ELEMENTS:
            return super().mix(rows, routing, shared)
        num_tokens, num_chosen = routing.places.shape
        outputs = rows.new_empty((num_tokens, rows.shape[1]))
        sizes = (ELEMENTS[rows.dtype], num_tokens, rows.shape[1], num_chosen)
        inputs = (tensor.data_ptr() for tensor in (rows, routing.places, routing.weights))
        of_shared = (None, None) if shared is None else (tensor.data_ptr() for tensor in shared)
        self._library.mix(*threads_for(rows.numel()), *sizes, *inputs, *of_shared, outputs.data_ptr())
        return outputs

    def record_norm(
        self,
        program: NativeProgram,
        x: torch.Tensor,
        norm: Norm,
        output: torch.Tensor,
        delta: torch.Tensor | None = None,
    ) -> None:
        """Append to `program` the norm of x, after the addition of delta if given, into `output`.

        `output` may be x itself. Rows are float32 or bfloat16.
        """
        self._record(program, _native_norm(x, norm, output, delta))

    def record_add_norm(self, program: NativeProgram, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> None:
        """Append to `program` the addition of the norm of delta to x, for float32 or bfloat16 rows."""
        self._record(program, _native_norm(delta, norm, x, increases=True))

    def _record(self, program: NativeProgram, norm: NativeNorm) -> None:
        program.add(self._library.add_norm, self._kernel, ctypes.addressof(norm))

    def record_sum(self, program: NativeProgram, x: torch.Tensor, delta: torch.Tensor) -> None:
        """Append x += delta to `program`, for contiguous float32 or bfloat16 rows."""
        kind = (ELEMENTS[x.dtype], x.shape[1])
        program.add(self._library.add_sum, self._kernel, *kind, x.data_ptr(), delta.data_ptr())

    def record_rotate_and_store(
        self,
        program: NativeProgram,
        heads: torch.Tensor,
        rotation: Rotation,
        pool: PagedKVPool,
        layer: int,
        slots: ctypes.c_void_p,
        norms: HeadNorms | None,
    ) -> None:
        """Append to `program` the norm and rotation of `heads`, and the store of keys and values of one layer.

        The pool is unquantized; `norms` None only rotates. When the program runs, `slots` must hold the address of the
        rows' slots, int64; a run does nothing if one of them is outside the pool.
        """
        store = _head_store(heads, rotation, KVSlots(pool, layer, NO_SLOTS), norms)
        num_slots = pool.num_blocks * pool.layout.block_size
        where = ctypes.addressof(slots)
        program.add(self._library.add_rotate_and_store, self._kernel, ctypes.addressof(store), num_slots, where)

    def record_gather(
        self, program: NativeProgram, table: Table, numbers: ctypes.c_void_p, output: torch.Tensor
    ) -> None:
        """Append to `program` the copy of rows of a table into the contiguous rows of `output`, which are as long.

        When the program runs, `table` must describe a contiguous table, and `numbers` hold the address of the rows'
        numbers, int64; a run does nothing if one of them is outside the table.
        """
        row_bytes = output[0].numel() * output.itemsize
        where = ctypes.addressof(table), ctypes.addressof(numbers)
        program.add(self._library.add_gather, *where, row_bytes, output.data_ptr())

    def record_gate(
        self, program: NativeProgram, gates_and_ups: torch.Tensor, output: torch.Tensor, activation: str = SILU
    ) -> None:
        """Append to `program` the activation of the first half of the columns of gates_and_ups, times the second half.

        The result is written to `output`. Rows are contiguous, float32 or bfloat16.
        """
        program.add(
            self._library.add_gate,
            self._kernel,
            ELEMENTS[output.dtype],
            ACTIVATIONS[activation],
            output.shape[1],
            gates_and_ups.data_ptr(),
            gates_and_ups.shape[1] * output.itemsize,
            output.data_ptr(),
        )

    def record_cap(self, program: NativeProgram, logits: torch.Tensor, cap: float) -> None:
        """Append to `program` the replacement of each logit by cap * tanh(logit / cap), in place.

        Rows are contiguous, float32 or bfloat16.
        """
        kind = (ELEMENTS[logits.dtype], logits.shape[1])
        program.add(
            self._library.add_cap, self._kernel, *kind, logits.data_ptr(), logits.shape[1] * logits.itemsize, cap
        )

    def record_search(
        self, program: NativeProgram, logits: torch.Tensor, highest: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Append to `program` the search for each row's maximum of the logits, into `highest`, and its token.

        The token goes into `tokens`, int64; `highest` is float32. Rows are contiguous, float32 or bfloat16.
        """
        kind, stride = (ELEMENTS[logits.dtype], logits.shape[1]), logits.shape[1] * logits.itemsize
        where = logits.data_ptr(), stride, highest.data_ptr(), tokens.data_ptr()
        program.add(self._library.add_search, self._kernel, *kind, *where)


def _are_usual(x: torch.Tensor, delta: torch.Tensor | None) -> bool:
    """Return whether the kernels support these rows."""
    are_rows = x.dim() == 2 and x.stride(1) == 1 and (delta is None or delta.stride(1) == 1)
    return x.dtype in ELEMENTS and are_rows


def _native_norm(
    x: torch.Tensor,
    norm: Norm,
    output: torch.Tensor,
    delta: torch.Tensor | None = None,
    increases: bool = False,
) -> NativeNorm:
    size = x.itemsize
    return NativeNorm(
        ELEMENTS[x.dtype],
        ELEMENTS[norm.weight.dtype],
        x.shape[1],
        increases,
        norm.centers,
        norm.eps,
        norm.delta_scale,
        norm.weight.data_ptr(),
        x.data_ptr(),
        x.stride(0) * size,
        None if delta is None else delta.data_ptr(),
        0 if delta is None else delta.stride(0) * size,
        output.data_ptr(),
        output.stride(0) * size,
    )


def _head_store(heads: torch.Tensor, rotation: Rotation, kv: KVSlots, norms: HeadNorms | None) -> HeadStore:
    """Describe the store of contiguous heads [T, H + 2 K, D]. A quantized pool is not written."""
    layout, (_, num_all_heads, head_dim) = kv.pool.layout, heads.shape
    element, num_kv_heads = ELEMENTS[heads.dtype], layout.num_kv_heads
    store = HeadStore(element, element, num_all_heads - 2 * num_kv_heads, num_kv_heads, head_dim)
    store.heads, store.stride = heads.data_ptr(), num_all_heads * head_dim * heads.itemsize
    store.cosines, store.signed_sines = (table.data_ptr() for table in rotation)
    if norms is not None:
        store.query_weight, store.key_weight = norms.query_weight.data_ptr(), norms.key_weight.data_ptr()
        store.eps, store.weight_element = norms.eps, ELEMENTS[norms.query_weight.dtype]
    if not layout.is_quantized:
        store.keys, store.values = kv.pool.keys(kv.layer).data_ptr(), kv.pool.values(kv.layer).data_ptr()
        store.slots = kv.slots.data_ptr()
    return store
