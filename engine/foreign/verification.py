"""What transformers computes over our pool, compared with what it computes by its own attention: one text in chunks and
steps beside another, against the whole text at once.

Windows are made narrow for it, so that a short text is longer than they are.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import torch
import transformers

from engine.attention.paged import Attention
from engine.foreign.decoder import UNCOMPUTABLE, ForeignDecoder, in_a_line
from engine.foreign.tried import TRIED, TRIED_WITH
from engine.forward_batch import build_batch
from engine.parallel import RankGroup
from serving_core.errors import ModelError
from serving_core.model_config import ModelConfig
from serving_core.requests import Share

logger = logging.getLogger(__name__)

NUM_TOKENS: Final = 70
NARROW_WINDOW: Final = 20
CUTS: Final = (0, 5, 33, 34, 35, 68, 69)
LARGEST_DIFFERENCE: Final = 1e-3  # of logits, as a part of how they spread
COARSE_DIFFERENCE: Final = 0.1  # in 16 bits
QUANTIZED_DIFFERENCE: Final = 0.25  # with keys and values in 8 bits


def check_staged(config: ModelConfig) -> None:
    """To be called before anything is loaded. Raises ModelError for what no test tries in stages, where nothing can be
    compared."""
    if not _is_tried(config):
        raise ModelError(f"{config.architecture} was not tried in stages; --no-verify-model serves it nevertheless")


@torch.inference_mode()
def check_model(
    model: ForeignDecoder, attention: Attention, group: RankGroup, config: ModelConfig, max_model_len: int
) -> None:
    """To be called on all ranks, before anything is in the pool. Raises ModelError where the two differ. Does nothing
    for what the tests try: architectures in one version of transformers."""
    if _is_tried(config):
        return
    layout = attention.pool.layout
    most_tokens = attention.pool.num_blocks // 2 * layout.block_size
    token_ids = [(31 * at + at * at) % config.vocab_size for at in range(min(NUM_TOKENS, max_model_len, most_tokens))]
    if not token_ids:
        raise ModelError("--verify-model needs two KV blocks at least")
    with _narrow(model.module, NARROW_WINDOW):
        try:
            expected = model.eager(torch.tensor(token_ids, device=attention.pool.device))
        except UNCOMPUTABLE as error:
            raise ModelError(f"{config.architecture} cannot be compared: {in_a_line(error)}") from error
        found = _in_parts(model, attention, token_ids)
    verdict = b"" if expected is None or found is None else _verdict(expected, found, attention).encode()
    said = [data.decode() for data in group.exchange(verdict) if data]
    if said:
        raise ModelError(f"{config.architecture} {said[0]}; --no-verify-model serves it nevertheless")
    logger.info("%s agrees here with transformers' own attention", config.architecture)


def _is_tried(config: ModelConfig) -> bool:
    return config.architecture in TRIED and transformers.__version__ == TRIED_WITH


def _in_parts(model: ForeignDecoder, attention: Attention, token_ids: list[int]) -> torch.Tensor | None:
    """The logits of all tokens, computed in parts, each beside a part of the same text backwards."""
    pool, logits = attention.pool, []
    num_blocks = pool.layout.num_blocks_for(len(token_ids))
    blocks, others = range(num_blocks - 1, -1, -1), range(num_blocks, 2 * num_blocks)
    backwards = token_ids[::-1]
    ends = [*(cut for cut in CUTS if cut < len(token_ids)), len(token_ids)]
    for start, end in pairwise(ends):
        beside = Share(backwards[start:end], start, others, samples=False)
        share = Share(token_ids[start:end], start, blocks, samples=True)
        batch = build_batch([beside, share], pool.layout.block_size, pool.device)
        wanted = torch.arange(end - start, 2 * (end - start), device=pool.device)
        logits.append(model(batch.wanting(wanted), attention))
    rows = [part for part in logits if part is not None]
    return torch.cat(rows) if rows else None


def _verdict(expected: torch.Tensor, found: torch.Tensor, attention: Attention) -> str:
    """Empty where they agree."""
    expected, found = expected.float(), found.float()
    spread = expected - expected.mean(-1, keepdim=True)
    differences = (expected - found).norm(dim=-1) / spread.norm(dim=-1).clamp_min(1e-6)
    is_quantized = attention.pool.layout.is_quantized
    if attention.pool.compute_dtype == torch.float32 and not is_quantized:
        limit, difference = LARGEST_DIFFERENCE, float(differences.max())
    else:  # single tokens may be far off: a router took another expert
        limit, difference = QUANTIZED_DIFFERENCE if is_quantized else COARSE_DIFFERENCE, float(differences.median())
    if difference <= limit:  # not so for NaN
        return ""
    return f"is off by {difference:.2g} of its logits from transformers' own attention, more than {limit:g}"


@contextmanager
def _narrow(module: Any, window: int) -> Iterator[None]:
    """Makes sliding windows narrow for a while."""
    holders = [module.config, *module.modules()]
    wide = [(holder, holder.sliding_window) for holder in holders if _window_of(holder) is not None]
    try:
        for holder, _ in wide:
            holder.sliding_window = window
        yield
    finally:
        for holder, before in wide:
            holder.sliding_window = before


def _window_of(holder: Any) -> int | None:
    window = getattr(holder, "sliding_window", None)
    return window if isinstance(window, int) else None
