"""What computes a whole decode step at once, where that is faster than one module after the other."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from engine.attention.native import NativeAttention
from engine.attention.paged import Attention
from engine.cuda_graphs import cuda_graphs
from engine.forward_batch import ForwardBatch
from engine.model.llama import LlamaDecoder
from engine.model.steps import Likeliest
from engine.native.decode import NativeDecode, is_recordable
from engine.parallel import RankGroup
from serving_core.settings import EngineSettings


class DecodeProgram(Protocol):
    """One decoder over one pool. Its logits are the decoder's own: of native kernels to the bit, of CUDA graphs as far
    as kernels for other numbers of rows agree, unless they are to be exact."""

    def matches(self, batch: ForwardBatch) -> bool:
        """Whether it computes such batches."""

    def plan(self, batch: ForwardBatch) -> Any:
        """What `run` would make of the batch first. Its tokens may be unknown, and another batch may run meanwhile."""

    def run(
        self, batch: ForwardBatch, on_taken: Callable[[], None] | None = None, plan: Any = None
    ) -> torch.Tensor | None:
        """Writes the batch's keys and values into the pool. Gives the logits [S, vocab_size] on rank 0, which are good
        until the next run, and None on the others. `on_taken` is called when kernels have what they need, and are to
        begin."""

    def close(self) -> None:
        """Lets go of what a group of ranks waits for when it is closed. It runs no more."""

    def likeliest(self, num_rows: int) -> Likeliest | None:
        """Of the logits of the last run, of so many rows, where it has found that too; good until the next."""


def num_scratch_blocks(settings: EngineSettings, device: torch.device) -> int:
    """Blocks that a program needs in the pool behind those that requests own. CUDA graphs take one; there are none of
    several stages, which wait for each other on the host."""
    has_graphs = device.type == "cuda" and settings.pipeline_parallel_size == 1 and not settings.enforce_eager
    return int(has_graphs)


def choose_program(
    model: object, attention: Attention, num_blocks: int, max_model_len: int, group: RankGroup, *, exact: bool
) -> DecodeProgram | None:
    """The fastest one for these; None where module after module is all there is. `exact`: its logits must be the
    model's to the bit. Requests own the first num_blocks blocks of the pool, the others are scratch. To be called on
    all ranks, before the pool holds anything."""
    if not isinstance(model, LlamaDecoder) or model.offloaded is not None:  # modules wait for their weights
        return None
    if isinstance(attention, NativeAttention):
        return NativeDecode(model, attention) if is_recordable(model, attention) else None
    if attention.pool.num_blocks > num_blocks and not model.has_experts:  # of which a graph would repeat one choice
        return cuda_graphs(model, attention, num_blocks, max_model_len, group, exact=exact)
    return None
