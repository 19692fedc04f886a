"""`python -m tests.gpu.compile_triton CAPABILITY`: compiles attention by Triton for a device of that compute
capability, such as 90, which takes no device, and writes the bytes of shared memory that each program takes. To be run
by a process whose Triton does not interpret."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.triton_paged import FEW_ROWS, LOG2_E, MANY_ROWS, NOTHING, TILE_KEYS, attend

# dtype, that of the pool, size of heads, heads of a key, tokens of a block, rows, are scores capped, is there a window
CASES = [
    ("bf16", "bf16", 128, 4, 16, FEW_ROWS, False, False),
    ("bf16", "bf16", 128, 4, 16, MANY_ROWS, False, False),
    ("bf16", "bf16", 64, 8, 256, MANY_ROWS, False, True),
    ("fp16", "fp16", 256, 2, 16, MANY_ROWS, True, True),
    ("fp32", "fp32", 64, 4, 16, FEW_ROWS, True, False),
    ("bf16", "i8", 128, 4, 16, FEW_ROWS, False, False),
    ("bf16", "i8", 128, 4, 16, MANY_ROWS, False, False),
    ("bf16", "fp8e4nv", 128, 4, 16, MANY_ROWS, False, False),
]
LEAST_FOR_FP8 = 89  # below, a pool of it is read by the portable attention
POINTERS = {"query_starts": "*i32", "kv_lengths": "*i32", "block_tables": "*i32"}
NUMBERS = {"scale": "fp32", "softcap": "fp32"}


def compiled(capability, dtype, stored, head_dim, group, block_size, rows, has_cap, has_window):
    constants = {
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "ROWS": rows,
        "KEYS": TILE_KEYS,
        "HAS_CAP": has_cap,
        "HAS_WINDOW": has_window,
        "HAS_SCALES": stored != dtype,
        "LOWEST": NOTHING,
        "LOG2_E": LOG2_E,
    }
    scales = "fp32" if stored != dtype else dtype
    pointers = {"queries": dtype, "keys": stored, "values": stored, "attended": dtype}
    pointers |= {"key_scales": scales, "value_scales": scales}
    types = {**POINTERS, **NUMBERS, **{name: f"*{element}" for name, element in pointers.items()}}
    names = attend.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    of_places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if name.endswith("stride") or signature[name].startswith("*")]
    aligned.remove("table_stride")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(attend, signature, of_places, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


if __name__ == "__main__":
    for case in CASES:
        if "fp8e4nv" in case and int(sys.argv[1]) < LEAST_FOR_FP8:
            continue
        kernel = compiled(int(sys.argv[1]), *case)
        assert kernel.asm["cubin"]
        sys.stdout.write(f"{kernel.metadata.shared}\n")
