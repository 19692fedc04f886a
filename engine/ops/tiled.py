"""Make a decoder batch-invariant (--batch-invariant): the bits of a token's logits depend only on the tokens before it.

Compiled kernels are batch-invariant by themselves. A product of torch is not: its order of addition depends on the
number of rows, and at some numbers on a row's place among them. So every product, norm and activation of torch runs in
tiles of a few fixed numbers of rows, the last tile padded with zeros. The numbers are found at the start, on the device
itself: those at which a row has the same bits at every place and at every number. (The algorithm of a product depends
on shapes alone, not on values. So a few rows suffice, if their results are small compared with the summands: otherwise
rounding could hide a different order. One row at a time always agrees.) Attention runs in tiles too where no kernel is
batch-invariant (engine/attention/tiled.py). A trial of the whole decoder confirms the result (engine/numerics.py).
More than two ranks per layer are refused: over several machines the order of their sums depends on the place of a
number.

8-bit keys and values are rounded according to the other tokens of their block. With these, a prompt that is cut
elsewhere, whose beginning was cached, or that is recomputed after a preemption may differ in its last bits.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Final, Protocol

import torch

from engine.ops.base import Norm, Ops, add_scaled, capped, normed
from engine.ops.rope import Rotation
from serving_core.model_files.differences import SILU

TILE_ROWS: Final = (1, 4, 8, 16, 32, 64, 128, 256)  # candidates
CALL_ROWS: Final = 32  # overhead of one more product, in rows
PROBE_SEED: Final = 0
NUM_PROBES: Final = 8  # rows
NUM_CANDIDATES: Final = 512  # rows, of which the most sensitive become probes
MAX_CANCELLED: Final = 16  # outputs of a product that are about 0 for the probes
PROBE_POSITION: Final = 1013
ALIGNMENT: Final = 64  # bytes; misaligned inputs may be computed differently

Rows = Callable[[torch.Tensor], torch.Tensor]
"""A function of rows [T, inputs] -> [T, outputs], each of which it computes from the same row alone."""


class Tiling:
    """Finds the tile sizes of products on one device and in one dtype; each shape is tried once."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._sizes: dict[Hashable, tuple[int, ...]] = {}

    def tiled(self, product: Rows, num_inputs: int, kind: Hashable) -> Rows:
        """Return `product`, computed in tiles of numbers of rows at which a row's bits are the same.

        `kind` stands for the product's code and other sizes: products of one kind and num_inputs share a trial.
        """
        key = (num_inputs, kind)
        if key not in self._sizes:
            self._sizes[key] = agreeing_sizes(product, telling_rows(product, num_inputs, self._dtype, self._device))
        return partial(in_tiles, product, sizes=self._sizes[key])


