"""Compute a model of transformers sequence by sequence, with transformers' own attention and cache.

For models that the paged attention cannot compute: those with a fixed state (recurrent or convolution), with attention
past transformers' interface, or with layers of different shapes. Between steps the pool holds what transformers' cache
holds. KV blocks hold what it keeps of each token, with the heads of a layer side by side. The state blocks, which lead
a request's block table, hold its fixed state as bytes.

Chunks of prompts are computed one after the other. The sequences of a decode step are computed together, padded to the
longest, if a trial at the start gives the same logits as alone.
"""

import copy
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

CACHE_NAMES: Final = ("past_key_values", "cache", "cache_params")  # arguments by which models take their cache
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
ABSOLUTE: Final = "attention_chunk_size"  # a config field: attention depends on positions that padding would shift
MAX_PADDING: Final = 64  # tokens by which a sequence is padded beside another, beyond its own length
MAX_TOGETHER: Final = 16  # sequences that are computed together, with a copy of what each keeps


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
        layers = self._new_cache().layers
        self._has_mask = not layers or any(type(each) is not cache_utils.LinearAttentionLayer for each in layers)
        cache, self._takes_one = self._tried()
        self.reuses_prefixes = not self._takes_one
        self._tokens = list(_kept_tokens(cache))
        self._states = list(_kept_states(cache))
        self._joins = self._tried_together()
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
        wanted, lengths, logits = batch.logit_rows.tolist(), batch.kv_lengths.tolist(), dict[int, torch.Tensor]()
        spans = list(pairwise(batch.starts))
        steps = [request for request, (first, end) in enumerate(spans) if end - first == 1 < lengths[request]]
        for together in _groups(steps, lengths) if self._joins else ():
            of_group = self._stepped(batch, together, [lengths[request] - 1 for request in together], attention.pool)
            logits |= dict(zip(together, torch.split(of_group, 1), strict=True))
        for request, (first, end) in enumerate(spans):
            rows = [row - first for row in wanted if first <= row < end]
            if request in logits:
                logits[request] = logits[request][: len(rows)]
            else:
                logits[request] = self._computed(batch, request, slice(first, end), rows, attention.pool)
        return torch.cat([logits[request] for request in range(len(spans))])

    def eager(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [T, vocab_size] of one text, computed at once and without a cache."""
        return self._logits(token_ids, 0, None, torch.arange(len(token_ids), device=self._device))

    def _computed(
        self, batch: ForwardBatch, request: int, of_request: slice, rows: list[int], pool: PagedKVPool
    ) -> torch.Tensor:
        token_ids = batch.token_ids[of_request]
        start = int(batch.kv_lengths[request]) - len(token_ids)
        cache = self._restored(batch, request, start, pool)
        logits = self._continued(token_ids, start, cache, rows)
        self._keep(cache, pool, batch.slots[of_request], [batch.state_blocks[request]])
        return logits

    def _stepped(
        self, batch: ForwardBatch, requests: Sequence[int], starts: Sequence[int], pool: PagedKVPool
    ) -> torch.Tensor:
        """Compute the one token of each of these requests, behind `starts` tokens each; return their logits [B, V]."""
        rows = torch.tensor([batch.starts[request] for request in requests], device=self._device)
        caches = [self._restored(batch, request, start, pool) for request, start in zip(requests, starts, strict=True)]
        cache = self._joined(caches, starts)
        logits = self._next_logits(batch.token_ids[rows], starts, cache)
        self._keep(cache, pool, batch.slots[rows], [batch.state_blocks[request] for request in requests])
        return logits

    def _restored(self, batch: ForwardBatch, request: int, start: int, pool: PagedKVPool) -> Any:
        """Return the cache of the first `start` tokens of a request."""
        cache = self._new_cache()
        if start:
            num_blocks = pool.layout.num_blocks_for(start) - len(batch.state_blocks[request])
            blocks = batch.block_tables[request, :num_blocks].long()
            self._restore(cache, pool, blocks, batch.state_sources[request], start)
        return cache

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

    def _next_logits(self, token_ids: torch.Tensor, starts: Sequence[int], cache: Any) -> torch.Tensor:
        """Return the logits [B, V] of one token [B] behind each sequence of a joined cache."""
        positions = torch.tensor(starts, device=self._device).unsqueeze(1)
        longest = max(starts)
        mask = torch.arange(longest + 1, device=self._device) >= longest - positions
        inputs = {
            "input_ids": token_ids.unsqueeze(1),
            "attention_mask": mask.long() if self._has_mask else None,
            "position_ids": positions,
            "use_cache": True,
            self._cache_name: cache,
        }
        logits: torch.Tensor = self._model(**{name: inputs[name] for name in inputs if name in self._takes}).logits
        return logits.squeeze(1)

    def _joined(self, caches: Sequence[Any], lengths: Sequence[int]) -> Any:
        """Return the caches of sequences of these lengths as one; shorter ones are padded in front."""
        joined, longest = self._new_cache(), max(lengths)
        for kept in self._tokens:
            keys, values = (
                torch.cat(
                    [
                        nn.functional.pad(getattr(cache.layers[kept.layer], name), (0, 0, longest - length, 0))
                        for cache, length in zip(caches, lengths, strict=True)
                    ]
                )
                for name in kept.names
            )
            _set_tokens(joined.layers[kept.layer], keys, values)
        for state in self._states:
            tensors = [getattr(cache.layers[state.layer], state.name)[state.number] for cache in caches]
            _set_state(joined.layers[state.layer], state, torch.cat(tensors))
        return joined

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

    @torch.inference_mode()
    def _tried_together(self) -> bool:
        """Return whether sequences of different lengths, one token of each at a time, can be computed together."""
        is_fitting = all(kept.names != (INDEXER,) for kept in self._tokens)
        is_fitting = is_fitting and all(state.shape[0] == 1 for state in self._states)
        if not is_fitting or getattr(self._model.config, ABSOLUTE, None) is not None:
            return False
        rows = torch.arange(TRIED_TOKENS + 1, device=self._device)
        lengths, alone, caches = (TRIED_TOKENS, TRIED_TOKENS // 2), list[torch.Tensor](), list[Any]()
        try:
            for length in lengths:
                cache = self._new_cache()
                self._logits(rows[:length], 0, cache, rows[:1])
                caches.append(copy.deepcopy(cache))
                alone.append(self._logits(rows[length : length + 1], length, cache, rows[:1]))
            found = self._next_logits(rows[list(lengths)], lengths, self._joined(caches, lengths))
        except UNCOMPUTABLE:
            return False
        return _are_alike(torch.cat(alone), found)

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
            _set_tokens(layer, keys, values)
        if not self._states:
            return
        stored = _read_state(pool, state_blocks)
        begin = 0
        for state in self._states:
            end = begin + state.num_bytes
            part = stored[begin:end]  # of a copy, which the model may change
            tensor = (part.clone() if begin % state.dtype.itemsize else part).view(state.dtype).view(state.shape)
            _set_state(cache.layers[state.layer], state, tensor)
            begin = end

    def _keep(self, cache: Any, pool: PagedKVPool, slots: torch.Tensor, state_blocks: Sequence[Sequence[int]]) -> None:
        """Write to the pool what a cache of B sequences has of their last tokens, and their states.

        Each sequence has as many of the `slots`.
        """
        num_tokens = len(slots) // len(state_blocks)
        for number, kept in enumerate(self._tokens):
            layer = cache.layers[kept.layer]
            tensors = [_last_tokens(getattr(layer, name), num_tokens).unsqueeze(1) for name in kept.names]
            keys, values = tensors if len(tensors) == 2 else (tensors[0], tensors[0][..., :0])
            pool.store(number, slots, keys.to(pool.compute_dtype), values.to(pool.compute_dtype))
        if self._states:
            states = [getattr(cache.layers[each.layer], each.name)[each.number].to(each.dtype) for each in self._states]
            of_each = zip(*(state.chunk(len(state_blocks)) for state in states), strict=True)
            for blocks, of_sequence in zip(state_blocks, of_each, strict=True):
                _write_state(pool, blocks, [each.contiguous().view(-1).view(torch.uint8) for each in of_sequence])


def _groups(requests: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of 2 to MAX_TOGETHER of these requests, in which no sequence is padded by much."""
    group: list[int] = []
    for request in sorted(requests, key=lengths.__getitem__):
        if group and (len(group) == MAX_TOGETHER or lengths[request] > 2 * lengths[group[0]] + MAX_PADDING):
            if len(group) > 1:
                yield group
            group = []
        group.append(request)
    if len(group) > 1:
        yield group


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


def _set_tokens(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Give a new layer of a cache its keys and values."""
    cache_utils.DynamicLayer.lazy_initialization(layer, keys, values)
    layer.keys, layer.values = keys, values


def _set_state(layer: Any, state: KeptState, tensor: torch.Tensor) -> None:
    """Give a new layer of a cache one of its states."""
    layer.lazy_initialization(**{state.name: tensor}, state_idx=state.number)
    getattr(layer, state.name)[state.number] = tensor
    layer.has_previous_state[state.number] = True


def _last_tokens(tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the last tokens of B sequences, [B, heads, T, width] or [B, T, width], as [B * num_tokens, elements]."""
    if tensor.ndim == 3:
        return tensor[:, -num_tokens:].flatten(0, 1)
    return tensor[:, :, -num_tokens:].transpose(1, 2).flatten(0, 1).flatten(1)


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


def _write_state(pool: PagedKVPool, state_blocks: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
    """Write bytes, in parts [N] uint8, to state blocks: the first ones to K of the first layer, then to its V."""
    layout = pool.layout
    padding = layout.block_bytes * len(state_blocks) - sum(map(len, parts))
    rest = torch.cat([*parts, parts[0].new_zeros(padding)])
    for layer in layout.layers:
        sizes = [len(state_blocks) * each for each in layout.cache_bytes(layer)]
        keys, values, rest = torch.split(rest, [*sizes, len(rest) - sum(sizes)])
        pool.write_tensors(layer, state_blocks, keys, values)
