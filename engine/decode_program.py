"""What computes a whole decode step at once, where that is faster than one module after the other."""

from typing import Protocol

import torch

from engine.attention import Attention
from engine.forward_batch import ForwardBatch
from engine.llama import LlamaDecoder
from engine.native_attention import NativeAttention
from engine.native_decode import NativeDecode, is_recordable


class DecodeProgram(Protocol):
    """One decoder over one pool. Its logits have the same bits as the decoder's own."""

    def matches(self, batch: ForwardBatch) -> bool:
        """Whether it computes such batches."""

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Writes the batch's keys and values into the pool. Gives the logits [B, vocab_size], which are good until the
        next run."""


def choose_program(model: object, attention: Attention) -> DecodeProgram | None:
    """The fastest one for these; None where module after module is all there is."""
    if not isinstance(model, LlamaDecoder) or not isinstance(attention, NativeAttention):
        return None
    return NativeDecode(model, attention) if is_recordable(model, attention) else None
