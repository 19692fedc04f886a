"""Run a decode step as one program of the compiled kernels.

Module by module, a decoder would return to Python, and wake and join its threads, eight times per layer.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch

from engine.attention.native import Move, NativeAttention, NativePlan
from engine.forward_batch import ForwardBatch
from engine.model.layers import Embedding, FeedForward, Linear, Packed, RMSNorm
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
from engine.native.ops_library import Table
from engine.native.program import NativeProgram
from engine.ops.base import Logits
from engine.ops.native import ELEMENTS, NativeOps
from engine.ops.rope import Rotation
from engine.ops.tiled import Rotary
from engine.quantization.quantized_linear import QuantizedMatrix
from serving_core.requests import Work

MOST_ROWS: Final = 64
OPERATIONS_PER_LAYER: Final = 17  # at most seven, two sums over ranks, and four products of at most two each
OPERATIONS_BESIDE: Final = 6  # the embedding, a norm, the head of two, a cap and the search for the maxima
OPERATIONS_PER_ROPE: Final = 2
MORE_POSITIONS: Final = 1024  # by which a table grows

Recordable: TypeAlias = DenseMatrix | QuantizedMatrix


def is_recordable(decoder: LlamaDecoder, attention: NativeAttention) -> bool:
    """Return whether NativeDecode can record this decoder: native kernels in the pool's dtype, the same in every step.

    It must have all layers, without experts, and every matrix of a kind that a program can hold. Its ranks must share
    memory, and need nothing of each other but sums.
    """
    pool = attention.pool
    if decoder.has_experts or not isinstance(decoder.ops, NativeOps):
        return False
    norms_projections = any(isinstance(layer.self_attn, NormedAttention) for layer in decoder.own_layers)
    if not decoder.is_whole and (decoder.shared_sums is None or norms_projections):
        return False
    if pool.layout.is_quantized or pool.compute_dtype not in ELEMENTS:
        return False
    modules = (module for layer in decoder.own_layers for module in layer.modules())
    matrices = [module.matrix for module in modules if isinstance(module, Linear)]
    return all(map(_is_recordable, (*matrices, decoder.head)))


class NativeDecodePlan(NamedTuple):
    """The parts of a run that can be prepared before its tokens are known: plans by window, and tables by rope."""

    attention: list[NativePlan]
    rotations: Sequence[Rotation]
    moves: list[Move]  # for each window, if the batch has yet to move to its next tokens; else empty


class RotationTable:
    """The cosines and sines of all positions so far, which a step gathers instead of computing them."""

    def __init__(self, rotary: Rotary, head_dim: int, dtype: torch.dtype) -> None:
        self._rotary, self._dtype = rotary, dtype
        self._rotation: Rotation = (torch.empty(0, 1, head_dim, dtype=dtype), torch.empty(0, 1, head_dim, dtype=dtype))
        self.tables: Final = Table(), Table()
        """Where a program finds the cosines and sines."""

    def up_to(self, num_positions: int) -> Rotation:
        """Return the cosines and sines of at least this many positions, each [positions, 1, head_dim].

        Two threads may call this at a time.
        """
        cos, sin = self._rotation
        if (num_known := cos.shape[0]) < num_positions:
            end = -(-num_positions // MORE_POSITIONS) * MORE_POSITIONS
            more_cos, more_sin = self._rotary.tables(torch.arange(num_known, end), self._dtype)
            cos, sin = self._rotation = torch.cat((cos, more_cos)), torch.cat((sin, more_sin))
        return cos, sin

    def use(self, rotation: Rotation) -> None:
        """Let the next run of the program find this result of `up_to`."""
        for table, rows in zip(self.tables, rotation, strict=True):
            table.rows, table.num_rows = rows.data_ptr(), rows.shape[0]


class NativeDecode:
    """Computes steps of at most MOST_ROWS tokens, all with wanted logits: one per request, or more with draft tokens.

    Ranks meet in the sums of a program as they do module after module, so that some may go the one way and some the
    other; several ranks compute one token per request. Uses torch's number of threads.
    """

    name = "native"
    moves_batches = True

    def __init__(self, decoder: LlamaDecoder, attention: NativeAttention) -> None:
        """Record a decoder that is_recordable."""
        assert isinstance(decoder.ops, NativeOps)
        layout = attention.pool.layout
        self._decoder, self._attention, self._ops = decoder, attention, decoder.ops
        self._buffers = _Buffers(decoder, attention)
        # Where a run finds the plans, and the numbers of its tokens
        self._plans = {window: ctypes.c_void_p() for window in decoder.windows}
        self._token_ids, self._positions, self._slots = (ctypes.c_void_p() for _ in range(3))
        self._rotations = {
            rope: RotationTable(rotary, layout.head_dim, self._buffers.x.dtype)
            for rope, rotary in decoder.rotaries.items()
        }
        self._sums = decoder.shared_sums
        num_operations = OPERATIONS_PER_LAYER * layout.num_layers + OPERATIONS_PER_ROPE * len(self._rotations)
        self._program = NativeProgram(num_operations + OPERATIONS_BESIDE, MOST_ROWS)
        self._record()

    def plan(self, batch: ForwardBatch) -> NativeDecodePlan | None:
        """Prepare a batch of at most MOST_ROWS tokens, all with wanted logits and without adapters.

        Returns None for other batches.
        """
        if batch.adapted_rows or not batch.logit_rows.shape[0] == batch.starts[-1] <= MOST_ROWS:
            return None
        if self._sums is not None and batch.longest_query > 1:
            return None  # on another rank, going module after module, sequence parallelism would divide them
        plans = [self._attention.plan(batch, window) for window in self._plans]
        return NativeDecodePlan(plans, self._rotations_of(batch), [])

    def plan_behind(
        self, batch: ForwardBatch, plan: NativeDecodePlan, works: Sequence[Work]
    ) -> NativeDecodePlan | None:
        """Prepare the step behind the one with this batch and plan, in the same memory, which `run` will move.

        Returns None if the batch's block tables have no columns for the tokens of `works`.
        """
        if not batch.look_ahead(works, self._attention.pool.layout.block_size):
            return None
        moves = plan.moves or [
            self._attention.move(batch, each, not index) for index, each in enumerate(plan.attention)
        ]
        return NativeDecodePlan(plan.attention, self._rotations_of(batch), moves)

    def _rotations_of(self, batch: ForwardBatch) -> list[Rotation]:
        num_positions = batch.longest_context
        return [table.up_to(num_positions) for table in self._rotations.values()]

    def _move(self, batch: ForwardBatch, plan: NativeDecodePlan) -> None:
        """Move the batch and its attention plans, which no step uses any more, to the next tokens."""
        for index, (window, move) in enumerate(zip(self._plans, plan.moves, strict=True)):
            if not move():  # the plan's memory is too small
                plan.attention[index] = self._attention.plan(batch, window)
                plan.moves[index] = self._attention.move(batch, plan.attention[index], not index)

    def run(self, batch: ForwardBatch, plan: NativeDecodePlan, on_taken: Callable[[], None]) -> Logits | None:
        """Compute the batch, given its plan; return on rank 0 the logits [T, vocab_size], of a single rank with maxima.

        Both are valid until the next run. Calls `on_taken` when the inputs are known to the program. Raises IndexError,
        and writes nothing, if a token is outside the vocabulary or a slot outside the pool.
        """
        if plan.moves:
            self._move(batch, plan)
        num_rows, buffers, decoder = batch.starts[-1], self._buffers, self._decoder
        if not self._embeds:
            assert decoder.embed_tokens is not None
            buffers.x[:num_rows] = decoder.embed_tokens(batch.token_ids)
        self._token_ids.value, self._positions.value = batch.token_ids.data_ptr(), batch.positions.data_ptr()
        self._slots.value = batch.slots.data_ptr()
        for table, rotation in zip(self._rotations.values(), plan.rotations, strict=True):
            table.use(rotation)
        for place, of_window in zip(self._plans.values(), plan.attention, strict=True):
            place.value = of_window.address
        on_taken()
        if not self._program.run(num_rows):
            pool = self._attention.pool
            raise IndexError(
                f"there is a slot outside the {pool.num_blocks} blocks of the KV pool, or an unknown token"
            )
        if self._sums is None:
            return buffers.results(num_rows)
        self._sums.check()
        logits = decoder.gather_logits(buffers.logits[:num_rows])
        return None if logits is None else Logits(logits)

    def close(self) -> None:
        """Do nothing: no group waits for this program."""

    def _record(self) -> None:
        buffers, decoder = self._buffers, self._decoder
        delta: torch.Tensor | None = None
        self._embeds = self._record_embedding(decoder.embed_tokens)
        for rope, rotation in self._rotations.items():
            for table, output in zip(rotation.tables, buffers.rotations[rope], strict=True):
                self._ops.record_gather(self._program, table, self._positions, output)
        for layer in decoder.own_layers:
            delta = self._record_layer(layer, delta)
        assert decoder.norm is not None
        self._record_norm(decoder.norm, delta)
        self._record_product(decoder.head, buffers.normed, buffers.logits)
        if decoder.logit_softcap is not None:
            self._ops.record_cap(self._program, buffers.logits, decoder.logit_softcap)
        if decoder.is_whole:
            self._ops.record_search(self._program, buffers.logits, *buffers.likeliest)

    def _record_embedding(self, embedding: Embedding | None) -> bool:
        """Record the copy of the tokens' vectors into x, if they are rows of x's dtype; return whether they are."""
        if type(embedding) is not Embedding or not self._decoder.is_whole:
            return False  # it scales them, or has only some
        if isinstance(embedding.matrix, DenseMatrix) and embedding.matrix.dtype == self._buffers.x.dtype:
            embedding.matrix.record_rows(self._program, self._token_ids, self._buffers.x)
        elif embedding.matrix is None and embedding.weight.dtype == self._buffers.x.dtype:
            self._vectors = Table(embedding.weight.data_ptr(), len(embedding.weight))
            self._ops.record_gather(self._program, self._vectors, self._token_ids, self._buffers.x)
        else:
            return False
        return True

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
        rotation = buffers.rotations[block.rope]
        self._ops.record_rotate_and_store(
            program, buffers.heads, rotation, pool, block.layer, self._slots, block.head_norms
        )
        self._attention.record(program, self._plans[block.window], buffers.heads, block.layer, buffers.attended)
        self._record_delta(block.o_proj.matrix, buffers.attended)

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
        self._record_delta(mlp.down_proj.matrix, buffers.gated)

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

    def _record_delta(self, matrix: Packed | None, x: torch.Tensor) -> None:
        """Record a product whose inputs are divided over the ranks, and its sum over them."""
        self._record_product(matrix, x, self._buffers.delta)
        if self._sums is not None:
            self._sums.record(self._program, self._buffers.delta)

    def _record_product(self, matrix: Packed | None, x: torch.Tensor, outputs: torch.Tensor) -> None:
        assert isinstance(matrix, Recordable)
        matrix.record(self._program, x, outputs)


class _Buffers:
    """Activations and rotations of MOST_ROWS tokens."""

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
        self._results: dict[int, Logits] = {}  # views, by their number of rows

    def results(self, num_rows: int) -> Logits:
        """Return the first num_rows rows of the logits, and their maxima."""
        if num_rows not in self._results:
            highest, tokens = self.likeliest
            self._results[num_rows] = Logits(self.logits[:num_rows], (highest[:num_rows], tokens[:num_rows]))
        return self._results[num_rows]


def _is_recordable(matrix: Packed | None) -> bool:
    return isinstance(matrix, DenseMatrix) or (isinstance(matrix, QuantizedMatrix) and matrix.is_recordable)
