"""Compute the ops between a decoder's products on CPUs with the compiled kernels of engine/native/steps*.c, if built.

As with the attention kernels, SPLITSERVE_NATIVE names the variant; without it the best for this CPU is used.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from engine.cache.kv_pool import PagedKVPool
from engine.model.draws import Draw
from engine.model.rope import Rotation
from engine.model.steps import HeadNorms, Likeliest, TorchSteps
from engine.native import library as native_library
from engine.native.program import NativeProgram
from engine.native.threads import threads_for
from serving_core.model_files.differences import GELU_TANH, SILU

VERSION: Final = 5  # STEPS_VERSION in native/steps.h
ELEMENTS: Final = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS: Final = {SILU: 0, GELU_TANH: 1}
VARIANTS: Final = ("avx512", "avx2", "plain")  # the fastest first

_VARIANT_OF: Final = {"amx": "avx512", "avx512_bf16": "avx512", "avx512": "avx512", "avx2": "avx2", "plain": "plain"}


class Norm(ctypes.Structure):
    """Norm in native/steps.h."""

    _fields_ = [
        ("element", ctypes.c_int32),
        ("weight_element", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("increases", ctypes.c_int32),
        ("centers", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("delta_scale", ctypes.c_float),
        ("weight", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("delta", ctypes.c_void_p),
        ("delta_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("output_stride", ctypes.c_int64),
    ]


class Placement(ctypes.Structure):
    """Placement in native/steps.h."""

    _fields_ = [
        ("element", ctypes.c_int32),
        ("weight_element", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("query_weight", ctypes.c_void_p),
        ("key_weight", ctypes.c_void_p),
        ("heads", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("cosines", ctypes.c_void_p),
        ("signed_sines", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
    ]


class NativeDraw(ctypes.Structure):
    """Draw in native/steps.h."""

    _fields_ = [
        ("row", ctypes.c_int64),
        ("number", ctypes.c_double),
        ("temperature", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("top_k", ctypes.c_int64),
    ]


class Drawing(ctypes.Structure):
    """Drawing in native/steps.h."""

    _fields_ = [
        ("element", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("rows", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("highest", ctypes.c_void_p),
        ("draws", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("masses", ctypes.c_void_p),
    ]


class StepLibrary:
    """The functions of the compiled library."""

    def __init__(self, path: Path) -> None:
        """Load the file. Raises OSError if it cannot be loaded or has another version."""
        library = ctypes.CDLL(str(path))
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        run: list[Any] = [pointer, pointer, int32]
        rows = [*run, int32, int32, int32]
        self._kernel = library.steps_kernel
        self._kernel.restype = pointer
        self._kernel.argtypes = [ctypes.c_char_p]
        self.norm, self.place, self.gate = library.steps_norm, library.steps_place, library.steps_gate
        self.search, self.cap = library.steps_search, library.steps_cap
        self.norm.argtypes = [*run, pointer, int32]
        self.place.argtypes = [*run, pointer, int32, int64]
        self.gate.argtypes = [*run, int32, int32, int32, int32, pointer, int64, pointer]
        self.search.argtypes = [*rows, pointer, int64, pointer, pointer]
        self.cap.argtypes = [*rows, pointer, int64, ctypes.c_float]
        self.draw, self.draw_bytes = library.steps_draw, library.steps_draw_bytes
        self.draw.argtypes = [*run, int32, pointer]
        self.draw_bytes.argtypes, self.draw_bytes.restype = [int64], int64
        for function in (self.norm, self.gate, self.search, self.cap, self.draw):
            function.restype = None
        self.add_norm, self.add_place = library.steps_add_norm, library.steps_add_place
        self.add_gate, self.add_cap = library.steps_add_gate, library.steps_add_cap
        self.add_sum, self.add_search = library.steps_add_sum, library.steps_add_search
        self.add_norm.argtypes = [pointer, pointer, pointer]
        self.add_sum.argtypes = [pointer, pointer, int32, int32, pointer, pointer]
        self.add_place.argtypes = [pointer, pointer, pointer, int64]
        self.add_gate.argtypes = [pointer, pointer, int32, int32, int32, pointer, int64, pointer]
        self.add_cap.argtypes = [pointer, pointer, int32, int32, pointer, int64, ctypes.c_float]
        self.add_search.argtypes = [pointer, pointer, int32, int32, pointer, int64, pointer, pointer]
        adding = (self.add_norm, self.add_sum, self.add_place, self.add_gate, self.add_cap, self.add_search)
        for function in (self.place, *adding):
            function.restype = int32
        is_ours = library.steps_version() == VERSION
        for size, structure in (
            (library.steps_norm_bytes, Norm),
            (library.steps_placement_bytes, Placement),
            (library.steps_drawing_bytes, Drawing),
        ):
            size.restype = int64
            is_ours = is_ours and size() == ctypes.sizeof(structure)
        if not is_ours:
            raise OSError(f"{path.name} is of another version: install the package again")

    def kernel(self, variant: str) -> int | None:
        """Return the address of one of VARIANTS; None if the CPU does not support it."""
        address: int | None = self._kernel(variant.encode())
        return address


def step_library() -> StepLibrary | None:
    """Return the ops of this installation's library; None if it was not built or cannot be used.

    The log tells the reason for None.
    """
    return native_library.load(StepLibrary)


def best_variant() -> str | None:
    """Return the variant for ops; None without native kernels. Raises UnknownVariant."""
    return native_library.best_variant(step_library(), _VARIANT_OF)


class NativeSteps:
    """The native CPU backend: float32 and bfloat16 with one call each, other dtypes with torch. Rounds where torch
    does.

    The bits of a row depend neither on the other rows nor on torch's number of threads.
    """

    def __init__(self, variant: str) -> None:
        """Use one of VARIANTS. Raises ValueError if it is unavailable."""
        library = step_library()
        kernel = None if library is None else library.kernel(variant)
        if library is None or kernel is None:
            raise ValueError(f"there are no {variant} steps here")
        self.variant: Final = variant
        self._library, self._kernel = library, kernel
        self._portable = TorchSteps()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def is_invariant(self, dtype: torch.dtype) -> bool:
        return dtype in ELEMENTS

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        delta: torch.Tensor | None = None,
        delta_scale: float = 1.0,
        centers: bool = False,
    ) -> torch.Tensor:
        if not _are_usual(x, delta):
            return self._portable.norm(x, weight, eps, delta, delta_scale, centers)
        output = torch.empty_like(x)
        self._run(_norm(x, weight, eps, output, delta, delta_scale, centers), x)
        return output

    def norm_onto(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        if _are_usual(x, delta):
            self._run(_norm(delta, weight, eps, x, increases=True), x)
        else:
            self._portable.norm_onto(x, delta, weight, eps)

    def _run(self, norm: Norm, x: torch.Tensor) -> None:
        self._library.norm(self._kernel, *threads_for(x.numel()), ctypes.addressof(norm), x.shape[0])

    def place(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        pool: PagedKVPool,
        layer: int,
        slots: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Place as Steps.place. Raises IndexError, and writes nothing, if a slot is outside the pool."""
        element, num_kv_heads = ELEMENTS.get(heads.dtype), pool.layout.num_kv_heads
        num_rows, num_all_heads, head_dim = heads.shape
        is_usual = heads.dtype == pool.compute_dtype and heads.stride() == (num_all_heads * head_dim, head_dim, 1)
        if element is None or not is_usual:
            return self._portable.place(heads, rotation, pool, layer, slots, norms)
        placement = _placement(heads, rotation, pool, layer, slots, norms)
        failed = self._library.place(
            self._kernel,
            *threads_for(heads.numel()),
            ctypes.addressof(placement),
            num_rows,
            pool.num_blocks * pool.layout.block_size,
        )
        if failed:
            raise IndexError(f"there is a slot outside the {pool.num_blocks} blocks of the KV pool")
        if pool.layout.is_quantized:
            pool.store(layer, slots, heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:])
        return heads[:, : num_all_heads - 2 * num_kv_heads]

    def gate(self, gates_and_ups: torch.Tensor, activation: str = SILU) -> torch.Tensor:
        element = ELEMENTS.get(gates_and_ups.dtype)
        if element is None or gates_and_ups.stride(1) != 1:
            return self._portable.gate(gates_and_ups, activation)
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
            self._portable.cap(logits, cap)
            return
        rows = (*logits.shape, logits.data_ptr(), logits.stride(0) * logits.itemsize)
        self._library.cap(self._kernel, *threads_for(logits.numel()), element, *rows, cap)

    def likeliest(self, logits: torch.Tensor) -> Likeliest:
        element = ELEMENTS.get(logits.dtype)
        if element is None or logits.stride(1) != 1:
            return self._portable.likeliest(logits)
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

    def draw(self, logits: torch.Tensor, highest: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        if logits.dtype not in ELEMENTS or logits.stride(1) != 1:
            return self._portable.draw(logits, highest, draws)
        return self._drawn(logits, highest, draws)[0]

    def log_totals(self, logits: torch.Tensor, highest: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        if logits.dtype not in ELEMENTS or logits.stride(1) != 1:
            return self._portable.log_totals(logits, highest, rows)
        _, masses = self._drawn(logits, highest, [Draw(row, 0.0, 1.0) for row in rows])
        return highest[[*rows]] + masses.log_()

    def _drawn(
        self, logits: torch.Tensor, highest: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens, and the masses of all tokens that stayed."""
        num_columns, num_draws = logits.shape[1], len(draws)
        tokens, masses = torch.empty(num_draws, dtype=torch.int64), torch.empty(num_draws, dtype=torch.float64)
        parallel, num_threads = threads_for(num_draws * num_columns)
        num_threads = min(num_threads, num_draws)
        scratch_bytes = self._library.draw_bytes(num_columns)
        scratch = self._take_scratch(num_threads * scratch_bytes)
        native_draws = (NativeDraw * num_draws)(*(NativeDraw(*draw) for draw in draws))
        drawing = Drawing(
            ELEMENTS[logits.dtype],
            num_columns,
            logits.data_ptr(),
            logits.stride(0) * logits.itemsize,
            highest.data_ptr(),
            ctypes.addressof(native_draws),
            scratch.data_ptr(),
            scratch_bytes,
            tokens.data_ptr(),
            masses.data_ptr(),
        )
        self._library.draw(self._kernel, parallel, num_threads, num_draws, ctypes.addressof(drawing))
        self._scratch = scratch
        return tokens, masses

    def _take_scratch(self, num_bytes: int) -> torch.Tensor:
        """Return the memory of the last call if large enough, since touching new memory takes longer than a draw.

        No other thread gets it until it is given back.
        """
        scratch, self._scratch = self._scratch, torch.empty(0, dtype=torch.uint8)
        return scratch if len(scratch) >= num_bytes else torch.empty(num_bytes, dtype=torch.uint8)

    def record_norm(
        self,
        program: NativeProgram,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        delta: torch.Tensor | None,
        output: torch.Tensor,
        delta_scale: float = 1.0,
        centers: bool = False,
    ) -> None:
        """Append `norm` to a program, for float32 or bfloat16 rows. The output may be x itself."""
        self._record(program, _norm(x, weight, eps, output, delta, delta_scale, centers))

    def record_norm_onto(
        self, program: NativeProgram, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        """Append `norm_onto` to a program, for float32 or bfloat16 rows."""
        self._record(program, _norm(delta, weight, eps, x, increases=True))

    def _record(self, program: NativeProgram, norm: Norm) -> None:
        program.add(self._library.add_norm, self._kernel, ctypes.addressof(norm))

    def record_sum(self, program: NativeProgram, x: torch.Tensor, delta: torch.Tensor) -> None:
        """Append x += delta to a program, for contiguous float32 or bfloat16 rows."""
        kind = (ELEMENTS[x.dtype], x.shape[1])
        program.add(self._library.add_sum, self._kernel, *kind, x.data_ptr(), delta.data_ptr())

    def record_place(
        self,
        program: NativeProgram,
        heads: torch.Tensor,
        rotation: Rotation,
        pool: PagedKVPool,
        layer: int,
        slots: torch.Tensor,
        norms: HeadNorms | None,
    ) -> None:
        """Append `place` to a program, for an unquantized pool. A run does nothing if one of its slots is outside the
        pool.
        """
        placement = _placement(heads, rotation, pool, layer, slots, norms)
        num_slots = pool.num_blocks * pool.layout.block_size
        program.add(self._library.add_place, self._kernel, ctypes.addressof(placement), num_slots)

    def record_gate(
        self, program: NativeProgram, gates_and_ups: torch.Tensor, output: torch.Tensor, activation: str = SILU
    ) -> None:
        """Append `gate` to a program, for contiguous float32 or bfloat16 rows."""
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
        """Append `cap` to a program, for contiguous float32 or bfloat16 rows."""
        kind = (ELEMENTS[logits.dtype], logits.shape[1])
        program.add(
            self._library.add_cap, self._kernel, *kind, logits.data_ptr(), logits.shape[1] * logits.itemsize, cap
        )

    def record_search(
        self, program: NativeProgram, logits: torch.Tensor, highest: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Append `likeliest` to a program, for contiguous float32 or bfloat16 rows; results are float32 and int64."""
        kind, stride = (ELEMENTS[logits.dtype], logits.shape[1]), logits.shape[1] * logits.itemsize
        where = logits.data_ptr(), stride, highest.data_ptr(), tokens.data_ptr()
        program.add(self._library.add_search, self._kernel, *kind, *where)


def _are_usual(x: torch.Tensor, delta: torch.Tensor | None) -> bool:
    """Return whether the kernels support these rows."""
    return x.dtype in ELEMENTS and x.stride(1) == 1 and (delta is None or delta.stride(1) == 1)


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    output: torch.Tensor,
    delta: torch.Tensor | None = None,
    delta_scale: float = 1.0,
    centers: bool = False,
    increases: bool = False,
) -> Norm:
    size = x.itemsize
    return Norm(
        ELEMENTS[x.dtype],
        ELEMENTS[weight.dtype],
        x.shape[1],
        increases,
        centers,
        eps,
        delta_scale,
        weight.data_ptr(),
        x.data_ptr(),
        x.stride(0) * size,
        None if delta is None else delta.data_ptr(),
        0 if delta is None else delta.stride(0) * size,
        output.data_ptr(),
        output.stride(0) * size,
    )


def _placement(
    heads: torch.Tensor,
    rotation: Rotation,
    pool: PagedKVPool,
    layer: int,
    slots: torch.Tensor,
    norms: HeadNorms | None,
) -> Placement:
    """Describe the placement of contiguous heads [T, H + 2 K, D]. A quantized pool is not written."""
    num_kv_heads, (_, num_all_heads, head_dim) = pool.layout.num_kv_heads, heads.shape
    element = ELEMENTS[heads.dtype]
    placement = Placement(element, element, num_all_heads - 2 * num_kv_heads, num_kv_heads, head_dim)
    placement.heads, placement.stride = heads.data_ptr(), num_all_heads * head_dim * heads.itemsize
    placement.cosines, placement.signed_sines = (table.data_ptr() for table in rotation)
    if norms is not None:
        placement.query_weight, placement.key_weight = norms.query_weight.data_ptr(), norms.key_weight.data_ptr()
        placement.eps, placement.weight_element = norms.eps, ELEMENTS[norms.query_weight.dtype]
    if not pool.layout.is_quantized:
        placement.keys, placement.values = pool.keys(layer).data_ptr(), pool.values(layer).data_ptr()
        placement.slots = slots.data_ptr()
    return placement
