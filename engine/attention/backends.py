"""Choose the attention backend of an engine."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from engine.attention.native import NativeAttention
from engine.attention.paged import Attention, PortableAttention
from engine.attention.tiled import TiledAttention
from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch, build_batch
from engine.trial import tried
from serving_core.process.extras import TRITON, is_installed
from serving_core.requests import Share

if TYPE_CHECKING:
    from engine.attention.triton_paged import TritonAttention
    from engine.attention.varlen import GatheredAttention, VarlenAttention


@dataclass(frozen=True, slots=True)
class _Part:
    rows: slice  # rows of the query
    backend: Attention
    plan: Any


class StepsApart:
    """Uses one backend for the leading requests of few tokens in a batch, another from the first longer request on.

    The first backend's programs share the keys of a request; the second is fast for many rows. A backend takes adjacent
    rows in the caller's order. A node schedules decode before prefill.
    """

    def __init__(self, steps: Attention, prompts: Attention, few_tokens: int) -> None:
        """Use `steps` for requests of up to few_tokens tokens, `prompts` for longer ones."""
        assert steps.pool is prompts.pool
        self.steps, self.prompts = steps, prompts
        self._few_tokens = few_tokens
        self.name = prompts.name if steps is prompts else f"{prompts.name}, of steps {steps.name}"
        self.pool = prompts.pool
        self.score_scale, self.softcap = prompts.score_scale, prompts.softcap

    def plan(self, batch: ForwardBatch, window: int | None) -> list[_Part]:
        num_steps, num_requests, num_rows = self._num_steps(batch), len(batch.starts) - 1, batch.starts[-1]
        if num_steps in (0, num_requests):
            backend = self.steps if num_steps else self.prompts
            return [_Part(slice(num_rows), backend, backend.plan(batch, window))]
        first_row = batch.starts[num_steps]
        steps, prompts = batch.part(0, num_steps), batch.part(num_steps, num_requests)
        return [
            _Part(slice(first_row), self.steps, self.steps.plan(steps, window)),
            _Part(slice(first_row, num_rows), self.prompts, self.prompts.plan(prompts, window)),
        ]

    def attend(self, query: torch.Tensor, layer: int, plan: list[_Part]) -> torch.Tensor:
        attended = [part.backend.attend(query[part.rows], layer, part.plan) for part in plan]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _num_steps(self, batch: ForwardBatch) -> int:
        """Return the number of leading requests with few tokens."""
        if batch.longest_query <= self._few_tokens:
            return len(batch.starts) - 1
        counts = (end - start for start, end in pairwise(batch.starts))
        return next(number for number, count in enumerate(counts) if count > self._few_tokens)


logger = logging.getLogger(__name__)

TRIED_TOKENS = 600  # more than any kernel takes as one tile, and than one program takes where programs share keys
TRIED_TOGETHER = 32  # rows (tokens times heads of a key): above this, programs do not share keys
TOLERANCE = 0.05  # between 16-bit outputs of two kernels on values of order 1

_Kernel = TypeVar("_Kernel", bound=Attention)


def choose_attention(
    pool: PagedKVPool,
    num_heads: int,
    *,
    score_scale: float | None = None,
    softcap: float | None = None,
    portable_only: bool = False,
) -> Attention:
    """Return the fastest attention backend for this pool and `num_heads` query heads.

    On a CPU the compiled kernels. On CUDA Triton kernels for decode and varlen_attn over gathered keys for prefill, or
    one backend for both, if they support the pool and agree with the portable backend. Else, and with `portable_only`,
    the portable backend. `score_scale` and `softcap` are those of Attention. Call before the pool holds data. Raises
    SettingsError for a pool whose K and V widths differ, or differ between layers, unless `portable_only`.
    """
    portable = PortableAttention(pool, num_heads, score_scale, softcap)
    if portable_only:
        return portable
    pool.layout.check_uniform()
    if pool.device.type == "cpu":
        return _native_or(portable, num_heads)
    if pool.device.type != "cuda":
        return portable
    return _on_cuda(portable, num_heads)


def batch_invariant_attentions(attention: Attention, num_heads: int) -> Iterator[Attention]:
    """Yield attention backends that can replace `attention` and may be batch-invariant, the fastest first.

    `num_heads` is the number of query heads. The caller must try each: varlen_attn is told never to split keys, but the
    device decides whether its bits depend on other rows.
    """
    if isinstance(attention, StepsApart):  # one backend must compute both
        varlen, _ = tried(partial(_varlen, attention, num_heads))
        if varlen is not None:
            yield varlen
        attention = attention.steps
    if attention.name == TRITON:
        yield _triton(attention, num_heads, is_uniform=True)
    elif not isinstance(attention, PortableAttention):
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


def _on_cuda(portable: PortableAttention, num_heads: int) -> Attention:
    """Return the fastest kernels that agree with the portable backend, or the portable backend, and log the reason."""
    triton = _if_it_agrees("Triton", _triton, portable, num_heads)
    if triton is not None:
        gathered = _if_it_agrees("varlen_attn over gathered keys", _gathered, portable, num_heads)
        return StepsApart(triton, gathered or triton, triton.few_tokens)
    uniform = partial(_triton, is_uniform=True)
    varlen = _if_it_agrees("varlen_attn", _varlen, portable, num_heads)
    chosen = varlen or _if_it_agrees("Triton by few rows", uniform, portable, num_heads)
    if chosen is not None:
        return chosen
    logger.warning("attention is portable, which is slower, and steps have no CUDA graphs; the lines before say why")
    return portable


def _if_it_agrees(
    name: str, make: Callable[[PortableAttention, int], _Kernel], portable: PortableAttention, num_heads: int
) -> _Kernel | None:
    """Return the kernel if it agrees with the portable backend; else None, and log the reason."""

    def trial() -> tuple[_Kernel, float]:
        candidate = make(portable, num_heads)
        return candidate, _largest_difference(candidate, portable, num_heads)

    found, why = tried(trial)
    if found is None:
        logger.info("attention is not by %s: %s", name, why)
        return None
    candidate, difference = found
    if difference <= TOLERANCE:  # False for NaN
        return candidate
    logger.warning("%s is off by %f here", candidate.name, difference)
    return None


def _varlen(like: Attention, num_heads: int) -> "VarlenAttention":
    """Make the varlen_attn backend. Raises ValueError for unsupported pools."""
    from engine.attention.varlen import BLOCK_TOKENS, CAN_PAGE, VarlenAttention

    _check_varlen(like)
    if not CAN_PAGE:
        raise ValueError(f"varlen_attn of torch {torch.__version__} takes no blocks; that of torch 2.12 does")
    if like.pool.layout.block_size % BLOCK_TOKENS:
        raise ValueError(f"varlen_attn takes blocks of a multiple of {BLOCK_TOKENS} tokens, as with --block-size 256")
    return VarlenAttention(like.pool, like.score_scale)


def _gathered(like: Attention, num_heads: int) -> "GatheredAttention":
    """Make the backend of varlen_attn over gathered keys. Raises ValueError for unsupported pools."""
    from engine.attention.varlen import GatheredAttention

    _check_varlen(like)
    return GatheredAttention(like.pool, like.score_scale)


def _check_varlen(like: Attention) -> None:
    """Raise ValueError for scores and pools that varlen_attn does not support."""
    if like.softcap is not None or like.pool.layout.is_quantized:
        raise ValueError("varlen_attn caps no scores, and takes no keys and values of 8 bits")


def _triton(like: Attention, num_heads: int, *, is_uniform: bool = False) -> "TritonAttention":
    """Make the Triton backend. Raises ValueError without Triton, which comes with torch for CUDA."""
    if not is_installed(TRITON):
        raise ValueError("Triton is not installed")
    from engine.attention.triton_paged import TritonAttention

    return TritonAttention(like.pool, num_heads, like.score_scale, like.softcap, is_uniform=is_uniform)


@torch.inference_mode()
def _largest_difference(candidate: Attention, reference: Attention, num_heads: int) -> float:
    """Return the largest difference between two backends on random values: a chunk that starts within a block beside a
    decode row, a decode row alone, and a few tokens.
    """
    pool = candidate.pool
    layout, device = pool.layout, pool.device
    blocks = range(min(max(3, layout.num_blocks_for(TRIED_TOKENS)), pool.num_blocks))
    num_tokens = len(blocks) * layout.block_size
    start = num_tokens // 2
    chunk = Share([0] * (num_tokens - start), start, blocks, samples=False)
    step = Share([0], num_tokens - 1, blocks, samples=False)
    num_few = max(1, min(TRIED_TOGETHER * layout.num_kv_heads // num_heads, num_tokens))
    few = Share([0] * num_few, num_tokens - num_few, blocks, samples=False)
    layer = layout.first_layer
    generator = torch.Generator(device).manual_seed(0)
    differences = []
    try:
        pool.try_values(layer, len(blocks))
        for shares in ([chunk, step], [step], [few]):
            batch = build_batch(shares, layout.block_size, device)
            shape = (len(batch.token_ids), num_heads, layout.head_dim)
            query = torch.randn(shape, device=device, generator=generator).to(pool.compute_dtype)
            outputs = [backend.attend(query, layer, backend.plan(batch, None)) for backend in (candidate, reference)]
            differences.append((outputs[0] - outputs[1]).abs().max())
    finally:
        pool.clear(layer, len(blocks))
    return float(torch.stack(differences).max())
