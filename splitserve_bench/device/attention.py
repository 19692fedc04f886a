"""`python -m splitserve_bench.device.attention SHAPE BATCHES CONTEXTS BLOCK_SIZE`: one layer's attention of decode
steps by each backend that the engine would take, as one JSON list. On CUDA calls are captured, so that the host does
not count."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Final

import torch

from engine.attention.backends import choose_attention
from engine.attention.paged import Attention
from engine.attention.steps_apart import StepsApart
from engine.cache.kv_pool import PagedKVPool
from engine.cuda_graphs import CudaCapture
from engine.forward_batch import build_batch
from serving_core.layout import KVLayout
from serving_core.memory import available_bytes
from serving_core.requests import Share
from splitserve_bench.engine.machine import least_s
from splitserve_bench.engine.random_models import SHAPES

CALLS: Final = 16  # in one measurement, as many layers have
LAYER: Final = 0


@dataclass(frozen=True, slots=True)
class AttentionFigures:
    """Of one call of one backend, and how many bytes of keys and values it reads a second."""

    backend: str
    batch: int
    context_tokens: int
    seconds: float
    bytes_per_s: float


@torch.inference_mode()
def measure_attention(
    shape: str, batches: list[int], contexts: list[int], block_size: int, device: torch.device
) -> list[AttentionFigures]:
    """Sizes whose keys and values take more than half of the memory that is free are left out."""
    sizes = SHAPES[shape]
    layout = KVLayout.uniform(1, sizes.num_kv_heads, sizes.head_dim, block_size, "bfloat16")
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    most_blocks = free // 2 // layout.block_bytes
    counts = {(batch, tokens): batch * layout.num_blocks_for(tokens) for batch in batches for tokens in contexts}
    counts = {size: count for size, count in counts.items() if count <= most_blocks}
    pool = PagedKVPool(layout, max(counts.values(), default=1), device)
    backends = _backends(choose_attention(pool, sizes.num_heads))
    pool.try_values(LAYER, pool.num_blocks)
    return [_measure(backend, batch, tokens, sizes.num_heads) for batch, tokens in counts for backend in backends]


def _backends(chosen: Attention) -> list[Attention]:
    return [chosen.steps, chosen.prompts] if isinstance(chosen, StepsApart) else [chosen]


def _measure(backend: Attention, batch: int, tokens: int, num_heads: int) -> AttentionFigures:
    layout, device = backend.pool.layout, backend.pool.device
    each = layout.num_blocks_for(tokens)
    shares = [Share([0], tokens - 1, range(row * each, (row + 1) * each), samples=True) for row in range(batch)]
    plan = backend.plan(build_batch(shares, layout.block_size, device), None)
    query = torch.randn(batch, num_heads, layout.head_dim, device=device).to(backend.pool.compute_dtype)

    def calls() -> None:
        for _ in range(CALLS):
            backend.attend(query, LAYER, plan)

    run = CudaCapture(device)(calls) if device.type == "cuda" else calls
    seconds = least_s(run, device) / CALLS
    return AttentionFigures(backend.name, batch, tokens, seconds, batch * tokens * layout.token_bytes / seconds)


def _numbers(listed: str) -> list[int]:
    return [int(number) for number in listed.split(",")]


def main() -> None:
    shape, batches, contexts, block_size = sys.argv[1:]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    figures = measure_attention(shape, _numbers(batches), _numbers(contexts), int(block_size), device)
    print(json.dumps([dataclasses.asdict(each) for each in figures]))


if __name__ == "__main__":
    main()
