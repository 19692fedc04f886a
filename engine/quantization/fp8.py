"""Read weights stored as 8-bit floats (E4M3) with scales, as plain floats."""

from collections.abc import Iterator
from typing import Final

import torch

from engine.model.checkpoint import Checkpoint, Part, Span
from serving_core.errors import ModelError
from serving_core.model_files.stored_quantization import FP8, FP8_SCALES, StoredQuantization
from serving_core.model_files.stored_tensors import FLOATS
from serving_core.sharding import Extent, whole

SCALES: Final = FP8_SCALES[:2]  # the names of a weight's factor; activations stay unquantized


class Fp8Checkpoint(Checkpoint):
    """A checkpoint some of whose tensors are stored in 8 bits."""

    def __init__(self, checkpoint: Checkpoint, stored: StoredQuantization) -> None:
        self._checkpoint = checkpoint
        self._block = stored.block

    def names(self) -> set[str]:
        return {name for name in self._checkpoint.names() if name.rpartition(".")[2] not in FP8_SCALES}

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        shape, dtype = self._checkpoint.describe(name)
        return shape, "F32" if dtype == FP8 else dtype

    def check(self, part: Part) -> None:
        """Check a tensor as any checkpoint does. Raises ModelError also if a weight's scales are missing or have
        another shape.
        """
        super().check(part)
        shape, dtype = self._checkpoint.describe(part.name)
        if dtype != FP8:
            return
        name = self._scale_name(part.name)
        scale_shape, scale_dtype = self._checkpoint.describe(name)
        wanted = self._scale_shapes(shape)
        if scale_shape not in wanted or scale_dtype not in FLOATS:
            raise ModelError(f"{name} is {scale_dtype} {list(scale_shape)}; it must be floats {list(wanted[0])}")

    def read(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        if self._checkpoint.describe(part.name)[1] != FP8:
            yield from self._checkpoint.read(part)
            return
        outputs, inputs = part.extents
        scales = self._scales(part.name)
        for row, tensor in self._checkpoint.read(part):
            first = outputs.held.start + row
            yield row, tensor.float().mul_(self._scales_of(scales, range(first, first + len(tensor)), inputs))

    def spans(self, part: Part) -> Iterator[Span]:
        return self._checkpoint.spans(part)

    def _scale_name(self, weight: str) -> str:
        module = weight.removesuffix(".weight")
        for suffix in SCALES:
            if f"{module}.{suffix}" in self._checkpoint.names():
                return f"{module}.{suffix}"
        raise ModelError(f"the weights lack {module}.{SCALES[0]}")

    def _scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes that the scales of a weight may have."""
        if self._block is None:
            return [(shape[0], 1), (shape[0],), (), (1,), (1, 1)]
        return [tuple(-(-size // step) for size, step in zip(shape, self._block, strict=True))]

    def _scales(self, weight: str) -> torch.Tensor:
        """Return the scales, two-dimensional float32."""
        name = self._scale_name(weight)
        extents = tuple(map(whole, self._checkpoint.describe(name)[0]))
        scales = self._checkpoint.read_all(Part(name, extents)).float()
        return scales if scales.dim() == 2 else scales.reshape(-1, 1)

    def _scales_of(self, scales: torch.Tensor, rows: range, inputs: Extent) -> torch.Tensor:
        """Return the factors of these rows of the held inputs."""
        if self._block is None:
            return scales if len(scales) == 1 else scales[rows.start : rows.stop]
        of_rows, of_columns = (
            torch.arange(held.start, held.stop) // step
            for held, step in zip((rows, inputs.held), self._block, strict=True)
        )
        return scales[of_rows][:, of_columns]
