"""Latent KV: of each token one vector that all heads share, of which a layer makes the keys and values of each head.

The pool has the vectors alone, as the one key head of a cache without values. Attention is over them: queries are
brought to their width by the matrices that would make keys, and what is attended becomes values afterwards.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from serving_core.errors import ModelError

EXPAND = "expand_kv"  # what layers of transformers make keys and values with


class Expansion(NamedTuple):
    """The matrices of H heads that make keys and values of latents of width L. Beside its L numbers a latent has those
    that are rotated, which are the end of each head's key as they are."""

    keys: torch.Tensor  # [H, width of what is not rotated, L]
    values: torch.Tensor  # [H, width of V, L]

    def of(self, heads: slice) -> "Expansion":
        """That of some heads."""
        return Expansion(self.keys[heads], self.values[heads])

    def absorbed(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, D] as [T, H, width of a token's vector], whose products with vectors are those with keys."""
        plain, rotated = queries.tensor_split((self.keys.shape[1],), dim=2)
        return torch.cat((torch.einsum("thd,hdl->thl", plain, self.keys), rotated), dim=2)

    def expanded(self, attended: torch.Tensor) -> torch.Tensor:
        """Sums of vectors [T, H, width of one] as those of values [T, H, width of V]."""
        return torch.einsum("thl,hvl->thv", attended[..., : self.values.shape[2]], self.values)


class Latents:
    """In place of what a layer expands latents with."""

    def __init__(self, layer: Any, name: str) -> None:
        """`name` is that of the attention that is asked for latents; any other gets keys and values."""
        self._layer, self._name = layer, name

    def __call__(self, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One key head [1, 1, T, width of a token's vector], and values of no width."""
        if self._layer.config._attn_implementation != self._name:
            expanded: tuple[torch.Tensor, torch.Tensor] = type(self._layer).expand_kv(self._layer, latents, rotated)
            return expanded
        vectors = torch.cat((latents, rotated), dim=-1)
        return vectors, vectors[..., :0]

    @property
    def expansion(self) -> Expansion:
        """Of the heads that the layer has here."""
        widths = self._layer.qk_nope_head_dim, self._layer.v_head_dim
        weight = self._layer.kv_b_proj.weight
        keys, values = weight.view(-1, sum(widths), weight.shape[1]).split(widths, dim=1)
        return Expansion(keys, values)


def keep_latents(model: nn.Module, name: str) -> None:
    """Has the model's layers ask the attention of this name for latents. Raises ModelError where they are not known to
    have any."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, EXPAND)]
    if not layers or any(layer.kv_b_proj.bias is not None for layer in layers):
        raise ModelError(f"latent KV as {type(model).__name__} has it is not supported")
    for layer in layers:
        setattr(layer, EXPAND, Latents(layer, name))


def expansion_of(layer: nn.Module) -> Expansion | None:
    """What expands the latents that a layer asks attention for; None if it asks for keys and values."""
    latents = getattr(layer, EXPAND, None)
    return latents.expansion if isinstance(latents, Latents) else None
