"""Attention as models of transformers ask for it: our function, under our name, in their attention interface and in
their interface of masks. No mask is ever made: in its place goes what tokens see.

Whose step it is stands in a context variable, since not every model hands down what its caller says.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.foreign.latent import Expansion, expansion_of
from engine.foreign.sight import MaskFunction, Sight, sight_of
from serving_core.errors import ModelError

NAME: Final = "splitserve_paged"
WITHOUT_EFFECT: Final = (  # on attention: what else layers are told, and what only backends of transformers read
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
)


class Call(NamedTuple):
    """What one layer asks for: T tokens, H heads, K key heads. Scores are capped at softcap, and a sink of each head
    takes part in the sum of their weights. Of latents keys are the vectors of tokens, and values are of no width."""

    layer: int
    queries: torch.Tensor  # [T, H, D]
    keys: torch.Tensor  # [T, K, D]
    values: torch.Tensor  # [T, K, width of V]
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [H]
    expansion: Expansion | None  # of latents

    @property
    def is_scored(self) -> bool:
        """Whether scores are more than scaled products."""
        return self.softcap is not None or self.sinks is not None

    @property
    def is_unusual(self) -> bool:
        """Whether not every backend can."""
        return self.is_scored or self.keys.shape[2] != self.values.shape[2]

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """[T, H, width of V]"""
        width = self.values.shape[2] if self.expansion is None else self.expansion.values.shape[1]
        return self.queries.shape[0], self.queries.shape[1], width


class Step(Protocol):
    """What a model computes at the moment."""

    def attend(self, call: Call) -> torch.Tensor:
        """The attention output [T, H, width of V]."""


_step: ContextVar[Step] = ContextVar("step")


@contextmanager
def answering(step: Step) -> Iterator[None]:
    """What models of this thread ask for within it goes to this step."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Sight | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Takes [1, heads, T, width], gives [1, T, heads, width] and no weights."""
    asked = sorted(name for name, value in others.items() if value is not None and name not in WITHOUT_EFFECT)
    if dropout:
        asked.append("dropout")
    if asked:
        raise ModelError(f"{type(module).__name__} asks attention for {asked[0]}, which is not supported")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not isinstance(attention_mask, Sight):
        raise ModelError(f"{type(module).__name__} asks for attention without a layer's number or a mask of its layer")
    window = attention_mask.window
    if sliding_window not in (None, window):
        raise ModelError(f"{type(module).__name__} asks for a window of {sliding_window} under a mask of {window}")
    queries, keys, values = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(scaling, complex):  # the root of a negative number
        raise ModelError(f"{type(module).__name__} asks for scores times {scaling}, which is not a real number")
    call = Call(layer, queries, keys, values, scaling, window, softcap, s_aux, expansion_of(module))
    return _step.get().attend(call).unsqueeze(0), None


def _see(*, mask_function: MaskFunction, config: Any, **others: Any) -> Sight:
    window = getattr(config, "sliding_window", None)
    return sight_of(mask_function, window if isinstance(window, int) else None)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _see)
