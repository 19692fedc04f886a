"""`python -m splitserve_bench.device.attention SHAPE BATCHES CONTEXTS CHUNK_TOKENS BLOCK_SIZE`: one layer's attention
of decode steps by each backend that the engine would take, alone and beside a chunk of a prompt, as one JSON list. On
CUDA calls are captured, so that the host does not count."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Final

import torch

from engine.attention.backends import StepsApart, choose_attention
from engine.attention.paged import Attention
from engine.cache.kv_pool import PagedKVPool
from engine.cuda_graphs import CudaCapture
from engine.forward_batch import build_batch
from engine.parallel import choose_device
from serving_core.layout import KVLayout
from serving_core.memory import available_bytes
from serving_core.requests import Share
from splitserve_bench.engine.machine import least_s
from splitserve_bench.engine.random_models import SHAPES

CALLS: Final = 16  # in one measurement, as many layers have
LAYER: Final = 0


@dataclass(frozen=True, slots=True)
class AttentionFigures:
    """Of one call of one backend, and how many bytes of the answers' keys and values it reads a second."""

    backend: str
    batch: int
    context_tokens: int
    chunk_tokens: int  # of a prompt in the same call
    seconds: float
    bytes_per_s: float


@torch.inference_mode()
def measure_attention(
    shape: str, batches: list[int], contexts: list[int], chunk_tokens: int, block_size: int, device: torch.device
) -> list[AttentionFigures]:
    """Sizes whose keys and values take more than half of the memory that is free are left out."""
    sizes = SHAPES[shape]
    layout = KVLayout.uniform(1, sizes.num_kv_heads, sizes.head_dim, block_size, "bfloat16")
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    most_blocks = free // 2 // layout.block_bytes
    of_chunk = layout.num_blocks_for(chunk_tokens)
    counts = {
        (batch, tokens): batch * layout.num_blocks_for(tokens) + of_chunk for batch in batches for tokens in contexts
    }
    counts = {size: count for size, count in counts.items() if count <= most_blocks}
    pool = PagedKVPool(layout, max(counts.values(), default=1), device)
    chosen = choose_attention(pool, sizes.num_heads)
    pool.try_values(LAYER, pool.num_blocks)
    return [
        _measure(backend, *size, beside, sizes.num_heads)
        for size in counts
        for beside in (0, chunk_tokens)
        for backend in _backends(chosen, is_mixed=beside > 0)
    ]


def _backends(chosen: Attention, *, is_mixed: bool) -> list[Attention]:
    """The one that the engine would take, and what computes prompts."""
    if not isinstance(chosen, StepsApart):
        return [chosen]
    taken = chosen if is_mixed else chosen.steps
    return [taken] if chosen.steps is chosen.prompts else [taken, chosen.prompts]


def _measure(backend: Attention, batch: int, tokens: int, chunk_tokens: int, num_heads: int) -> AttentionFigures:
    layout, device = backend.pool.layout, backend.pool.device
    each = layout.num_blocks_for(tokens)
    shares = [Share([0], tokens - 1, range(row * each, (row + 1) * each), samples=True) for row in range(batch)]
    if chunk_tokens:
        of_chunk = range(batch * each, batch * each + layout.num_blocks_for(chunk_tokens))
        shares.append(Share([0] * chunk_tokens, 0, of_chunk, samples=False))
    plan = backend.plan(build_batch(shares, layout.block_size, device), None)
    query = torch.randn(batch + chunk_tokens, num_heads, layout.head_dim, device=device).to(backend.pool.compute_dtype)

    def calls() -> None:
        for _ in range(CALLS):
            backend.attend(query, LAYER, plan)

    run = CudaCapture(device)(calls) if device.type == "cuda" else calls
    seconds = least_s(run, device) / CALLS
    bytes_per_s = batch * tokens * layout.token_bytes / seconds
    return AttentionFigures(backend.name, batch, tokens, chunk_tokens, seconds, bytes_per_s)


def _numbers(listed: str) -> list[int]:
    return [int(number) for number in listed.split(",")]


def main() -> None:
    shape, batches, contexts, chunk_tokens, block_size = sys.argv[1:]
    sizes = (_numbers(batches), _numbers(contexts), int(chunk_tokens), int(block_size))
    figures = measure_attention(shape, *sizes, choose_device("auto"))
    print(json.dumps([dataclasses.asdict(each) for each in figures]))


if __name__ == "__main__":
    main()
