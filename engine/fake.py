"""Compute a fake model whose outputs can be worked out on paper. It stores and reads KV blocks like a real model.

For each token the model writes the token id as K and the position (0, 1, ...) as V, into every layer, head and element.
From the values that it reads back through the block table it computes the next token:

    next = (sum over the context of token_id[i] * (i + 1) + context length) mod vocab_size

    context [97, 98]:  97 * 1 + 98 * 2 + 2 = 295,  295 mod 260 = 35

The sum is the mean over all ranks, layers, heads and elements, rounded down: one wrong block anywhere changes the
output. The logit of the token r places after `next` (cyclically) is -r: `next` is the greedy choice, next + 1 the
second.

Its config.json may set `step_s` and `token_s`: seconds that every step takes, and every token in it in addition.
"""

import time
from pathlib import Path
from typing import Final

import torch

from engine.attention.paged import Attention
from engine.forward_batch import ForwardBatch
from engine.parallel import RankGroup
from serving_core.errors import ModelError
from serving_core.json_fields import read_json_object
from serving_core.model_files.config import ModelConfig
from serving_core.requests import OnLayer

EXACT_INTEGERS: Final = 2**24  # float32 represents the integers up to here


class FakeModel:
    """The fake model, used instead of a decoder; the module's docstring gives the formula of its outputs."""

    num_divided_passes = 0
    reuses_prefixes = True

    def __init__(self, config: ModelConfig, folder: Path, group: RankGroup) -> None:
        if max(config.vocab_size, config.max_position_embeddings) > EXACT_INTEGERS:
            raise ModelError(f"the fake model's vocab_size and max_position_embeddings are at most {EXACT_INTEGERS}")
        fields = read_json_object(folder / "config.json")
        self._step_s = fields.number("step_s", 0.0)
        self._token_s = fields.number("token_s", 0.0)
        self._group = group
        self._vocab_size = config.vocab_size

    def __call__(
        self, batch: ForwardBatch, attention: Attention, on_layer: OnLayer | None = None
    ) -> torch.Tensor | None:
        """Write the batch into the pool; return the logits [S, vocab_size] of the wanted rows.

        Ranks other than 0 return None.
        """
        time.sleep(self._step_s + self._token_s * len(batch.token_ids))
        self._store(batch, attention)
        if on_layer is not None:
            on_layer(attention.pool.layout.num_layers)
        next_tokens = self._next_tokens(batch, attention)
        if self._group.rank != 0:
            return None
        logits = torch.empty(len(next_tokens), self._vocab_size, device=batch.token_ids.device)
        tokens = torch.arange(self._vocab_size, device=logits.device)
        for row, next_token in zip(logits, next_tokens, strict=True):
            row[:] = -((tokens - next_token) % self._vocab_size)
        return logits

    def _store(self, batch: ForwardBatch, attention: Attention) -> None:
        layout = attention.pool.layout
        shape = (len(batch.token_ids), layout.num_kv_heads, layout.head_dim)
        keys = batch.token_ids.float().view(-1, 1, 1).expand(shape)
        values = batch.positions.float().view(-1, 1, 1).expand(shape)
        for layer in layout.layers:
            attention.pool.store(layer, batch.slots, keys, values)

    def _next_tokens(self, batch: ForwardBatch, attention: Attention) -> list[int]:
        """Return the next token behind each wanted row."""
        if not len(batch.logit_rows):
            return []
        layout = attention.pool.layout
        num_copies = layout.num_layers * layout.num_kv_heads * layout.head_dim
        requests = (torch.searchsorted(batch.query_starts, batch.logit_rows, right=True) - 1).tolist()
        lengths = (batch.positions[batch.logit_rows] + 1).tolist()
        totals = [_total(batch, attention, *row) for row in zip(requests, lengths, strict=True)]
        sums = torch.tensor([*totals, num_copies], device=batch.token_ids.device)  # int64
        self._group.all_reduce(sums)
        *totals, num_copies = sums.tolist()
        return [
            (total // num_copies + length) % self._vocab_size for total, length in zip(totals, lengths, strict=True)
        ]


def _total(batch: ForwardBatch, attention: Attention, request: int, length: int) -> int:
    """Return the sum over the first `length` tokens of a context, over all copies on this rank."""
    pool = attention.pool
    table = batch.block_tables[request, : pool.layout.num_blocks_for(length)]
    total = 0
    for layer in pool.layout.layers:
        token_ids = pool.keys(layer)[table].flatten(0, 1)[:length].long()
        positions = pool.values(layer)[table].flatten(0, 1)[:length].long()
        total += int((token_ids * (positions + 1)).sum())
    return total
