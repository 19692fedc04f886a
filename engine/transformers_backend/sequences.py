"""Compute a model of transformers one sequence after the other, with transformers' own attention and cache.

For models that the paged attention cannot compute: those with a fixed state (recurrent or convolution), with attention
past transformers' interface, or with layers of different shapes. Between steps the pool holds what transformers' cache
holds. KV blocks hold what it keeps of each token, with the heads of a layer side by side. The state blocks, which lead
a request's block table, hold its fixed state as bytes.
"""

import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from transformers import cache_utils

from engine.attention.paged import Attention
from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch
from engine.transformers_backend.decoder import UNCOMPUTABLE, in_a_line
from serving_core.errors import ModelError
from serving_core.layout import KVLayout, Widths
from serving_core.requests import OnLayer

CACHE_NAMES: Final = ("past_key_values", "cache_params")  # arguments by which models take their cache
TOKENLESS_BLOCK: Final = 2**16  # tokens of a block where no layer keeps anything of a token
TRIED_TOKENS: Final = 6
WHOLE: Final[
    dict[type[Any], Any]
] = {  # layers that keep all tokens, in place of layers that drop those before a window
    cache_utils.DynamicSlidingWindowLayer: cache_utils.DynamicLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: cache_utils.LinearAttentionAndFullAttentionLayer,
}
KNOWN: Final = (
    cache_utils.DummyLayer,
    cache_utils.DynamicIndexedLayer,
    cache_utils.DynamicLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionLayer,
)
LARGEST_DIFFERENCE: Final = 1e-3  # of a token's logits, relative to their size
COARSE_DIFFERENCE: Final = 0.05  # with 16 bits
INDEXER: Final = "indexer_keys"


class KeptTokens(NamedTuple):
    """What a layer of transformers' cache keeps of each token, in one layer of the pool."""

    layer: int
    names: tuple[str, ...]  # attributes: keys and values, or the keys of an indexer
    shapes: tuple[tuple[int, int], ...]  # heads and width of each

    @property
    def widths(self) -> Widths:
        keys, *values = (heads * width for heads, width in self.shapes)
        return Widths(keys, sum(values))


