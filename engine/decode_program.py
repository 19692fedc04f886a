"""Choose how to compute a whole decode step at once, where that is faster than one module after the other."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from engine.attention.native import NativeAttention
from engine.attention.paged import Attention
from engine.cuda_graphs import cuda_graphs
from engine.forward_batch import ForwardBatch
from engine.model.llama import LlamaDecoder
from engine.native.decode import NativeDecode, is_recordable
from engine.ops.base import Likeliest
from engine.parallel import RankGroup
from serving_core.settings import EngineSettings


class DecodeProgram(Protocol):
    """Computes decode steps of one decoder over one pool.

    Native kernels give the decoder's logits to the bit; CUDA graphs only as far as kernels for other numbers of rows
    agree, unless `exact` is required.
    """

    def matches(self, batch: ForwardBatch) -> bool:
        """Return whether the program computes such batches."""

    def plan(self, batch: ForwardBatch) -> Any:
        """Return the part of `run` that can be prepared. The batch's tokens may be unknown, and another batch may run
        meanwhile.
        """

    def run(
        self, batch: ForwardBatch, on_taken: Callable[[], None] | None = None, plan: Any = None
    ) -> torch.Tensor | None:
        """Compute a batch and write its keys and values into the pool.

        Returns the logits [S, vocab_size] on rank 0, valid until the next run, and None on the others. Calls `on_taken`
        when the kernels have their inputs and are about to begin.
        """

    def close(self) -> None:
        """Release resources that closing a group of ranks would wait for. The program cannot run afterwards."""

    def likeliest(self, num_rows: int) -> Likeliest | None:
        """Return the row maxima of the last run's logits, if the program computed them; valid until the next run."""


def num_scratch_blocks(settings: EngineSettings, device: torch.device) -> int:
    """Return the scratch blocks that a program needs in the pool behind the requests' blocks.

    CUDA graphs need one. With several stages there are no graphs, since stages wait for each other on the host.
    """
    has_graphs = device.type == "cuda" and settings.pipeline_parallel_size == 1 and not settings.enforce_eager
    return int(has_graphs)


def choose_program(
    model: object, attention: Attention, num_blocks: int, max_model_len: int, group: RankGroup, *, exact: bool
) -> DecodeProgram | None:
    """Return the fastest program, or None if only module after module works.

    `exact`: its logits must equal the model's to the bit. Requests own the first num_blocks blocks of the pool; the
    others are scratch. Call on all ranks, before the pool holds data.
    """
    if not isinstance(model, LlamaDecoder) or model.offloaded is not None:  # modules wait for their offloaded weights
        return None
    if isinstance(attention, NativeAttention):
        return NativeDecode(model, attention) if is_recordable(model, attention) else None
    if attention.pool.num_blocks > num_blocks and not model.has_experts:  # a graph would repeat one choice of experts
        return cuda_graphs(model, attention, num_blocks, max_model_len, group, exact=exact)
    return None
