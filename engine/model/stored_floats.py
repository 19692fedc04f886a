"""Read quantized weights as the floats that they stand for, where no kernel computes with the stored numbers.

A FloatCheckpoint lists and reads a quantized checkpoint as if its weights were stored as float32. Numbers become floats
row by row as they are read.
"""

import json
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch

from engine.model.checkpoint import Checkpoint, Part, Span, whole_tensor
from engine.model.stored_weights import READERS, Reader, StoredFormat, matrix_sizes
from serving_core.errors import ModelError
from serving_core.model_files.stored_quantization import (
    FP8,
    FP8_SCALES,
    MXFP4_GROUP,
    NVFP4_GROUP,
    PACKED,
    StoredQuantization,
    weight_name,
)
from serving_core.model_files.stored_tensors import FLOATS
from serving_core.sharding import Extent, whole

BYTES: Final = ("U8",)
NUMBERS: Final = ("U8", "I8", FP8)  # dtypes of a `weight` that is no float
READ_AT_ONCE: Final = 2**22  # elements


class FloatFormat(StoredFormat, Protocol):
    """Reads the weights of one format as floats."""

    def dense(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
    ) -> torch.Tensor:
        """Read the part of a module's weight within the held outputs and inputs, and return it as float32.

        The caller has checked that the module's tensors match `parts`.
        """


