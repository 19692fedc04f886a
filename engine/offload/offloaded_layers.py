"""What is known of layers whose weights are elsewhere, wherever that is, and of those that put them there."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from engine.model.layers import Layer


class OffloadedLayers(Protocol):
    """Reads ahead for one model, whose layers say when they begin and end."""

    @property
    def where(self) -> str:
        """In words: on disk, or in host memory."""

    @property
    def layer_bytes(self) -> Mapping[int, int]:
        """Of each of these layers, by its number."""

    @property
    def num_read_bytes(self) -> int:
        """So far."""

    def read_alone(self) -> tuple[int, float]:
        """Reads all of them once, for nothing; to be called between steps. Gives bytes and seconds."""


class LayerStore(Protocol):
    """Takes layers one at a time, as they are loaded."""

    def begin(self) -> None:
        """Another layer comes."""

    def holding(self, module: Layer) -> AbstractContextManager[None]:
        """Where a module of the layer is to be filled and packed."""

    @property
    def held_bytes(self) -> int:
        """Of the layer that came last, what can be elsewhere."""

    def offload(self, number: int, layer: nn.Module) -> None:
        """Puts that layer elsewhere. Raises SettingsError when there is no room for it."""

    def finish(self) -> OffloadedLayers | None:
        """To be called when all layers have come. None: none was put elsewhere."""
