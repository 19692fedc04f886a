"""Undo what llama.cpp's converter does to the tensors of Qwen3.5's linear attention.

It stores -exp(A_log), and the heads of values in another order: in a checkpoint those that share a head of keys are
neighbors; in a GGUF file the first of each head of keys come first, then the second ones, and so on.
"""

from typing import Final

import torch

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields

DECAY: Final = "linear_attn.A_log"
OF_VALUES: Final = tuple(f"linear_attn.{each}" for each in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"))
OF_ALL: Final = ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight")  # rows of queries, keys and values
GATE: Final = "linear_attn.in_proj_z.weight"
OUTPUT: Final = "linear_attn.out_proj.weight"  # values are its columns
CHANGED: Final = (*OF_VALUES, *OF_ALL, GATE, OUTPUT)


class LinearAttentionFiles:
    """Restore the tensors of a model whose config.json has these fields."""

    def __init__(self, config: JsonFields) -> None:
        self._num_key_heads = config.integer("linear_num_key_heads")
        self._num_value_heads = config.integer("linear_num_value_heads")
        self._key_rows = 2 * self._num_key_heads * config.integer("linear_key_head_dim")  # of queries and keys

    def changes(self, name: str) -> bool:
        """Return whether the tensor of this name is stored in another way than in a checkpoint."""
        return name.endswith(CHANGED)

    def restored(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor as a checkpoint has it. Raises ModelError for a wrong shape or decay."""
        if name.endswith(DECAY):
            if not bool((stored < 0).all() and stored.isfinite().all()):
                raise ModelError(f"{name} of the GGUF file has decays that are not negative and finite")
            stored = (-stored).log()
        if name.endswith(OF_ALL):
            return torch.cat([stored[: self._key_rows], self._grouped(name, stored[self._key_rows :])])
        if name.endswith(OUTPUT):
            return self._grouped(name, stored.T).T
        return self._grouped(name, stored)

    def _grouped(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of values with those that share a head of keys side by side."""
        width, rest = divmod(len(rows), self._num_value_heads)
        if rest:
            raise ModelError(f"{name} has {len(rows)} values, which {self._num_value_heads} heads do not divide")
        per_key_head = self._num_value_heads // self._num_key_heads
        heads = rows.reshape(per_key_head, self._num_key_heads, width, *rows.shape[1:])
        return heads.transpose(0, 1).reshape(rows.shape)
