"""Which attention backend an engine takes."""

import logging
from collections.abc import Iterator

import torch

from engine.attention.native import NativeAttention
from engine.attention.paged import Attention, PortableAttention
from engine.attention.tiled import TiledAttention
from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import build_batch
from serving_core.requests import Share

logger = logging.getLogger(__name__)

TOLERANCE = 0.05  # 16-bit outputs of two kernels on values of order 1


def choose_attention(
    pool: PagedKVPool,
    num_heads: int,
    *,
    score_scale: float | None = None,
    softcap: float | None = None,
    portable_only: bool = False,
) -> Attention:
    """On a CPU the compiled kernels, on CUDA varlen_attn if it works with this pool and agrees with the portable
    backend, which serves otherwise, and where only it can do what a model asks for. To be called before the pool holds
    anything. Raises SettingsError for a pool whose K and V are not of one width in all layers, which no other takes."""
    portable = PortableAttention(pool, num_heads, score_scale, softcap)
    if portable_only:
        return portable
    pool.layout.check_uniform()
    if pool.device.type == "cpu":
        return _native_or(portable, num_heads)
    if pool.device.type != "cuda":
        return portable
    return _varlen_or(portable, num_heads)


def invariant_attentions(attention: Attention, num_heads: int) -> Iterator[Attention]:
    """Those in place of this one of which the bits of a row may depend on that row and its keys alone, the fastest
    first. Of varlen_attn, which is told never to split keys, the device decides that: it is to be tried out."""
    if not isinstance(attention, PortableAttention):
        yield attention
    if not isinstance(attention, NativeAttention):
        yield TiledAttention(attention.pool, num_heads, attention.score_scale, attention.softcap)


def _native_or(portable: PortableAttention, num_heads: int) -> Attention:
    try:
        scoring = (portable.score_scale, portable.softcap)
        return NativeAttention(portable.pool, num_heads, None, *scoring)
    except ValueError as error:
        logger.warning("attention is portable: %s", error)
        return portable


def _varlen_or(portable: PortableAttention, num_heads: int) -> Attention:
    pool = portable.pool
    if pool.layout.is_quantized:
        logger.warning("varlen_attn does not take a KV pool of %s, attention is portable", pool.layout.dtype)
        return portable
    if portable.softcap is not None:
        logger.warning("varlen_attn does not cap scores, attention is portable")
        return portable
    from engine.attention.varlen import BLOCK_TOKENS, VarlenAttention

    if pool.layout.block_size % BLOCK_TOKENS:
        logger.warning(
            "varlen_attn takes blocks of a multiple of %d tokens, not of %d: attention is portable, which is slower, "
            "and steps have no CUDA graphs; --block-size %d has both",
            BLOCK_TOKENS,
            pool.layout.block_size,
            BLOCK_TOKENS,
        )
        return portable
    candidate = VarlenAttention(pool, portable.score_scale)
    try:
        difference = _largest_difference(candidate, portable, num_heads)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:  # TypeError: an older one lacks pages
        logger.warning("varlen_attn does not take this KV pool, attention is portable: %s", error)
        return portable
    if not difference <= TOLERANCE:  # nor if it is not a number
        logger.warning("varlen_attn is off by %f here, attention is portable", difference)
        return portable
    return candidate


@torch.inference_mode()
def _largest_difference(candidate: Attention, reference: Attention, num_heads: int) -> float:
    """Between two backends, on random values: a chunk that starts within a block, and a decode."""
    pool = candidate.pool
    layout, device = pool.layout, pool.device
    blocks = range(min(3, pool.num_blocks))
    num_tokens = len(blocks) * layout.block_size
    start = num_tokens // 2
    chunk = Share([0] * (num_tokens - start), start, blocks, samples=False)
    batch = build_batch([chunk, Share([0], num_tokens - 1, blocks, samples=False)], layout.block_size, device)
    layer = layout.first_layer
    planes = (pool.keys(layer)[: len(blocks)], pool.values(layer)[: len(blocks)])
    for plane in planes:
        plane.normal_()
    query = torch.randn(len(batch.token_ids), num_heads, layout.head_dim, device=device).to(planes[0].dtype)
    try:
        outputs = [backend.attend(query, layer, backend.plan(batch, None)) for backend in (candidate, reference)]
    finally:
        for plane in planes:
            plane.zero_()
    return float((outputs[0] - outputs[1]).abs().max())