class FloatCheckpoint(Checkpoint):
    """A quantized checkpoint whose weights are listed and read as float32."""

    def __init__(self, checkpoint: Checkpoint, stored: StoredQuantization) -> None:
        """Read `checkpoint`, stored as `stored` says. Raises ModelError if it has weights of another format."""
        self._checkpoint, self._stored = checkpoint, stored
        self._format = FORMATS[stored.method]
        self._sources = {weight: name for name in checkpoint.names() if (weight := weight_name(name)) is not None}
        for name in self._sources.values():
            if (kind := name.rpartition(".")[2]) in PACKED and kind not in self._format.numbers:
                raise ModelError(f"{name} is not stored as {stored.method} stores a weight")

    def names(self) -> set[str]:
        return set(self._sources)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        module = self._module(name)
        if module is None:
            return self._checkpoint.describe(name)
        return self._format.sizes(self._stored, self._checkpoint, module), "F32"

    def check(self, part: Part) -> None:
        """Raise ModelError unless a tensor, as float32 if it is quantized, has the shape and a dtype of `part`.

        The tensors that store a quantized weight must be there too, in the shapes and dtypes of its format.
        """
        super().check(part)
        for each in self._parts(part.name):
            if each.name not in self._checkpoint.names():
                raise ModelError(f"the weights lack {each.name}")
            self._checkpoint.check(each)

    def read(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        if (module := self._module(part.name)) is None:
            yield from self._checkpoint.read(part)
            return
        outputs, inputs = part.extents
        step = max(1, READ_AT_ONCE // max(1, inputs.total))
        for first in range(outputs.held.start, outputs.held.stop, step):
            rows = Extent(outputs.total, range(first, min(first + step, outputs.held.stop)))
            dense = self._format.dense(self._stored, self._checkpoint, module, rows, inputs)
            yield first - outputs.held.start, dense

    def spans(self, part: Part) -> Iterator[Span]:
        """Yield the file ranges that `read` will read for this part.

        These are the wanted rows of each tensor that has a row for each output, and other tensors as a whole.
        """
        if self._module(part.name) is None:
            yield from self._checkpoint.spans(part)
        for each in self._parts(part.name):
            is_by_row = each.shape[:1] == part.shape[:1]
            yield from self._checkpoint.spans(
                each._replace(extents=(part.extents[0], *each.extents[1:])) if is_by_row else each
            )

    def read_all(self, part: Part) -> torch.Tensor:
        return super().read_all(part) if self._module(part.name) else self._checkpoint.read_all(part)

    def _module(self, name: str) -> str | None:
        """Return the module whose quantized weight has this name; None for a tensor that is stored as floats."""
        module, _, kind = name.rpartition(".")
        source = self._sources[name]
        is_quantized = kind == "weight" and (
            source.rpartition(".")[2] in PACKED or self._checkpoint.describe(source)[1] in NUMBERS
        )
        return module if is_quantized else None

    def _parts(self, name: str) -> list[Part]:
        if (module := self._module(name)) is None:
            return []
        return self._format.parts(
            self._stored, self._checkpoint, module, *self._format.sizes(self._stored, self._checkpoint, module)
        )


class Integers:
    """Reads weights of a format of integers by its Reader, and turns them into floats."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.numbers = reader.numbers
        self.sizes: Final = reader.sizes
        self.parts: Final = reader.parts

    def dense(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
    ) -> torch.Tensor:
        return self._reader.read(stored, checkpoint, module, outputs, inputs).dense()


class Fp8:
    """Reads weights of 8-bit floats, with a scale for the tensor, each output, or each block."""

    numbers: tuple[str, ...] = ("weight",)

    def sizes(self, stored: StoredQuantization, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        return matrix_sizes(checkpoint, f"{module}.weight")

    def parts(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int
    ) -> list[Part]:
        name = self._scale_name(checkpoint, module)
        if stored.block is None:
            shapes = [(outputs, 1), (outputs,), (), (1,), (1, 1)]
        else:
            shapes = [(-(-outputs // stored.block[0]), -(-inputs // stored.block[1]))]
        shape = checkpoint.describe(name)[0] if name in checkpoint.names() else shapes[0]
        return [
            whole_tensor(f"{module}.weight", (outputs, inputs), (FP8,)),
            whole_tensor(name, shape if shape in shapes else shapes[0], FLOATS),
        ]

    def dense(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
    ) -> torch.Tensor:
        numbers = checkpoint.read_all(Part(f"{module}.weight", (outputs, inputs))).float()
        name = self._scale_name(checkpoint, module)
        scales = _read_whole(checkpoint, name).float()
        if stored.block is not None:
            return numbers.mul_(_spread(scales, outputs, inputs, stored.block))
        scales = scales.reshape(-1, 1)
        return numbers.mul_(scales if len(scales) == 1 else scales[outputs.held.start : outputs.held.stop])

    def _scale_name(self, checkpoint: Checkpoint, module: str) -> str:
        names = [f"{module}.{suffix}" for suffix in FP8_SCALES]
        return next((name for name in names if name in checkpoint.names()), names[0])


E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of 4-bit floats; bit 3 is their sign
SIGNED_E2M1: Final = torch.tensor([*E2M1, *(-number for number in E2M1)])
EXPONENT_BIAS: Final = 127  # of a scale that is a power of two


class Fp4:
    """Reads weights of 4-bit floats (E2M1), two in a byte, with a scale for each `group_size` inputs."""

    numbers: tuple[str, ...] = ("weight_packed", "weight")

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def sizes(self, stored: StoredQuantization, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        outputs, num_bytes = matrix_sizes(checkpoint, self._numbers_name(checkpoint, module))
        return outputs, 2 * num_bytes

    def parts(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int
    ) -> list[Part]:
        if inputs % self._group_size:
            raise ModelError(f"{module} has {inputs} inputs; groups of {self._group_size} do not divide them")
        of_numbers = whole_tensor(self._numbers_name(checkpoint, module), (outputs, inputs // 2), BYTES)
        scale_shape = (outputs, inputs // self._group_size)
        if self._group_size == MXFP4_GROUP:
            return [of_numbers, whole_tensor(f"{module}.weight_scale", scale_shape, BYTES)]
        name, _ = self._global_scale(checkpoint, module)
        shape = checkpoint.describe(name)[0] if name in checkpoint.names() else ()
        return [
            of_numbers,
            whole_tensor(f"{module}.weight_scale", scale_shape, (FP8,)),
            whole_tensor(name, shape if shape in ((), (1,)) else (), FLOATS),
        ]

    def dense(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
    ) -> torch.Tensor:
        held, size = inputs.held, self._group_size
        words = Extent(inputs.total // 2, range(held.start // 2, -(-held.stop // 2)))
        packed = checkpoint.read_all(Part(self._numbers_name(checkpoint, module), (outputs, words)))
        first = held.start % 2
        numbers = SIGNED_E2M1[_nibbles(packed).flatten(1)[:, first : first + len(held)]]
        groups = Extent(inputs.total // size, range(held.start // size, -(-held.stop // size)))
        stored_scales = checkpoint.read_all(Part(f"{module}.weight_scale", (outputs, groups)))
        if size == MXFP4_GROUP:
            scales = torch.exp2(stored_scales.float() - EXPONENT_BIAS)
        else:
            name, is_divisor = self._global_scale(checkpoint, module)
            of_all = _read_whole(checkpoint, name).float()
            scales = stored_scales.float() / of_all if is_divisor else stored_scales.float() * of_all
        return numbers.mul_(scales[:, torch.arange(held.start, held.stop) // size - groups.held.start])

    def _numbers_name(self, checkpoint: Checkpoint, module: str) -> str:
        name = f"{module}.weight_packed"
        return name if name in checkpoint.names() else f"{module}.weight"

    def _global_scale(self, checkpoint: Checkpoint, module: str) -> tuple[str, bool]:
        """Return the name of the tensor that scales all scales, and whether they are divided by it.

        They are in checkpoints of compressed-tensors.
        """
        name = f"{module}.weight_scale_2"
        return (name, False) if name in checkpoint.names() else (f"{module}.weight_global_scale", True)


MAX_STATE_BYTES: Final = 2**16  # of the JSON that describes a weight of bitsandbytes
CODES: Final = 16  # of 4 bits
FLAT_KINDS: Final = ("nf4", "fp4")


class BitsAndBytes:
    """Reads weights of bitsandbytes.

    With 4 bits the numbers of a whole weight are in one row, two in a byte, the first one in the high bits; each is an
    index into 16 floats, and each block of them has a scale (absmax), which may be quantized itself. With 8 bits each
    output has a scale (SCB).
    """

    numbers: tuple[str, ...] = ("weight",)

    def sizes(self, stored: StoredQuantization, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        if stored.bits == 8:
            return matrix_sizes(checkpoint, f"{module}.weight")
        outputs, inputs = self._state(checkpoint, module)["shape"]
        return outputs, inputs

    def parts(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: int, inputs: int
    ) -> list[Part]:
        weight = f"{module}.weight"
        if stored.bits == 8:
            of_outputs = whole_tensor(f"{module}.SCB", (outputs,), FLOATS)
            return [whole_tensor(weight, (outputs, inputs), ("I8",)), of_outputs]
        state = self._state(checkpoint, module)
        if inputs % 2:
            raise ModelError(f"{module} has {inputs} inputs; bitsandbytes stores two in a byte")
        num_blocks = -(-outputs * inputs // state["blocksize"])
        parts = [
            whole_tensor(weight, (outputs * inputs // 2, 1), BYTES),
            whole_tensor(f"{weight}.quant_map", (CODES,), FLOATS),
        ]
        if "nested_blocksize" not in state:
            return [*parts, whole_tensor(f"{weight}.absmax", (num_blocks,), FLOATS)]
        num_nested = -(-num_blocks // state["nested_blocksize"])
        return [
            *parts,
            whole_tensor(f"{weight}.absmax", (num_blocks,), BYTES),
            whole_tensor(f"{weight}.nested_absmax", (num_nested,), FLOATS),
            whole_tensor(f"{weight}.nested_quant_map", (256,), FLOATS),
        ]

    def dense(
        self, stored: StoredQuantization, checkpoint: Checkpoint, module: str, outputs: Extent, inputs: Extent
    ) -> torch.Tensor:
        weight = f"{module}.weight"
        if stored.bits == 8:
            numbers = checkpoint.read_all(Part(weight, (outputs, inputs))).float()
            scales = checkpoint.read_all(Part(f"{module}.SCB", (outputs,))).float()
            return numbers.mul_(scales.unsqueeze(1) / 127)
        state, held = self._state(checkpoint, module), outputs.held
        row = inputs.total
        flat = Extent(outputs.total * row // 2, range(held.start * row // 2, held.stop * row // 2))
        numbers = _nibbles(checkpoint.read_all(Part(weight, (flat, whole(1))))).flip(-1).flatten()
        scales = self._scales(checkpoint, weight, state)
        places = torch.arange(held.start * row, held.stop * row) // state["blocksize"]
        codes = _read_whole(checkpoint, f"{weight}.quant_map").float()
        dense = codes[numbers].mul_(scales[places]).view(len(held), row)
        return dense[:, inputs.held.start : inputs.held.stop]

    def _scales(self, checkpoint: Checkpoint, weight: str, state: dict[str, Any]) -> torch.Tensor:
        scales = _read_whole(checkpoint, f"{weight}.absmax")
        if "nested_blocksize" not in state:
            return scales.float()
        codes = _read_whole(checkpoint, f"{weight}.nested_quant_map").float()
        of_blocks = _read_whole(checkpoint, f"{weight}.nested_absmax").float()
        places = torch.arange(len(scales)) // state["nested_blocksize"]
        return codes[scales.long()].mul_(of_blocks[places]).add_(state["nested_offset"])

    def _state(self, checkpoint: Checkpoint, module: str) -> dict[str, Any]:
        """Return the checked description of a weight of 4 bits."""
        names = [f"{module}.weight.quant_state.bitsandbytes__{kind}" for kind in FLAT_KINDS]
        name = next((name for name in names if name in checkpoint.names()), None)
        if name is None:
            raise ModelError(f"the weights lack {names[0]}")
        shape, dtype = checkpoint.describe(name)
        if len(shape) != 1 or shape[0] > MAX_STATE_BYTES or dtype not in BYTES:
            raise ModelError(f"{name} is {dtype} {list(shape)}; it must be at most {MAX_STATE_BYTES} bytes of JSON")
        try:
            state: dict[str, Any] = json.loads(bytes(_read_whole(checkpoint, name).tolist()))
            outputs, inputs = state["shape"]
            sizes = [outputs, inputs, state["blocksize"], state.get("nested_blocksize", 1)]
            is_valid = all(type(size) is int and size > 0 for size in sizes)
            float(state.get("nested_offset", 0.0) if "nested_blocksize" in state else 0.0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"{name} does not describe a weight: {error!r:.80}") from error
        if not is_valid:
            raise ModelError(f"{name} has the sizes {sizes}; they must be positive integers")
        return state


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return bytes [...] as numbers [..., 2] int64: the low bits, then the high bits."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).long()


def _read_whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return checkpoint.read_all(Part(name, tuple(map(whole, checkpoint.describe(name)[0]))))


def _spread(scales: torch.Tensor, outputs: Extent, inputs: Extent, block: tuple[int, int]) -> torch.Tensor:
    """Return one scale for each held output and input, [outputs, inputs], given one for each `block` of them."""
    rows, columns = (
        torch.arange(extent.held.start, extent.held.stop) // step
        for extent, step in zip((outputs, inputs), block, strict=True)
    )
    return scales[rows][:, columns]


FORMATS: Final[dict[str, FloatFormat]] = {
    **{method: Integers(reader) for method, reader in READERS.items()},
    "fp8": Fp8(),
    "nvfp4": Fp4(NVFP4_GROUP),
    "mxfp4-pack": Fp4(MXFP4_GROUP),
    "bitsandbytes": BitsAndBytes(),
}
