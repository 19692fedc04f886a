"""Choose the ops backend of a decoder for its device."""

import functools
import logging

import torch

from engine.cache.kv_pool import PagedKVPool
from engine.model.draws import Draw
from engine.model.rope import RotaryEmbedding
from engine.model.steps import HeadNorms, Steps, TorchSteps
from engine.native.steps import NativeSteps, best_variant
from engine.trial import why_not_triton
from serving_core.layout import KVLayout
from serving_core.model_files.differences import GELU_TANH, SILU
from serving_core.model_files.rope import DefaultRope

logger = logging.getLogger(__name__)

TOLERANCE = 0.05  # of the largest number: 16-bit results of two kernels; a wrong one is off by about 1
ROWS, COLUMNS = 5, 200  # of the trial
HEADS, KEY_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 48, 4
EPS = 1e-5


def choose_steps(device: torch.device) -> Steps:
    """Return the fastest ops of a device: on a CPU the compiled ones; on CUDA Triton kernels if they work and agree
    with torch's, else torch's.
    """
    if device.type == "cpu":
        variant = best_variant()
        return TorchSteps() if variant is None else NativeSteps(variant)
    return TorchSteps() if device.type != "cuda" or not _does_triton_agree(device) else _triton_steps()


def _triton_steps() -> Steps:
    from engine.model.triton_steps import TritonSteps

    return TritonSteps()


@functools.cache
def _does_triton_agree(device: torch.device) -> bool:
    """Return whether Triton's ops agree with torch's; if not, log the reason."""
    why = why_not_triton(lambda: _largest_difference(_triton_steps(), TorchSteps(), device), TOLERANCE)
    if why:
        logger.warning("steps between products are not by kernels of Triton, and slower: %s", why)
    return not why


@torch.inference_mode()
def _largest_difference(steps: Steps, reference: Steps, device: torch.device) -> float:
    """Return the largest difference between two backends on the same random numbers, over the largest number."""
    differences = [
        ((ours - expected).abs().max() / expected.abs().max()).float()
        for ours, expected in zip(_tried(steps, device), _tried(reference, device), strict=True)
    ]
    return float(torch.stack(differences).max())


def _tried(steps: Steps, device: torch.device) -> list[torch.Tensor]:
    """Return the results of all ops in bfloat16."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, torch.bfloat16)

    x, delta, weight = random(ROWS, COLUMNS), random(ROWS, COLUMNS), random(COLUMNS)
    given = [steps.norm(x, weight, EPS, delta, 0.5), steps.norm(x, weight.float(), EPS, centers=True)]
    steps.norm_onto(x, delta, weight, EPS)
    given += [x, *(steps.gate(random(ROWS, 2 * COLUMNS), activation) for activation in (SILU, GELU_TANH))]
    pool = PagedKVPool(KVLayout.uniform(1, KEY_HEADS, HEAD_DIM, BLOCK_SIZE, "bfloat16"), ROWS, device)
    positions = torch.arange(ROWS, device=device)
    rotation = RotaryEmbedding(DefaultRope(1e4), HEAD_DIM, device).tables(positions, torch.bfloat16)
    for norms in (None, HeadNorms(random(HEAD_DIM), random(HEAD_DIM), EPS)):
        heads = random(ROWS, HEADS + 2 * KEY_HEADS, HEAD_DIM)
        given.append(steps.place(heads, rotation, pool, 0, positions * 3, norms))
        given += [pool.keys(0).clone(), pool.values(0).clone()]
    logits = random(ROWS, COLUMNS)
    draws = [Draw(row, (row + 0.5) / ROWS, 1.0, top_p=0.9) for row in range(ROWS)]
    return [*given, steps.draw(logits, logits.max(-1).values, draws)]
