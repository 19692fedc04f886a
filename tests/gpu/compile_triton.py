"""`python -m tests.gpu.compile_triton CAPABILITY BYTES`: compiles the kernels of Triton for a device of that compute
capability, such as 90, whose programs share at most BYTES of memory. This takes no device, and a process whose Triton
does not interpret. Writes a line of JSON for each of `cases`: what the compiled program takes and has."""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from functools import partial

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.triton_paged import (
    ALONE,
    FEW_ROWS,
    LEAST_TILES,
    LOG2_E,
    MANY_ROWS,
    NOTHING,
    OF_REQUESTS,
    SHARING_ROWS,
    SMALLEST,
    TILE_KEYS,
    attend,
    merge,
    most_rows,
    padded,
    stages_by_rows,
)
from engine.ops import triton as triton_ops
from engine.quantization import triton_linear
from engine.quantization.quantized_linear import OUTPUTS

LEAST_FOR_FP8 = 89  # below, a pool of it is read by the portable attention
FP8 = "fp8e4nv"
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "i8": 1, FP8: 1}
INTEGERS = ("query_starts", "kv_lengths", "block_tables", "weights")
FLOATS = ("parts", "part_sizes", "scales", "bias")
VARYING = ("table_stride", *OF_REQUESTS)  # of any value from call to call
SIZES = ("num_columns", "num_inputs", "num_outputs", "num_words")  # which are multiples of 16 as a rule


def attending(
    memory_bytes, dtype, stored, head_dim, group, block_size, rows, splits=ALONE, has_cap=False, has_window=False
):
    """`stored`: dtype of the pool; `group`: heads of a key; `rows`: at most."""
    stages = stages_by_rows(head_dim, BYTES[dtype], BYTES[stored], memory_bytes)
    rows = most_rows(rows, stages)
    scales = "fp32" if stored != dtype else dtype
    pointers = {"queries": dtype, "keys": stored, "values": stored, "key_scales": scales, "value_scales": scales}
    constants = {
        **of_both(head_dim, group, splits, has_window),
        "BLOCK_SIZE": block_size,
        "ROWS": rows,
        "HAS_CAP": has_cap,
        "HAS_SCALES": stored != dtype,
        "TINY": SMALLEST,
        "LOG2_E": LOG2_E,
    }
    return attend, {"attended": dtype, **pointers}, {"scale": "fp32", "softcap": "fp32"}, constants, stages[rows]


def merging(dtype, head_dim, group, splits, has_window=False):
    return merge, {"attended": dtype}, {}, of_both(head_dim, group, splits, has_window)


def of_both(head_dim, group, splits, has_window):
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded(head_dim),
        "KEYS": TILE_KEYS,
        "SPLITS": splits,
        "LEAST": LEAST_TILES,
        "HAS_WINDOW": has_window,
        "LOWEST": NOTHING,
    }


def multiplying(dtype, bits, is_few, of_groups):
    constants = {
        **of_packed(bits),
        "ROWS": triton_linear.FEW_ROWS if is_few else triton_linear.MANY_ROWS,
        "COLUMNS": triton_linear.TILE_OUTPUTS,
        "OF_GROUPS": of_groups,
        "HAS_BIAS": True,
    }
    warps = triton_linear.FEW_WARPS if is_few else triton_linear.MANY_WARPS
    pointers = {"inputs": dtype, "outputs": dtype, "zeros": "u8"}
    stages = triton_linear.WIDE_STAGES if BYTES[dtype] > 2 else triton_linear.STAGES
    return triton_linear.multiply, pointers, {}, constants, stages, warps


def unpacking(dtype, bits):
    constants = {**of_packed(bits), "COLUMNS": triton_linear.UNPACKED_OUTPUTS}
    return triton_linear.unpack, {"unpacked": dtype, "zeros": "u8"}, {}, constants


def of_packed(bits):
    return {"BITS": bits, "WORDS": triton_linear.TILE_INPUTS * bits // triton_linear.WORD_BITS, "VECTOR": OUTPUTS}


def norming(dtype, weight_dtype, num_columns, *, centers=False):
    columns = triton_ops._columns(num_columns)
    constants = {"HAS_DELTA": True, "IS_SCALED": True, "CENTERS": centers, "COLUMNS": columns["COLUMNS"]}
    pointers = {"x": dtype, "delta": dtype, "outputs": dtype, "weight": weight_dtype}
    numbers = {"eps": "fp32", "delta_scale": "fp32"}
    return triton_ops.norm_rows, pointers, numbers, constants, 3, columns["num_warps"]


def adding_norm(dtype, num_columns):
    columns = triton_ops._columns(num_columns)
    pointers = {"x": dtype, "delta": dtype, "weight": dtype}
    constants = {"COLUMNS": columns["COLUMNS"]}
    return triton_ops.add_norm_rows, pointers, {"eps": "fp32"}, constants, 3, columns["num_warps"]


def storing(dtype, num_heads, num_kv_heads, head_dim, has_norms):
    tensors = ("heads", "cosines", "sines", "query_weight", "key_weight", "queries", "keys", "values")
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KEYS": num_kv_heads,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "HEADS": triton_ops.HEADS,
        "HAS_NORMS": has_norms,
    }
    pointers = {**dict.fromkeys(tensors, dtype), "slots": "i64"}
    return triton_ops.rotate_and_store_heads, pointers, {"eps": "fp32"}, constants


