"""Multiply by weights of 4 or 8 bits with Triton kernels, which read the weights as QuantizedMatrix packs them.

For few rows a program unpacks weights in its registers, so that a step reads only the packed weights from memory. Many
rows would repeat that for each tile of rows, so the weights are unpacked first.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch.nn import functional

from engine.quantization.weight_quantization import Packed

WORD_BITS: Final = 32
TILE_INPUTS: Final = 128  # of a program at a time
TILE_OUTPUTS: Final = 64  # of a program
FEW_ROWS, MANY_ROWS = 16, 64  # of a program
FEW_WARPS, MANY_WARPS = 4, 8
STAGES, WIDE_STAGES = 4, 2  # pipeline stages; for 32-bit inputs more would not fit on every device
MOST_ROWS: Final = 256  # up to which unpacking in registers, once per tile of rows, is faster than unpacking first
PROGRAMS: Final = 512  # programs that fill a device
LEAST_TILES: Final = 4  # of a program that shares inputs with others
ADDED: Final = 1024  # values of a program
UNPACKED_OUTPUTS: Final = 32  # of a program
UNPACKED_ELEMENTS: Final = 2**25  # unpacked at a time


@triton.jit  # type: ignore[untyped-decorator]
def shift_of(place, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bit position of the input number `place` in its 32-bit word of weights.

    Bytes are in order; of two inputs in a byte the second is four bits higher.
    """
    return (place if BITS == 8 else place % 4 * 2 + place // 4) * BITS


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def multiply(  # type: ignore[no-untyped-def]
    inputs,
    weights,
    scales,
    zeros,
    bias,
    outputs,
    num_rows,
    num_inputs,
    num_outputs,
    num_words,
    num_groups,
    group_words,
    split_words,
    row_stride,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
    OF_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Multiply ROWS rows of `inputs` [num_rows, num_inputs] by COLUMNS of the outputs.

    Writes to outputs [splits, num_rows, num_outputs]. The grid is (tile of outputs, split, tile of rows); each split
    takes split_words of the num_words 32-bit words of each output. OF_GROUPS: a tile of WORDS words may span several
    groups, of group_words words each. `weights`, `scales`, `zeros` and `bias` are those of Packed; rows of inputs are
    row_stride elements apart.
    """
    split = tl.program_id(1)
    rows, columns = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < num_outputs
    vector, place = (columns // VECTOR).to(tl.int64), columns % VECTOR
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(split * split_words, tl.minimum(num_words, (split + 1) * split_words), WORDS):
        words = first + tl.arange(0, WORDS)
        is_word = words < num_words
        there = is_word[:, None] & is_column[None, :]
        packed = tl.load(weights + (vector[None, :] * num_words + words[:, None]) * VECTOR + place[None, :], there, 0)
        groups = words // group_words if OF_GROUPS else first // group_words + tl.arange(0, 1)
        has_group = (groups < num_groups)[:, None] & is_column[None, :]
        of_groups = (vector[None, :] * num_groups + groups[:, None]) * VECTOR + place[None, :]
        scale = tl.load(scales + of_groups, mask=has_group, other=0.0)
        zero = tl.load(zeros + of_groups, mask=has_group, other=0).to(tl.int32)
        of_tile = tl.zeros([ROWS, COLUMNS], tl.float32)
        for number in tl.static_range(32 // BITS):
            at = words * (32 // BITS) + number
            inside = is_row[:, None] & (at < num_inputs)[None, :]
            row = tl.load(inputs + rows.to(tl.int64)[:, None] * row_stride + at[None, :], mask=inside, other=0.0)
            weight = (((packed >> shift_of(number, BITS)) & ((1 << BITS) - 1)) - zero).to(tl.float32)
            if OF_GROUPS:
                weight *= scale
            of_tile = tl.dot(row, weight.to(row.dtype), of_tile, input_precision="ieee")
        sums += of_tile if OF_GROUPS else of_tile * scale
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    to = (split * num_rows + rows).to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(outputs + to, sums.to(outputs.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_values"])  # type: ignore[untyped-decorator]
def add_up(  # type: ignore[no-untyped-def]
    parts, bias, outputs, num_values, num_outputs, SPLITS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr
) -> None:
    """Sum parts [SPLITS, num_values], float32, over the splits, in order, into outputs [num_values].

    HAS_BIAS: bias [num_outputs] is added too.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_value = at < num_values
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * num_values + at, mask=is_value, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % num_outputs, mask=is_value, other=0.0)
    tl.store(outputs + at, total.to(outputs.dtype.element_ty), mask=is_value)


@triton.jit  # type: ignore[untyped-decorator]
def unpack(  # type: ignore[no-untyped-def]
    weights,
    scales,
    zeros,
    unpacked,
    first_output,
    num_outputs,
    num_inputs,
    num_words,
    num_groups,
    group_words,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Dequantize num_outputs outputs, from first_output on, into unpacked [num_outputs, num_inputs].

    `weights` [num_words per output], `scales` and `zeros` [num_groups per output] are those of Packed; a group has
    group_words words.
    """
    columns, words = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    there = (columns < num_outputs)[:, None] & (words < num_words)[None, :]
    vector, place = (
        ((first_output + columns) // VECTOR).to(tl.int64)[:, None],
        ((first_output + columns) % VECTOR)[:, None],
    )
    packed = tl.load(weights + (vector * num_words + words[None, :]) * VECTOR + place, mask=there, other=0)
    of_groups = (vector * num_groups + (words // group_words)[None, :]) * VECTOR + place
    scale = tl.load(scales + of_groups, mask=there, other=0.0)
    zero = tl.load(zeros + of_groups, mask=there, other=0).to(tl.int32)
    numbers = tl.arange(0, 32 // BITS)
    weight = (packed[:, :, None] >> shift_of(numbers, BITS)[None, None, :]) & ((1 << BITS) - 1)
    weight = (weight - zero[:, :, None]).to(tl.float32) * scale[:, :, None]
    at = words[None, :, None] * (32 // BITS) + numbers[None, None, :]
    to = columns.to(tl.int64)[:, None, None] * num_inputs + at
    tl.store(unpacked + to, weight.to(unpacked.dtype.element_ty), mask=there[:, :, None] & (at < num_inputs))


def linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Multiply x [T, num_inputs] by the packed weights, add their bias, and return [T, num_outputs].

    The inputs are in the packed weights' order.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    with torch.cuda.device(x.device):
        return _multiply(x, packed) if len(x) <= MOST_ROWS else _multiply_unpacked(x, packed)


def _multiply(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    words = packed.words()
    num_words, per_word = words.shape[1], WORD_BITS // packed.bits
    tile_words, num_groups = TILE_INPUTS // per_word, packed.scales.shape[1]
    num_tiles, num_programs = triton.cdiv(num_words, tile_words), triton.cdiv(packed.num_outputs, TILE_OUTPUTS)
    most_splits = min(PROGRAMS // num_programs, num_tiles // LEAST_TILES)
    tiles_each = triton.cdiv(num_tiles, max(1, most_splits))
    splits = triton.cdiv(num_tiles, tiles_each)
    outputs = x.new_empty((len(x), packed.num_outputs))
    parts = outputs if splits == 1 else outputs.new_empty((splits, *outputs.shape), dtype=torch.float32)
    bias = packed.scales if packed.bias is None else packed.bias  # a placeholder where there is no bias
    is_few = len(x) <= FEW_ROWS
    rows = FEW_ROWS if is_few else MANY_ROWS
    multiply[num_programs, splits, triton.cdiv(len(x), rows)](
        x,
        words,
        packed.scales,
        packed.zeros,
        bias,
        parts,
        len(x),
        packed.num_inputs,
        packed.num_outputs,
        num_words,
        num_groups,
        packed.group_size // per_word,
        tiles_each * tile_words,
        x.stride(0),
        BITS=packed.bits,
        ROWS=rows,
        COLUMNS=TILE_OUTPUTS,
        WORDS=tile_words,
        VECTOR=words.shape[2],
        OF_GROUPS=num_groups > 1 and packed.group_size % TILE_INPUTS != 0,
        HAS_BIAS=splits == 1 and packed.bias is not None,
        num_warps=FEW_WARPS if is_few else MANY_WARPS,
        num_stages=WIDE_STAGES if x.itemsize > 2 else STAGES,
    )
    if splits > 1:
        add_up[(triton.cdiv(outputs.numel(), ADDED),)](
            parts,
            bias,
            outputs,
            outputs.numel(),
            packed.num_outputs,
            SPLITS=splits,
            BLOCK=ADDED,
            HAS_BIAS=packed.bias is not None,
        )
    return outputs


def _multiply_unpacked(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    step = max(1, UNPACKED_ELEMENTS // packed.num_inputs)
    outputs = x.new_empty((len(x), packed.num_outputs))
    for first in range(0, packed.num_outputs, step):
        held = slice(first, min(first + step, packed.num_outputs))
        bias = None if packed.bias is None else packed.bias[held].to(x.dtype)
        outputs[:, held] = functional.linear(x, _unpacked(packed, held, x.dtype), bias)
    return outputs


def _unpacked(packed: Packed, held: slice, dtype: torch.dtype) -> torch.Tensor:
    words = packed.words()
    per_word, num_outputs = WORD_BITS // packed.bits, held.stop - held.start
    tile_words = TILE_INPUTS // per_word
    unpacked = torch.empty((num_outputs, packed.num_inputs), dtype=dtype, device=words.device)
    unpack[triton.cdiv(num_outputs, UNPACKED_OUTPUTS), triton.cdiv(words.shape[1], tile_words)](
        words,
        packed.scales,
        packed.zeros,
        unpacked,
        held.start,
        num_outputs,
        packed.num_inputs,
        words.shape[1],
        packed.scales.shape[1],
        packed.group_size // per_word,
        BITS=packed.bits,
        COLUMNS=UNPACKED_OUTPUTS,
        WORDS=tile_words,
        VECTOR=words.shape[2],
    )
    return unpacked