class KeptState(NamedTuple):
    """A tensor of fixed size that a layer of transformers' cache keeps of a sequence."""

    layer: int
    name: str  # conv_states or recurrent_states
    number: int  # within the layer
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SequenceDecoder:
    """A whole loaded model, on one rank."""

    num_divided_passes = 0
    needs_portable: Final = True

    def __init__(self, model: Any, device: torch.device, block_size: int, kv_dtype: str) -> None:
        """Try the model with TRIED_TOKENS tokens.

        Raises ModelError if it does not compute with transformers' cache, or keeps something there that the pool cannot
        hold.
        """
        self._model = model
        self._device = device
        parameters = inspect.signature(model.forward).parameters
        self._takes = frozenset(parameters)
        self._cache_name = next((name for name in CACHE_NAMES if name in parameters), "")
        if not self._cache_name:
            raise ModelError(f"{type(model).__name__} does not compute with transformers' cache")
        self._has_mask = self._cache_name == CACHE_NAMES[0]
        cache, self._takes_one = self._tried()
        self.reuses_prefixes = not self._takes_one
        self._tokens = list(_kept_tokens(cache))
        self._states = list(_kept_states(cache))
        self.layout: Final = self._measured(block_size, kv_dtype)
        """The layout of a pool for this model."""

    @property
    def module(self) -> Any:
        """Return transformers' model."""
        return self._model

    def __call__(
        self, batch: ForwardBatch, attention: Attention, on_layer: OnLayer | None = None
    ) -> torch.Tensor | None:
        """Compute a batch, and write what the model keeps of its sequences into the pool.

        Returns the logits [S, vocab_size] of the wanted rows. Does not call `on_layer`: all layers of a sequence are
        ready at once.
        """
        wanted = batch.logit_rows.tolist()
        logits = []
        for request, (first, end) in enumerate(pairwise(batch.starts)):
            rows = [row - first for row in wanted if first <= row < end]
            logits.append(self._computed(batch, request, slice(first, end), rows, attention.pool))
        return torch.cat(logits)

    def eager(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [T, vocab_size] of one text, computed at once and without a cache."""
        return self._logits(token_ids, 0, None, torch.arange(len(token_ids), device=self._device))

    def _computed(
        self, batch: ForwardBatch, request: int, of_request: slice, rows: list[int], pool: PagedKVPool
    ) -> torch.Tensor:
        token_ids = batch.token_ids[of_request]
        start = int(batch.kv_lengths[request]) - len(token_ids)
        state_blocks = batch.state_blocks[request]
        cache = self._new_cache()
        if start:
            num_blocks = pool.layout.num_blocks_for(start) - len(state_blocks)
            blocks = batch.block_tables[request, :num_blocks].long()
            self._restore(cache, pool, blocks, batch.state_sources[request], start)
        logits = self._continued(token_ids, start, cache, rows)
        self._keep(cache, pool, batch.slots[of_request], state_blocks)
        return logits

    def _continued(self, token_ids: torch.Tensor, start: int, cache: Any, rows: list[int]) -> torch.Tensor:
        """Return the logits of rows of the tokens that follow the `start` tokens of a cache."""
        if not start or not self._takes_one:
            return self._logits(token_ids, start, cache, torch.tensor(rows, dtype=torch.int64, device=self._device))
        row = torch.zeros(1, dtype=torch.int64, device=self._device)
        of_each = [self._logits(token_ids[at : at + 1], start + at, cache, row) for at in range(len(token_ids))]
        return torch.cat([of_each[at] for at in rows] or [of_each[0][:0]])

    def _logits(self, token_ids: torch.Tensor, start: int, cache: Any | None, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [len(rows), vocab_size] of rows of the tokens that follow `start` tokens of a cache."""
        end = start + len(token_ids)
        inputs = {
            "input_ids": token_ids.unsqueeze(0),
            "attention_mask": torch.ones((1, end), dtype=torch.int64, device=self._device) if self._has_mask else None,
            "position_ids": torch.arange(start, end, device=self._device).unsqueeze(0),
            "logits_to_keep": rows,
            "use_cache": cache is not None,
            self._cache_name: cache,
        }
        given = {name: value for name, value in inputs.items() if name in self._takes}
        logits: torch.Tensor = self._model(**given).logits.squeeze(0)
        return logits if "logits_to_keep" in given else logits[rows]

    def _new_cache(self) -> Any:
        cache = cache_utils.DynamicCache(config=self._model.config)
        cache.layers = [_whole(layer) for layer in cache.layers]
        return cache

    @torch.inference_mode()
    def _tried(self) -> tuple[Any, bool]:
        """Return the cache of TRIED_TOKENS tokens, and whether the model continues a cache right by one token alone."""
        name = type(self._model).__name__
        rows = torch.arange(TRIED_TOKENS, device=self._device)
        try:
            cache, parts = self._new_cache(), self._new_cache()
            at_once = self._logits(rows, 0, cache, rows)
            before_others = self._logits(rows[:2], 0, parts, rows[:2])
        except UNCOMPUTABLE as error:
            raise ModelError(f"{name} cannot be computed with transformers' cache: {in_a_line(error)}") from error
        if not _are_alike(at_once[:2], before_others):
            raise ModelError(f"{name} lets a token see the tokens behind it, and is no decoder")
        for layer in cache.layers:
            if True not in getattr(layer, "has_previous_state", {0: True}).values():
                raise ModelError(f"{name} keeps a state outside of transformers' cache, which is not supported")
            if type(layer) not in KNOWN:
                raise ModelError(f"{name} keeps a {type(layer).__name__} in its cache, which is not supported")
            if getattr(layer, "indexer_position_ids", None) is not None:
                raise ModelError(f"{name} keeps positions of its indexer in its cache, which is not supported")
        try:
            in_parts = self._logits(rows[2:], 2, parts, rows[:-2])
        except UNCOMPUTABLE:
            return cache, True
        return cache, not _are_alike(at_once[2:], in_parts)

    def _measured(self, block_size: int, kv_dtype: str) -> KVLayout:
        state_bytes = sum(each.num_bytes for each in self._states)
        widths = tuple(each.widths for each in self._tokens)
        if not state_bytes and not widths:
            raise ModelError(f"{type(self._model).__name__} keeps nothing in transformers' cache")
        if not widths:
            widths, block_size = (Widths(1, 0),), TOKENLESS_BLOCK
        return KVLayout(0, widths, 1, block_size, kv_dtype, state_bytes)

    def _restore(
        self, cache: Any, pool: PagedKVPool, blocks: torch.Tensor, state_blocks: Sequence[int], num_tokens: int
    ) -> None:
        """Fill a new cache with what the pool holds of a sequence of num_tokens tokens."""
        for number, kept in enumerate(self._tokens):
            layer = cache.layers[kept.layer]
            tensors = [
                each.flatten(0, 1)[:num_tokens].view(num_tokens, *shape)
                for each, shape in zip(pool.gather(number, blocks), kept.shapes, strict=False)
            ]
            if kept.names == (INDEXER,):
                layer.lazy_initialization_indexer(tensors[0])
                layer.indexer_keys = tensors[0].transpose(0, 1)
                continue
            keys, values = (each.transpose(0, 1).unsqueeze(0) for each in tensors)
            cache_utils.DynamicLayer.lazy_initialization(layer, keys, values)
            layer.keys, layer.values = keys, values
        if not self._states:
            return
        stored = _read_state(pool, state_blocks)
        begin = 0
        for state in self._states:
            layer, end = cache.layers[state.layer], begin + state.num_bytes
            tensor = stored[begin:end].clone().view(state.dtype).view(state.shape)
            layer.lazy_initialization(**{state.name: tensor}, state_idx=state.number)
            getattr(layer, state.name)[state.number] = tensor
            layer.has_previous_state[state.number] = True
            begin = end

    def _keep(self, cache: Any, pool: PagedKVPool, slots: torch.Tensor, state_blocks: Sequence[int]) -> None:
        """Write to the pool what a cache has of its last tokens, and its state."""
        for number, kept in enumerate(self._tokens):
            layer = cache.layers[kept.layer]
            tensors = [_by_token(getattr(layer, name))[-len(slots) :].flatten(1).unsqueeze(1) for name in kept.names]
            keys, values = tensors if len(tensors) == 2 else (tensors[0], tensors[0][..., :0])
            pool.store(number, slots, keys.to(pool.compute_dtype), values.to(pool.compute_dtype))
        if self._states:
            tensors = [getattr(cache.layers[each.layer], each.name)[each.number] for each in self._states]
            data = [
                tensor.to(each.dtype).contiguous().view(torch.uint8).flatten()
                for tensor, each in zip(tensors, self._states, strict=True)
            ]
            _write_state(pool, state_blocks, torch.cat(data))


def _are_alike(logits: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether two computations of the same logits [T, V] differ by rounding at most."""
    differences = (logits - others).norm(dim=-1) / logits.norm(dim=-1).clamp_min(1e-6)
    return bool(differences.max() <= (LARGEST_DIFFERENCE if logits.dtype == torch.float32 else COARSE_DIFFERENCE))


def _whole(layer: Any) -> Any:
    """Return the layer, or in place of one that keeps a window of tokens a new one that keeps all."""
    other = WHOLE.get(type(layer))
    if other is None:
        return layer
    states = getattr(layer, "number_of_states", None)
    return other() if states is None else other(number_of_states=states)


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    """Return [1, heads, T, width] or [1, T, width] as [T, heads, width]."""
    return tensor.transpose(0, 1) if tensor.ndim == 3 else tensor.squeeze(0).transpose(0, 1)


def _kept_tokens(cache: Any) -> Iterator[KeptTokens]:
    for number, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None:
            shapes = tuple((each.shape[1], each.shape[3]) for each in (layer.keys, layer.values))
            yield KeptTokens(number, ("keys", "values"), shapes)
        if getattr(layer, INDEXER, None) is not None:
            yield KeptTokens(number, (INDEXER,), ((1, layer.indexer_keys.shape[2]),))


def _kept_states(cache: Any) -> Iterator[KeptState]:
    for number, layer in enumerate(cache.layers):
        for name in ("conv_states", "recurrent_states"):
            for place, tensor in getattr(layer, name, {}).items():
                if tensor is not None:
                    yield KeptState(number, name, place, tuple(tensor.shape), tensor.dtype)


def _read_state(pool: PagedKVPool, state_blocks: Sequence[int]) -> torch.Tensor:
    """Return all bytes of state blocks [num_bytes] uint8, in the order of `_write_state`."""
    return torch.cat([part for layer in pool.layout.layers for part in pool.read_tensors(layer, state_blocks)])


def _write_state(pool: PagedKVPool, state_blocks: Sequence[int], data: torch.Tensor) -> None:
    """Write bytes [num_bytes] uint8 to state blocks: the first ones to K of the first layer, then to its V."""
    layout = pool.layout
    padding = layout.block_bytes * len(state_blocks) - len(data)
    rest = nn.functional.pad(data, (0, padding))
    for layer in layout.layers:
        sizes = [len(state_blocks) * each for each in layout.cache_bytes(layer)]
        keys, values, rest = torch.split(rest, [*sizes, len(rest) - sum(sizes)])
        pool.write_tensors(layer, state_blocks, keys, values)
