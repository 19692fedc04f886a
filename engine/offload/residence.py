"""Decide which offloaded layers are in memory, without memory or clock."""

from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Final

from serving_core.errors import SettingsError

ROOM: Final = 2  # layers: the one that computes, and the one that is read meanwhile


def layers_elsewhere(layer_bytes: Sequence[int], other_bytes: int, memory_bytes: int) -> list[int]:
    """Return the layers to offload, by number, so that the rest fits in memory_bytes.

    At any time `other_bytes`, the layers that stay and ROOM offloaded ones are in memory. Offloaded layers are spread
    evenly, since reading a layer takes longer than computing it. Raises SettingsError if even ROOM layers do not fit.
    """
    if other_bytes + sum(layer_bytes) <= memory_bytes:
        return []
    least_bytes = other_bytes + ROOM * max(layer_bytes)
    if least_bytes > memory_bytes or len(layer_bytes) <= ROOM:
        least_bytes = min(least_bytes, other_bytes + sum(layer_bytes))
        raise SettingsError(f"--weights-memory-bytes {memory_bytes}: these weights take {least_bytes} at least")
    stays = (memory_bytes - least_bytes) // max(layer_bytes)
    share = Fraction(len(layer_bytes) - stays, len(layer_bytes))
    return [number for number in range(len(layer_bytes)) if int((number + 1) * share) > int(number * share)]


class Residence:
    """Tracks which offloaded layers should be in memory: at most ROOM, the one that computes first.

    Steps go through the layers in order and repeat, but may begin anywhere.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._following: Final = dict(zip(layers, (*layers[1:], layers[0]), strict=True))
        self.wanted = self._from(layers[0])

    def begin(self, layer: int) -> None:
        """Note that this layer begins to compute; it and the layers behind it are wanted until its end."""
        self.wanted = self._from(layer)

    def end(self, layer: int) -> None:
        self.wanted = self._from(self._following[layer])

    def next_move(self, loaded: Collection[int]) -> tuple[list[int], int | None]:
        """Return which of the `loaded` layers to free now, and which layer to read then; None if none is missing."""
        missing = (layer for layer in self.wanted if layer not in loaded)
        return sorted(set(loaded) - set(self.wanted)), next(missing, None)

    def _from(self, layer: int) -> list[int]:
        wanted = [layer]
        while len(wanted) < ROOM and (layer := self._following[layer]) not in wanted:
            wanted.append(layer)
        return wanted
