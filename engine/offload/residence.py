"""Which layers are in memory when not all are: the rule, without memory or clock."""

from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Final

from serving_core.errors import SettingsError

ROOM: Final = 2  # layers: the one that computes, and the one that is read meanwhile


def layers_elsewhere(layer_bytes: Sequence[int], other_bytes: int, memory_bytes: int) -> list[int]:
    """The layers, by number, that do not stay in memory, so that what is there at any time fits: `other_bytes`, the
    layers that stay, and ROOM others. They are spread evenly, as reading one takes longer than computing one.

    Raises SettingsError when not even that fits."""
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
    """Of the layers that are kept elsewhere, those that are wanted in memory now: at most ROOM, the first one first.

    Steps go through them in order and begin again, but may begin anywhere.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._following: Final = dict(zip(layers, (*layers[1:], layers[0]), strict=True))
        self.wanted = self._from(layers[0])

    def begin(self, layer: int) -> None:
        """A layer is to compute, and stays until its end."""
        self.wanted = self._from(layer)

    def end(self, layer: int) -> None:
        self.wanted = self._from(self._following[layer])

    def next_move(self, loaded: Collection[int]) -> tuple[list[int], int | None]:
        """Which of the loaded layers are to be let go, and which one is to be read then, if any."""
        missing = (layer for layer in self.wanted if layer not in loaded)
        return sorted(set(loaded) - set(self.wanted)), next(missing, None)

    def _from(self, layer: int) -> list[int]:
        wanted = [layer]
        while len(wanted) < ROOM and (layer := self._following[layer]) not in wanted:
            wanted.append(layer)
        return wanted
