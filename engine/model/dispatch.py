"""Which experts tokens take, and the sum of what these give: as an interface, and by torch on every device.

Shapes: T tokens, N experts, C of them chosen by each token, E hidden size.
"""

from typing import NamedTuple, Protocol

import torch
from torch.nn import functional


class Routing(NamedTuple):
    """T * C rows, sorted by their expert and then by their token."""

    tokens: torch.Tensor  # [T * C] int64: of each row
    starts: torch.Tensor  # [N + 1] int32, in host memory: rows from starts[n] up to starts[n + 1] are for expert n
    places: torch.Tensor  # [T, C] int64: a token's rows, the likeliest expert's first
    weights: torch.Tensor  # [T, C] float32: and what these count


class Shared(NamedTuple):
    """What the expert that all tokens take gives, and how far its gate is open."""

    outputs: torch.Tensor  # [T, E]
    logits: torch.Tensor  # [T, 1]


class Dispatch(Protocol):
    """A token's results depend on that token alone."""

    def route(self, logits: torch.Tensor, num_chosen: int, is_normalized: bool) -> Routing:
        """Of logits [T, N] the softmax, computed in float32, then the likeliest; their weights are made to sum up to 1
        if `is_normalized`."""

    def mix(self, rows: torch.Tensor, routing: Routing, shared: Shared | None) -> torch.Tensor:
        """rows [T * C, E] -> [T, E], added up in float32"""


class TorchDispatch:
    """On every device."""

    def route(self, logits: torch.Tensor, num_chosen: int, is_normalized: bool) -> Routing:
        num_experts = logits.shape[1]
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(num_chosen)
        if is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        counts = experts.bincount(minlength=num_experts).cpu()
        starts = functional.pad(counts.cumsum(0), (1, 0)).int()
        return Routing(order // num_chosen, starts, places.view_as(chosen), weights)

    def mix(self, rows: torch.Tensor, routing: Routing, shared: Shared | None) -> torch.Tensor:
        # One product and one sum after the other, each rounded alone: so in one way only.
        mixed = torch.zeros((len(routing.places), rows.shape[1]), device=rows.device)
        for places, weights in zip(routing.places.unbind(1), routing.weights.unbind(1), strict=True):
            mixed += rows.index_select(0, places).float() * weights.unsqueeze(1)
        if shared is not None:
            mixed += shared.outputs.float() * _sigmoid(shared.logits)
        return mixed.to(rows.dtype)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """[T, 1] float32. (torch.sigmoid computes the last rows in another way than those before.)"""
    return functional.pad(logits.float(), (0, 1)).softmax(-1)[:, :1]
