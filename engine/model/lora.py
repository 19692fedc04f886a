"""Apply LoRA adapters (arXiv 2106.09685) to a decoder's projections.

An adapter computes only the rows of its own requests, with Linear products, and adds its sums row by row. So the bits
of a row depend on that row alone wherever the model's do.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from engine.model.layers import Deltas, Linear
from serving_core.sharding import whole


class Delta(nn.Module):
    """One adapter's addition to one Linear: a product down to the adapter's rank, and one up to all outputs."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """Take weights [rank, inputs] and [outputs, rank]; the ranks of several parts are concatenated."""
        super().__init__()
        self.down, self.up = _linear(down), _linear(up)

    @property
    def is_batch_invariant(self) -> bool:
        """Return whether the bits of a row depend on that row alone."""
        return self.down.is_batch_invariant and self.up.is_batch_invariant

    @property
    def num_bytes(self) -> int:
        """Return the memory of both products."""
        return self.down.num_bytes + self.up.num_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the addition [T, outputs] for x [T, inputs]."""
        added: torch.Tensor = self.up(self.down(x))
        return added


class Adapters(nn.Module):
    """The LoRA adapters of one decoder, or of one rank's part, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._by_name: dict[str, Mapping[Linear, Delta]] = {}
        self._deltas = nn.ModuleList()

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def add(self, name: str, deltas: Mapping[Linear, Delta]) -> int:
        """Add an adapter of this name, given its delta for each projection that it changes; return its bytes."""
        assert name not in self._by_name, "an adapter of this name is loaded"
        self._by_name[name] = deltas
        self._deltas.extend(deltas.values())
        return sum(delta.num_bytes for delta in deltas.values())

    def remove(self, name: str) -> int:
        """Remove an adapter that no later step uses, if it is there; return its bytes."""
        deltas = self._by_name.pop(name, {})
        self._deltas = nn.ModuleList(delta for each in self._by_name.values() for delta in each.values())
        return sum(delta.num_bytes for delta in deltas.values())

    def deltas_for(self, adapted_rows: Mapping[str, torch.Tensor]) -> Deltas:
        """Return the additions of adapters to a batch; adapted_rows has the rows of each adapter by name."""
        return _RowDeltas([(self._by_name[name], rows) for name, rows in adapted_rows.items()])


class _RowDeltas:
    """The deltas of a batch. A row has at most one adapter."""

    def __init__(self, adapted: Sequence[tuple[Mapping[Linear, Delta], torch.Tensor]]) -> None:
        self._adapted = adapted

    def add(self, projection: Linear, x: torch.Tensor, projected: torch.Tensor) -> None:
        for deltas, rows in self._adapted:
            if projection in deltas:
                projected.index_add_(0, rows, deltas[projection](x.index_select(0, rows)))


def _linear(weight: torch.Tensor) -> Linear:
    num_outputs, num_inputs = weight.shape
    with torch.device("meta"):
        linear = Linear(whole(num_inputs), {"": whole(num_outputs)}, bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.pack(None)
    return linear
