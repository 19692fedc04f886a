"""The nucleus of weights on CUDA, without sorting a vocabulary: a kernel of Triton."""

from typing import Final

import torch
import triton
import triton.language as tl

from engine.model.draws import LIKELIEST_MASS

COLUMNS: Final = 2048  # that a program looks at together
NUM_WARPS: Final = 8
LARGEST_BIT: Final = 29  # of weights up to 1 as float32


@triton.jit  # type: ignore[untyped-decorator]
def find_edges(  # type: ignore[no-untyped-def]
    weights,
    needed,
    edges,
    row_stride,
    num_columns,
    MASS: tl.constexpr,
    HIGHEST: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Of one row the largest number such that all weights from it on have as much mass as is needed; 0 where nothing
    is. Numbers of one sign are in the order of their bits, which are found one by one."""
    row = tl.program_id(0).to(tl.int64)
    need = tl.load(needed + row)
    edge = 0
    if need > 0:
        for step in range(HIGHEST + 1):
            tried = edge | (1 << (HIGHEST - step))
            masses = tl.zeros([COLUMNS], tl.int64)
            for start in range(0, num_columns, COLUMNS):
                columns = start + tl.arange(0, COLUMNS)
                weight = tl.load(weights + row * row_stride + columns, mask=columns < num_columns, other=0.0)
                weight = tl.where(weight <= 1, weight, 1.0)  # of a row that is to fail, what is no number
                is_above = weight.to(tl.int32, bitcast=True) >= tried
                masses += tl.where(is_above, (weight * MASS).to(tl.int64), 0)
            edge = tl.where(tl.sum(masses, 0) >= need, tried, edge)
    tl.store(edges + row, tl.cast(edge, tl.float32, bitcast=True))


def least_in_nuclei(weights: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """As LeastInNuclei."""
    edges = torch.empty_like(needed, dtype=torch.float32)
    with torch.cuda.device(weights.device):
        find_edges[(len(weights),)](
            weights,
            needed,
            edges,
            weights.stride(0),
            weights.shape[1],
            MASS=LIKELIEST_MASS,
            HIGHEST=LARGEST_BIT,
            COLUMNS=COLUMNS,
            num_warps=NUM_WARPS,
        )
    return edges
