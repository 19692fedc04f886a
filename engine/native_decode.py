"""Run a decode step as one program of the compiled kernels.

Module by module, a decoder would return to Python, and wake and join its threads, eight times per layer.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

import torch

from engine.attention.native import NativeAttention, NativePlan
from engine.forward_batch import ForwardBatch
from engine.model.layers import FeedForward, Linear, Packed, RMSNorm
from engine.model.llama import (
    DecoderLayer,
    LlamaDecoder,
    NormedAttention,
    ParallelLayer,
    PostNormLayer,
    PreNormLayer,
    SelfAttention,
)
from engine.native.linear import DenseMatrix
from engine.native.program import NativeProgram
from engine.ops.base import KVSlots, Logits
from engine.ops.native import ELEMENTS, NativeOps
from engine.ops.rope import Rotation
from engine.quantization.quantized_linear import QuantizedMatrix
from serving_core.model_files.rope import Rope

MOST_ROWS: Final = 64
OPERATIONS_PER_LAYER: Final = 15  # at most seven, and four products of at most two each
OPERATIONS_AFTER: Final = 5  # a norm, the head, a cap and the search for the maxima

Recordable: TypeAlias = DenseMatrix | QuantizedMatrix


def is_recordable(decoder: LlamaDecoder, attention: NativeAttention) -> bool:
    """Return whether NativeDecode can record this decoder: native kernels in the pool's dtype, the same in every step.

    It must be whole on a single rank, without experts, and every matrix of a kind that a program can hold.
    """
    pool = attention.pool
    if not decoder.is_whole or decoder.has_experts or not isinstance(decoder.ops, NativeOps):
        return False
    if pool.layout.is_quantized or pool.compute_dtype not in ELEMENTS:
        return False
    modules = (module for layer in decoder.own_layers for module in layer.modules())
    matrices = [module.matrix for module in modules if isinstance(module, Linear)]
    return all(map(_is_recordable, (*matrices, decoder.head)))


class NativeDecodePlan(NamedTuple):
    """The parts of a run that can be prepared before its tokens are known, by window and by rope."""

    attention: Mapping[int | None, NativePlan]
    rotations: Mapping[Rope | None, Rotation]


class NativeDecode:
    """Computes steps of at most MOST_ROWS tokens, all with wanted logits: one per request, or more with draft tokens.

    Uses torch's number of threads.
    """

    name = "native"

    def __init__(self, decoder: LlamaDecoder, attention: NativeAttention) -> None:
        """Record a decoder that is_recordable."""
        assert isinstance(decoder.ops, NativeOps)
        layout = attention.pool.layout
        self._decoder, self._attention, self._ops = decoder, attention, decoder.ops
        self._buffers = _Buffers(decoder, attention)
        # Where a run finds the plans' addresses
        self._plans = {window: ctypes.c_void_p() for window in decoder.windows}
        self._program = NativeProgram(OPERATIONS_PER_LAYER * layout.num_layers + OPERATIONS_AFTER, MOST_ROWS)
        self._record()

    def plan(self, batch: ForwardBatch) -> NativeDecodePlan | None:
        """Prepare a batch of at most MOST_ROWS tokens, all with wanted logits and without adapters.

        Returns None for other batches.
        """
        if batch.adapted_rows or not len(batch.logit_rows) == len(batch.token_ids) <= MOST_ROWS:
            return None
        dtype = self._buffers.x.dtype
        return NativeDecodePlan(
            {window: self._attention.plan(batch, window) for window in self._plans},
            {rope: rotary.tables(batch.positions, dtype) for rope, rotary in self._decoder.rotaries.items()},
        )

    def run(self, batch: ForwardBatch, plan: NativeDecodePlan, on_taken: Callable[[], None]) -> Logits:
        """Compute the batch, given its plan; return the logits [T, vocab_size] and their maxima.

        Both are valid until the next run. Calls `on_taken` when the inputs are in the buffers. Raises IndexError, and
        writes nothing, if a slot is outside the pool.
        """
        num_rows, buffers, decoder = len(batch.token_ids), self._buffers, self._decoder
        assert decoder.embed_tokens is not None
        buffers.x[:num_rows] = decoder.embed_tokens(batch.token_ids)
        for rope, rotation in plan.rotations.items():
            for table, values in zip(buffers.rotations[rope], rotation, strict=True):
                table[:num_rows] = values
        buffers.slots[:num_rows] = batch.slots
        for window, of_window in plan.attention.items():
            self._plans[window].value = of_window.address
        on_taken()
        if not self._program.run(num_rows):
            raise IndexError(f"there is a slot outside the {self._attention.pool.num_blocks} blocks of the KV pool")
        highest, tokens = buffers.likeliest
        return Logits(buffers.logits[:num_rows], (highest[:num_rows], tokens[:num_rows]))

    def close(self) -> None:
        """Do nothing: no group waits for this program."""

    def _record(self) -> None:
        buffers, decoder = self._buffers, self._decoder
        delta: torch.Tensor | None = None
        for layer in decoder.own_layers:
            delta = self._record_layer(layer, delta)
        assert decoder.norm is not None
        self._record_norm(decoder.norm, delta)
        self._record_product(decoder.head, buffers.normed, buffers.logits)
        if decoder.logit_softcap is not None:
            self._ops.record_cap(self._program, buffers.logits, decoder.logit_softcap)
        self._ops.record_search(self._program, buffers.logits, *buffers.likeliest)

    def _record_layer(self, layer: DecoderLayer, delta: torch.Tensor | None) -> torch.Tensor | None:
        """Record a layer. `delta` is still to be added to x before it; the returned delta is still to be added after
        it.
        """
        buffers = self._buffers
        if isinstance(layer, PostNormLayer):
            self._record_attention(layer.self_attn, self._record_reading(layer.input_layernorm))
            self._record_add_norm(layer.post_attention_layernorm)
            self._record_mlp(layer, self._record_reading(layer.pre_feedforward_layernorm))
            self._record_add_norm(layer.post_feedforward_layernorm)
            return None
        if isinstance(layer, ParallelLayer):
            self._record_norm(layer.input_layernorm, delta)
            self._record_attention(layer.self_attn, buffers.normed)
            self._ops.record_sum(self._program, buffers.x, buffers.delta)
            self._record_mlp(layer, buffers.normed)
            return buffers.delta
        assert isinstance(layer, PreNormLayer)
        self._record_norm(layer.input_layernorm, delta)
        self._record_attention(layer.self_attn, buffers.normed)
        self._record_norm(layer.post_attention_layernorm, buffers.delta)
        self._record_mlp(layer, buffers.normed)
        return buffers.delta

    def _record_attention(self, block: SelfAttention, x: torch.Tensor) -> None:
        program, buffers, pool = self._program, self._buffers, self._attention.pool
        self._record_product(block.qkv_proj.matrix, x, buffers.heads)
        if isinstance(block, NormedAttention):
            self._record_projection_norms(block)
        rotation, kv = buffers.rotations[block.rope], KVSlots(pool, block.layer, buffers.slots)
        self._ops.record_rotate_and_store(program, buffers.heads, rotation, kv, block.head_norms)
        self._attention.record(program, self._plans[block.window], buffers.heads, block.layer, buffers.attended)
        self._record_product(block.o_proj.matrix, buffers.attended, buffers.delta)

    def _record_projection_norms(self, block: NormedAttention) -> None:
        projected, first = self._buffers.heads.flatten(1), 0
        for norm in (block.q_norm, block.k_norm):
            rows = projected[:, first : first + len(norm.weight)]
            self._ops.record_norm(self._program, rows, norm.spec, rows)
            first += len(norm.weight)

    def _record_mlp(self, layer: DecoderLayer, x: torch.Tensor) -> None:
        buffers, mlp = self._buffers, layer.feed_forward
        assert isinstance(mlp, FeedForward)
        self._record_product(mlp.gate_up_proj.matrix, x, buffers.gates_and_ups)
        self._ops.record_gate(self._program, buffers.gates_and_ups, buffers.gated, mlp.activation)
        self._record_product(mlp.down_proj.matrix, buffers.gated, buffers.delta)

    def _record_reading(self, norm: RMSNorm | None) -> torch.Tensor:
        """Record the norm, if given; return x or the norm's output."""
        if norm is None:
            return self._buffers.x
        self._record_norm(norm, None)
        return self._buffers.normed

    def _record_norm(self, norm: RMSNorm, delta: torch.Tensor | None) -> None:
        buffers = self._buffers
        self._ops.record_norm(self._program, buffers.x, norm.spec, buffers.normed, delta)

    def _record_add_norm(self, norm: RMSNorm) -> None:
        self._ops.record_add_norm(self._program, self._buffers.x, self._buffers.delta, norm.spec)

    def _record_product(self, matrix: Packed | None, x: torch.Tensor, outputs: torch.Tensor) -> None:
        assert isinstance(matrix, Recordable)
        matrix.record(self._program, x, outputs)


