"""Choose the ops backend of a decoder for its device."""

import functools
import logging

import torch

from engine.cache.kv_pool import PagedKVPool
from engine.native.ops_library import best_variant
from engine.ops.base import HeadNorms, KVSlots, Norm, Ops
from engine.ops.native import NativeOps
from engine.ops.rope import RotaryEmbedding
from engine.ops.topk_topp import RowSampling
from engine.trial import why_not_triton
from serving_core.layout import KVLayout
from serving_core.model_files.differences import GELU_TANH, SILU
from serving_core.model_files.rope import DefaultRope

logger = logging.getLogger(__name__)

TOLERANCE = 0.05  # of the largest number: 16-bit results of two kernels; a wrong one is off by about 1
ROWS, COLUMNS = 5, 200  # of the trial
HEADS, KEY_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 48, 4
EPS = 1e-5


def choose_ops(device: torch.device) -> Ops:
    """Return the fastest ops of a device: compiled ones on a CPU, Triton's on CUDA, else torch's.

    Triton's must work and agree with torch's in a trial, which runs once for each device.
    """
    if device.type == "cpu":
        variant = best_variant()
        return Ops() if variant is None else NativeOps(variant)
    return Ops() if device.type != "cuda" or not _does_triton_agree(device) else _triton_ops()


def _triton_ops() -> Ops:
    from engine.ops.triton import TritonOps

    return TritonOps()


@functools.cache
def _does_triton_agree(device: torch.device) -> bool:
    """Return whether Triton's ops agree with torch's; if not, log the reason."""
    why = why_not_triton(lambda: _largest_difference(_triton_ops(), Ops(), device), TOLERANCE)
    if why:
        logger.warning("ops between products are not by kernels of Triton, and slower: %s", why)
    return not why


@torch.inference_mode()
def _largest_difference(ops: Ops, reference: Ops, device: torch.device) -> float:
    """Return the largest difference between two backends on the same random numbers, over the largest number."""
    differences = [
        ((ours - expected).abs().max() / expected.abs().max()).float()
        for ours, expected in zip(_tried(ops, device), _tried(reference, device), strict=True)
    ]
    return float(torch.stack(differences).max())


def _tried(ops: Ops, device: torch.device) -> list[torch.Tensor]:
    """Return the results of all ops in bfloat16."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, torch.bfloat16)

    x, delta, weight = random(ROWS, COLUMNS), random(ROWS, COLUMNS), random(COLUMNS)
    norm, centering = Norm(weight, EPS, delta_scale=0.5), Norm(weight.float(), EPS, centers=True)
    given = [ops.norm(x, norm, delta), ops.norm(x, centering)]
    ops.add_norm(x, delta, norm)
    given += [x, *(ops.gate(random(ROWS, 2 * COLUMNS), activation) for activation in (SILU, GELU_TANH))]
    pool = PagedKVPool(KVLayout.uniform(1, KEY_HEADS, HEAD_DIM, BLOCK_SIZE, "bfloat16"), ROWS, device)
    positions = torch.arange(ROWS, device=device)
    rotation = RotaryEmbedding(DefaultRope(1e4), HEAD_DIM, device).tables(positions, torch.bfloat16)
    for norms in (None, HeadNorms(random(HEAD_DIM), random(HEAD_DIM), EPS)):
        heads = random(ROWS, HEADS + 2 * KEY_HEADS, HEAD_DIM)
        given.append(ops.rotate_and_store(heads, rotation, KVSlots(pool, 0, positions * 3), norms))
        given += [pool.keys(0).clone(), pool.values(0).clone()]
    logits = random(ROWS, COLUMNS)
    samplings = [RowSampling(row, (row + 0.5) / ROWS, 1.0, top_p=0.9) for row in range(ROWS)]
    return [*given, ops.sample(logits, logits.max(-1).values, samplings)]
