"""The building blocks of the decoder. Parameters carry the names of the Hugging Face checkpoint."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional


class Embedding(nn.Module):
    """One vector for each token id. (torch's own draws random values, on the meta device too, at half a second.)"""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._shape = (size,)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self._shape, self.weight, self._eps)


class Linear(nn.Module):
    """Projections of one input, computed as one; `parts` are their names in the checkpoint and their widths."""

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts.values()), in_features))
        self.bias = nn.Parameter(torch.empty(sum(parts.values()))) if bias else None
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Turns loaded bfloat16 weights on a CPU into oneDNN's own layout, in which small batches are twice as fast;
        the plain weights are let go. Elsewhere it does nothing."""
        weight = self.weight
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _CAN_PACK:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
            del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return functional.linear(x, self.weight, self.bias)
        projected: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return projected


_CAN_PACK: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-untyped-call]


class SwiGLU(nn.Module):
    """Gated feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias)
        self.down_proj = Linear(intermediate_size, {"down_proj": hidden_size}, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        projected: torch.Tensor = self.down_proj(functional.silu(gate).mul_(up))
        return projected