class _Buffers:
    """Activations of MOST_ROWS tokens, and the inputs of a run."""

    def __init__(self, decoder: LlamaDecoder, attention: NativeAttention) -> None:
        layout, head = attention.pool.layout, decoder.head
        first = decoder.own_layers[0]
        assert decoder.norm is not None
        assert isinstance(first.feed_forward, FeedForward)
        down = first.feed_forward.down_proj.matrix
        assert isinstance(head, Recordable)
        assert isinstance(down, Recordable)
        neurons, num_heads = down.num_inputs, attention.num_heads
        rows = functools.partial(torch.empty, MOST_ROWS, dtype=attention.pool.compute_dtype)
        hidden_size = len(decoder.norm.weight)
        self.x, self.normed, self.delta = (rows(hidden_size) for _ in range(3))
        self.heads = rows(num_heads + 2 * layout.num_kv_heads, layout.head_dim)
        self.attended = rows(num_heads, layout.head_dim)
        self.gates_and_ups, self.gated = rows(2 * neurons), rows(neurons)
        self.logits = rows(head.num_outputs)
        self.likeliest = torch.empty(MOST_ROWS), torch.empty(MOST_ROWS, dtype=torch.int64)
        self.rotations = {rope: (rows(1, layout.head_dim), rows(1, layout.head_dim)) for rope in decoder.rotaries}
        self.slots = torch.empty(MOST_ROWS, dtype=torch.int64)


def _is_recordable(matrix: Packed | None) -> bool:
    return isinstance(matrix, DenseMatrix) or (isinstance(matrix, QuantizedMatrix) and matrix.is_recordable)
