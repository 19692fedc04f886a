"""A decoder that transformers computes, over our pool and with our attention."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from engine.attention.paged import Attention, PortableAttention, Scoring
from engine.foreign.interface import NAME, Call, Step, answering
from engine.foreign.stages import Handover
from engine.forward_batch import ForwardBatch
from engine.model.llama import LAYERS_PER_REPORT
from engine.parallel import LEADER, RankGroup
from engine.pipeline import Pipeline
from serving_core.errors import ModelError
from serving_core.layout import KVLayout
from serving_core.requests import OnLayer
from serving_core.sharding import Extent, Shard

EAGER: Final = "eager"  # transformers' own attention, step by step
MOST_CHARACTERS: Final = 300
UNCOMPUTABLE: Final = (  # what models raise
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ForeignDecoder:
    """One rank's part of a loaded model."""

    def __init__(
        self,
        model: nn.Module,
        group: RankGroup,
        shard: Shard,
        device: torch.device,
        layout: KVLayout,
        pipeline: Pipeline | None,
    ) -> None:
        """Tries the model out, whose layers the ranks of `group` compute. `layout` is that of the rank's pool. Raises
        ModelError unless each of its layers asks once, and in order, for attention over keys and values as they lie
        there."""
        self._model: Any = model
        self._group = group
        self._shard = shard
        handover = None if pipeline is None else Handover(model, shard, pipeline)
        asked = self._ask(device)
        if handover is not None:
            handover.is_on = True
        self._is_divided: Final = _is_divided(asked, layout, shard)
        """Whether each rank's model asks for the attention of that rank's heads; else of all."""
        self.needs_portable: Final = any(call.is_unusual for call in asked)
        """Whether only the portable attention computes what it asks for."""

    def __call__(
        self, batch: ForwardBatch, attention: Attention, on_layer: OnLayer | None = None
    ) -> torch.Tensor | None:
        """Writes the batch's keys and values into the pool. Gives the logits [S, vocab_size] of the wanted rows on
        rank 0 of the last stage, None on the others."""
        step: Step = _Paged(batch, attention, on_layer)
        if not self._is_divided:
            step = _Divided(step, self._group, self._shard)
        with answering(step):
            return self._logits(batch.token_ids, batch.positions, batch.logit_rows)

    def eager(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """The logits [T, vocab_size] of one text by transformers' own attention, on rank 0."""
        rows = torch.arange(len(token_ids), device=token_ids.device)
        self._model.config._attn_implementation = EAGER
        try:
            return self._logits(token_ids, rows, rows)
        finally:
            self._model.config._attn_implementation = NAME

    @property
    def module(self) -> Any:
        """The model of transformers."""
        return self._model

    def _logits(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        token_ids = token_ids.unsqueeze(0)
        logits = self._model(
            input_ids=token_ids,
            position_ids=positions.unsqueeze(0),
            # With one it takes no jump in the positions for the beginning of another text. It hides nothing.
            attention_mask=torch.ones_like(token_ids),
            use_cache=False,
            logits_to_keep=rows,
        ).logits.squeeze(0)
        if len(logits) != len(rows):
            raise ModelError(f"{type(self._model).__name__} gives logits of other tokens than those that were wanted")
        return logits if self._shard.is_last and self._group.rank == LEADER else None

    @torch.inference_mode()
    def _ask(self, device: torch.device) -> list[Call]:
        trial = _Trial()
        ids = torch.zeros(2, dtype=torch.int64, device=device)
        with answering(trial):
            try:
                self._logits(ids, torch.arange(2, device=device), torch.arange(1, device=device))
            except UNCOMPUTABLE as error:
                name = type(self._model).__name__
                raise ModelError(f"{name} cannot be computed in steps: {in_a_line(error)}") from error
        return trial.calls


def in_a_line(error: Exception) -> str:
    """What an error says, in a line that is not too long."""
    said = " ".join(str(error).split())
    return said if len(said) <= MOST_CHARACTERS else f"{said[:MOST_CHARACTERS]}..."


class _Trial:
    """Notes what is asked for."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def attend(self, call: Call) -> torch.Tensor:
        self.calls.append(call)
        return call.queries.new_zeros(call.output_shape)


class _Paged:
    """Attention over the pool, for one batch."""

    def __init__(self, batch: ForwardBatch, attention: Attention, on_layer: OnLayer | None) -> None:
        self._batch = batch
        self._attention = attention
        self._on_layer = on_layer
        self._plans: dict[int | None, Any] = {}

    def attend(self, call: Call) -> torch.Tensor:
        attention, window = self._attention, call.window
        attention.pool.store(call.layer, self._batch.slots, call.keys, call.values)
        if window not in self._plans:
            self._plans[window] = attention.plan(self._batch, window)
        attend = self._scored(call) if call.is_scored else attention.attend
        queries = call.queries if call.expansion is None else call.expansion.absorbed(call.queries)
        # Backends scale by the width of a head. (Not to be done where it changes nothing: it rounds.)
        factor = call.scaling * queries.shape[2] ** 0.5
        queries = queries if abs(factor - 1) < 1e-9 else queries * factor
        attended = attend(queries, call.layer, self._plans[window])
        self._report(call.layer + 1 - attention.pool.layout.first_layer)
        return attended if call.expansion is None else call.expansion.expanded(attended)

    def _scored(self, call: Call) -> Callable[[torch.Tensor, int, Any], torch.Tensor]:
        attention, scoring = self._attention, Scoring(call.softcap, call.sinks)
        assert isinstance(attention, PortableAttention), "the engine takes no other for such models"
        return lambda queries, layer, plan: attention.attend(queries, layer, plan, scoring)

    def _report(self, num_done: int) -> None:
        if self._on_layer is None:
            return
        if num_done % LAYERS_PER_REPORT == 0 or num_done == self._attention.pool.layout.num_layers:
            self._on_layer(num_done)


class _Divided:
    """Attention of all heads, of which each rank computes its own."""

    def __init__(self, step: Step, group: RankGroup, shard: Shard) -> None:
        self._step = step
        self._group = group
        self._queries, self._keys = (slice(heads.held.start, heads.held.stop) for heads in _heads(shard))

    def attend(self, call: Call) -> torch.Tensor:
        own = call._replace(
            queries=call.queries[:, self._queries],
            keys=call.keys[:, self._keys],
            values=call.values[:, self._keys],
            sinks=None if call.sinks is None else call.sinks[self._queries],
            expansion=None if call.expansion is None else call.expansion.of(self._queries),
        )
        attended = call.queries.new_zeros(call.output_shape)
        attended[:, self._queries] = self._step.attend(own)
        self._group.all_reduce(attended)
        return attended


def _heads(shard: Shard) -> tuple[Extent, Extent]:
    return shard.query_heads, shard.kv_heads


def _is_divided(calls: list[Call], layout: KVLayout, shard: Shard) -> bool:
    """Whether the calls are for the heads of the rank's own layout; else for all. Raises ModelError for others."""
    if not calls:
        raise ModelError("a model that does its attention itself, past transformers' interface, is not supported")
    if [call.layer for call in calls] != list(layout.layers):
        raise ModelError(
            f"{len(calls)} times attention over keys and values is asked for, and only once in each of "
            f"{layout.num_layers} layers, in order, is supported"
        )
    own, whole = (tuple(len(heads.held) for heads in _heads(shard)), tuple(heads.total for heads in _heads(shard)))
    num_heads = {(call.queries.shape[1], call.keys.shape[1]) for call in calls}
    if num_heads not in ({own}, {whole}):
        raise ModelError(
            f"the model has {calls[0].queries.shape[1]} query and {calls[0].keys.shape[1]} KV heads in layer 0, and "
            f"config.json says {whole[0]} and {whole[1]}"
        )
    for call, widths in zip(calls, layout.widths, strict=True):
        if (call.keys.shape[2], call.values.shape[2]) != widths:
            raise ModelError(
                f"a head of layer {call.layer} has {call.keys.shape[2]} + {call.values.shape[2]} elements in K + V, "
                f"and config.json says {widths.keys} + {widths.values}"
            )
    return num_heads == {own}