def random_rows(num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the same random rows [NUM_PROBES, num_columns] each time, for trials."""
    return _random(num_columns).to(device, dtype)


@torch.inference_mode()
def telling_rows(product: Rows, num_inputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return trial rows [NUM_PROBES, num_inputs] at which some outputs of `product` nearly cancel; the same each time.

    So a different order of sums shows in the bits. With few bits a row approaches cancellation only by chance, so the
    best of many are taken: otherwise the rounding of the output would hide the order.
    """
    unit_rows = torch.split(torch.eye(num_inputs, dtype=dtype, device=device), max(TILE_ROWS))
    num_cancelled = min(MAX_CANCELLED, max(1, num_inputs // 2))

    def outputs(rows: torch.Tensor) -> torch.Tensor:
        some: torch.Tensor = product(rows)[:, :num_cancelled].cpu().double()
        return some

    bias = outputs(torch.zeros(1, num_inputs, dtype=dtype, device=device))
    weights = torch.cat([outputs(rows) for rows in unit_rows]) - bias
    rows = _random(num_inputs, NUM_CANDIDATES)
    candidates: torch.Tensor = (rows - (rows @ weights + bias) @ torch.linalg.pinv(weights)).to(device, dtype)
    smallest = torch.cat([outputs(part) for part in torch.split(candidates, max(TILE_ROWS))]).abs().amin(-1)
    return candidates[smallest.argsort()[:NUM_PROBES].to(device)]


def _random(num_columns: int, num_rows: int = NUM_PROBES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(PROBE_SEED)
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64, device="cpu")


@torch.inference_mode()
def agreeing_sizes(function: Rows, probes: torch.Tensor) -> tuple[int, ...]:
    """Return the numbers of rows among TILE_ROWS at which `function` gives a row the same bits at all places.

    They are ascending, and agree with the largest such number. `probes` [rows, inputs] are the trial rows. (1,) if none
    is found.
    """
    found: dict[int, torch.Tensor] = {}
    for size in TILE_ROWS:
        outputs = torch.stack([function(probe.repeat(size, 1)) for probe in probes])
        if bool((outputs == outputs[:, :1]).all()):
            found[size] = outputs[:, 0]
    if not found:
        return TILE_ROWS[:1]
    reference = found[max(found)]
    return tuple(size for size, outputs in found.items() if torch.equal(outputs, reference))


def in_tiles(function: Rows, x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return function(x), computed in tiles whose numbers of rows are among `sizes`, ascending."""
    parts, first = [], 0
    while first < x.shape[0]:
        left = x.shape[0] - first
        size = _tile_rows(left, sizes)
        parts.append(function(_tile(x, first, size))[: min(size, left)])
        first += size
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else function(x)


def _tile_rows(num_rows: int, sizes: tuple[int, ...]) -> int:
    """Return the next tile's size: one that holds all rows if that leaves little empty, else the largest that they
    fill.
    """
    largest_full = max((size for size in sizes if size <= num_rows), default=0)
    holding_all = min((size for size in sizes if size >= num_rows), default=0)
    if not largest_full or (holding_all and holding_all - num_rows < CALL_ROWS):
        return holding_all
    return largest_full


def _tile(x: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Return `size` rows from the first on, padded with zeros; contiguous and aligned."""
    tile = x[first : first + size]
    if len(tile) < size:
        return torch.cat((tile, tile.new_zeros(size - len(tile), x.shape[1])))
    tile = tile.contiguous()
    return tile if tile.data_ptr() % ALIGNMENT == 0 else tile.clone()


class TiledOps(Ops):
    """The torch ops in tiles, so that a row's bits do not depend on the other rows."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, int, torch.dtype], tuple[int, ...]] = {}

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        return True

    def norm(self, x: torch.Tensor, norm: Norm, delta: torch.Tensor | None = None) -> torch.Tensor:
        add_scaled(x, delta, norm.delta_scale)
        rows = x.reshape(-1, x.shape[-1])
        name = "centering norm" if norm.centers else "norm"
        return self._in_tiles(name, lambda tile: normed(tile, norm), rows).view(x.shape)

    def rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Return heads [T, N, D] rotated by their positions' cosines and sines, as a new tensor.

        Products and the sum are each rounded, so that the result is unique.
        """
        cosines, signed_sines = (each.float() for each in rotation)
        exact = heads.float()
        turned = exact.roll(heads.shape[-1] // 2, -1) * signed_sines
        return (exact * cosines).add_(turned).to(heads.dtype)

    def gate(self, gates_and_ups: torch.Tensor, activation: str = SILU) -> torch.Tensor:
        return self._in_tiles(activation, partial(super().gate, activation=activation), gates_and_ups)

    def cap(self, logits: torch.Tensor, cap: float) -> None:
        logits.copy_(self._in_tiles("cap", lambda tile: capped(tile.float(), cap), logits))

    def _in_tiles(self, name: str, function: Rows, rows: torch.Tensor) -> torch.Tensor:
        key = (name, rows.shape[1], rows.dtype)
        if key not in self._sizes:
            self._sizes[key] = agreeing_sizes(function, random_rows(rows.shape[1], rows.dtype, rows.device))
        return in_tiles(function, rows, self._sizes[key])


class Rotary(Protocol):
    """Computes the cosines and sines of positions."""

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Return the cosines and sines of positions [T], each [T, 1, head_dim] in this dtype.

        The first half of the sines is negated.
        """


class TiledRotary:
    """Computes the cosines and sines of another Rotary in tiles, so that a row's bits do not depend on other rows."""

    def __init__(self, rotary: Rotary, device: torch.device) -> None:
        self._rotary = rotary
        self._probe = torch.tensor([[PROBE_POSITION]], device=device)
        self._sizes: dict[torch.dtype, tuple[int, ...]] = {}

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Return the cosines and sines of positions [T], each [T, 1, head_dim] in this dtype.

        The first half of the sines is negated.
        """

        def both(tile: torch.Tensor) -> torch.Tensor:
            return torch.cat(self._rotary.tables(tile.flatten(), dtype), -1).flatten(1)

        if dtype not in self._sizes:
            self._sizes[dtype] = agreeing_sizes(both, self._probe)
        cosines, signed_sines = in_tiles(both, positions.unsqueeze(1), self._sizes[dtype]).chunk(2, -1)
        return cosines.contiguous().unsqueeze(1), signed_sines.contiguous().unsqueeze(1)


def batch_invariant_ops(ops: Ops, dtype: torch.dtype) -> Ops:
    """Return `ops` if they are batch-invariant for rows of dtype, else TiledOps."""
    return ops if ops.is_batch_invariant(dtype) else TiledOps()
