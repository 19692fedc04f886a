"""Read gpt-oss from a GGUF file, whose experts are matrices of their own, as its checkpoint has them.

A checkpoint stacks the experts of a layer, with inputs before outputs, and the outputs of gate and up projection
alternate.
"""

from collections.abc import Iterator
from typing import Final

import torch

from engine.model.checkpoint import Checkpoint, Part, Span, whole_tensor
from serving_core.model_files.stored_tensors import FLOATS

PARTS: Final = {  # the end of a name: the projections whose outputs it has in turn
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_up_proj_bias": ("gate_proj_bias", "up_proj_bias"),
    "down_proj": ("down_proj",),
}
BIAS: Final = ".down_proj_bias"  # of all experts of a layer, which no other model has


class GptOssFiles(Checkpoint):
    """The tensors of a checkpoint, of those of a GGUF file."""

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored
        names = stored.names()
        self._layers = {name.removesuffix(BIAS) for name in names if name.endswith(BIAS)}
        self._num_experts = {
            layer: sum(name.startswith(f"{layer}.") and name.endswith(".down_proj.weight") for name in names)
            for layer in self._layers
        }

    def names(self) -> set[str]:
        made = {f"{layer}.{part}" for layer in self._layers for part in PARTS}
        used = {source for name in made for source in self._sources(name)}
        return self._stored.names() - used | made

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        if not self._is_made(name):
            return self._stored.describe(name)
        sources = self._sources(name)
        num_parts = len(PARTS[name.rpartition(".")[2]])
        (first, *inputs), dtype = self._stored.describe(sources[0])
        if not inputs or name.endswith("_bias"):
            return (first, *(num_parts * each for each in inputs)), dtype
        return (len(sources) // num_parts, *inputs, num_parts * first), dtype

    def read(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        if not self._is_made(part.name):
            yield from self._stored.read(part)
            return
        held = tuple(slice(extent.held.start, extent.held.stop) for extent in part.extents)
        sources, num_parts = self._sources(part.name), len(PARTS[part.name.rpartition(".")[2]])
        if part.name.endswith("_bias"):
            yield 0, torch.stack([self._whole(each) for each in sources], dim=-1).flatten(1)[held]
            return
        for row, expert in enumerate(part.extents[0].held):
            projections = [self._whole(each) for each in sources[num_parts * expert : num_parts * (expert + 1)]]
            yield row, torch.stack(projections, dim=1).flatten(0, 1).T[held[1:]].unsqueeze(0)

    def spans(self, part: Part) -> Iterator[Span]:
        """Yield the file ranges that the whole tensor is made of."""
        if not self._is_made(part.name):
            yield from self._stored.spans(part)
            return
        for source in self._sources(part.name):
            yield from self._stored.spans(whole_tensor(source, self._stored.describe(source)[0], FLOATS))

    def _is_made(self, name: str) -> bool:
        layer, _, part = name.rpartition(".")
        return layer in self._layers and part in PARTS

    def _sources(self, name: str) -> list[str]:
        """Return the stored tensors that one of a layer is made of, expert by expert."""
        layer, _, part = name.rpartition(".")
        if part.endswith("_bias"):
            return [f"{layer}.{each}" for each in PARTS[part]]
        return [f"{layer}.{expert}.{each}.weight" for expert in range(self._num_experts[layer]) for each in PARTS[part]]

    def _whole(self, name: str) -> torch.Tensor:
        return self._stored.read_all(whole_tensor(name, self._stored.describe(name)[0], FLOATS))