def gating(dtype, *, is_gelu):
    constants = {"IS_GELU": is_gelu, "ROOT": triton_ops.ROOT_2_OVER_PI, "COLUMNS": triton_ops.GATES}
    return triton_ops.gate_rows, {"gates_and_ups": dtype, "outputs": dtype}, {}, constants


def attentions(memory_bytes):
    case = partial(attending, memory_bytes)
    return [
        case("bf16", "bf16", 128, 4, 16, FEW_ROWS, splits=16),
        case("bf16", "bf16", 128, 4, 16, MANY_ROWS),
        case("bf16", "bf16", 64, 8, 256, MANY_ROWS, has_window=True),
        case("fp16", "fp16", 256, 2, 16, MANY_ROWS, has_cap=True, has_window=True),
        case("fp32", "fp32", 128, 4, 16, FEW_ROWS, has_cap=True),
        case("fp16", "fp16", 256, 2, 16, FEW_ROWS, splits=16),
        case("bf16", "i8", 128, 4, 16, FEW_ROWS, splits=64),
        case("bf16", "bf16", 128, 4, 16, SHARING_ROWS, splits=16),
        case("fp16", "fp16", 64, 4, 256, SHARING_ROWS, splits=16, has_cap=True, has_window=True),
        case("bf16", "i8", 128, 4, 16, SHARING_ROWS, splits=64),
        case("bf16", "i8", 128, 4, 16, MANY_ROWS),
        case("bf16", FP8, 128, 4, 16, MANY_ROWS),
    ]


OTHERS = [
    merging("bf16", 128, 4, 16),
    merging("fp16", 256, 2, 64, has_window=True),
    *(multiplying("bf16", *case) for case in itertools.product((4, 8), (True, False), (True, False))),
    multiplying("fp32", 8, is_few=False, of_groups=True),
    unpacking("bf16", 4),
    unpacking("fp16", 8),
    norming("bf16", "bf16", 4096),
    norming("fp16", "fp32", 16384),
    norming("bf16", "bf16", 8192, centers=True),
    adding_norm("bf16", 5376),
    storing("bf16", 32, 8, 128, has_norms=False),
    storing("fp16", 16, 8, 80, has_norms=True),
    gating("bf16", is_gelu=False),
    gating("fp16", is_gelu=True),
    (triton_linear.add_up, {"outputs": "bf16"}, {}, {"SPLITS": 8, "BLOCK": triton_linear.ADDED, "HAS_BIAS": True}),
]


def cases(capability, memory_bytes):
    """Those that there are for such a device."""
    all_cases = attentions(memory_bytes) + OTHERS
    return [case for case in all_cases if capability >= LEAST_FOR_FP8 or FP8 not in case[1].values()]


def compiled(capability, kernel, pointers, numbers, constants, stages=3, warps=4):
    """`pointers` says of what dtype the tensors are that have one, `numbers` what other numbers than int32 are."""
    of = {**dict.fromkeys(INTEGERS, "i32"), **dict.fromkeys(FLOATS, "fp32"), **pointers}
    types = {**numbers, **{name: f"*{dtype}" for name, dtype in of.items()}}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    of_places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if name.endswith(("stride", *SIZES)) or signature[name].startswith("*")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in VARYING}
    source = ASTSource(kernel, signature, of_places, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_stages": stages, "num_warps": warps}
    )


TENSOR_CORES = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
ASYNC_COPY = re.compile(r"cp\.async\.\w+\.shared\.global.*, 0x(\w+),")


def report(kernel):
    """`shared` and `spilled` are bytes, of the program and of each of its threads; `products` are the names of
    instructions of tensor cores, `copies` the sizes of asynchronous copies into shared memory."""
    ptx = kernel.asm["ptx"]
    return {
        "shared": kernel.metadata.shared,
        "spilled": spilled_bytes(kernel.asm["cubin"]),
        "products": sorted(set(TENSOR_CORES.findall(ptx))),
        "copies": sorted({int(size, 16) for size in ASYNC_COPY.findall(ptx)}),
    }


def spilled_bytes(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        argv = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", told)[1])


if __name__ == "__main__":
    capability, memory_bytes = map(int, sys.argv[1:])
    for case in cases(capability, memory_bytes):
        sys.stdout.write(f"{json.dumps(report(compiled(capability, *case)))}\n")
