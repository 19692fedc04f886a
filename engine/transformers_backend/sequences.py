"""Compute a model of transformers sequence by sequence, with transformers' own attention and cache.

For models that the paged attention cannot compute: those with a fixed state (recurrent or convolution), with attention
past transformers' interface, or with layers of different shapes. Between steps the pool holds what transformers' cache
holds. KV blocks hold what it keeps of each token. The state blocks, which lead a request's block table, hold its fixed
state as bytes.

All that is kept is in equal parts, which are the KV heads of the pool's layout: some heads of each layer, and some
heads or channels of each state, which lie in the state blocks where keys and values of that head would. So the ranks of
a node, and transfers between nodes of different numbers of ranks, divide a state as they divide keys.

Chunks of prompts are computed one after the other. The sequences of a decode step are computed together, padded to the
longest, if a trial at the start gives the same logits as alone.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import gcd, prod
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from transformers import cache_utils

from engine.attention.paged import Attention
from engine.cache.kv_pool import HeadSlice, PagedKVPool
from engine.forward_batch import ForwardBatch
from engine.parallel import LEADER, RankGroup
from engine.transformers_backend.decoder import EXPAND, UNCOMPUTABLE, in_a_line
from engine.transformers_backend.mixers import Division, Section, Sections
from serving_core.errors import ModelError, SettingsError
from serving_core.layout import KVLayout, Widths
from serving_core.requests import OnLayer

CACHE_NAMES: Final = ("past_key_values", "cache", "cache_params")  # arguments by which models take their cache
TOKENLESS_BLOCK: Final = 2**16  # tokens of a block, times parts, where no layer keeps anything of a token
MOST_PARTS: Final = 8  # of what is kept, a power of two; each is written to the pool for itself
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

    def widths(self, num_parts: int) -> Widths:
        """Return the elements of one of so many equal parts."""
        keys, *values = (heads * width // num_parts for heads, width in self.shapes)
        return Widths(keys, sum(values))


class KeptState(NamedTuple):
    """A tensor of fixed size that a layer of transformers' cache keeps of a sequence.

    Its second dimension can be divided into equal parts of each of the `sections`; without sections it cannot.
    """

    layer: int
    name: str  # conv_states or recurrent_states
    number: int  # within the layer
    shape: tuple[int, ...]
    dtype: torch.dtype
    sections: Sections

    def lengths(self, num_parts: int) -> list[int]:
        """Return the length of each section in one of so many parts."""
        return [length if is_shared else length // num_parts for length, is_shared in self.sections]

    def part_bytes(self, num_parts: int) -> int:
        """Return the bytes of one of so many parts."""
        divided = sum(self.lengths(num_parts)) if self.sections else self.shape[1]
        return self.shape[0] * divided * prod(self.shape[2:]) * self.dtype.itemsize

    def split(self, tensor: torch.Tensor, num_parts: int) -> torch.Tensor:
        """Return the bytes [num_parts, part_bytes] of a tensor of this shape."""
        if num_parts > 1:
            whole = torch.split(tensor[0], [length for length, _ in self.sections])
            of_sections = zip(whole, self.sections, strict=True)
            pieces = [
                piece.expand(num_parts, *piece.shape) if is_shared else piece.reshape(num_parts, -1, *piece.shape[1:])
                for piece, (_, is_shared) in of_sections
            ]
            tensor = torch.cat(pieces, dim=1)
        return tensor.contiguous().view(num_parts, -1).view(torch.uint8)

    def join(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the tensor of which `split` gave these parts. It may share their memory."""
        if len(parts) == 1:
            part = parts[0].clone() if parts.storage_offset() % self.dtype.itemsize else parts[0]
            return part.view(self.dtype).view(self.shape)
        parts = parts.contiguous().view(self.dtype)
        lengths = self.lengths(len(parts))
        divided = torch.split(parts.view(len(parts), sum(lengths), *self.shape[2:]), lengths, dim=1)
        of_sections = zip(divided, self.sections, strict=True)
        pieces = [piece[0] if is_shared else piece.flatten(0, 1) for piece, (_, is_shared) in of_sections]
        return torch.cat(pieces).unsqueeze(0)


class SequenceDecoder:
    """One rank's part of a loaded model."""

    num_divided_passes = 0
    needs_portable: Final = True

    def __init__(
        self,
        model: Any,
        device: torch.device,
        group: RankGroup,
        rules: Mapping[int, Division],
        block_size: int,
        kv_dtype: str,
    ) -> None:
        """Try the model, whose heads the ranks of `group` have divided, with TRIED_TOKENS tokens.

        `rules` are the divisions of layers that keep a state, by the layer's number. Raises ModelError if the model
        does not compute with transformers' cache, or keeps something there that the pool cannot hold; SettingsError if
        the ranks cannot divide what it keeps.
        """
        self._model = model
        self._device = device
        self._group = group
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
        self._states = list(_kept_states(cache, rules, group.size))
        self._joins = self._tried_together()
        self._num_parts = self._num_whole_parts(rules) // group.size
        self._sliced: tuple[PagedKVPool, list[PagedKVPool | HeadSlice]] | None = None  # a pool, and each of its heads
        self.layout: Final = self._measured(block_size, kv_dtype)
        """The layout of this rank's pool."""

    @property
    def module(self) -> Any:
        """Return transformers' model."""
        return self._model

    @property
    def kept_layers(self) -> list[int]:
        """Return the layers of transformers' cache of which the pool holds something."""
        return sorted({each.layer for each in self._tokens} | {each.layer for each in self._states})

    def __call__(
        self, batch: ForwardBatch, attention: Attention, on_layer: OnLayer | None = None
    ) -> torch.Tensor | None:
        """Compute a batch, and write what the model keeps of its sequences into the pool.

        Returns the logits [S, vocab_size] of the wanted rows on rank 0, None on the others. Does not call `on_layer`:
        all layers of a sequence are ready at once.
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
        return torch.cat([logits[request] for request in range(len(spans))]) if self._is_leader else None

    def eager(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [T, vocab_size] of one text, computed at once and without a cache.

        Ranks other than 0 return None.
        """
        logits = self._logits(token_ids, 0, None, torch.arange(len(token_ids), device=self._device))
        return logits if self._is_leader else None

    @property
    def _is_leader(self) -> bool:
        return self._group.rank == LEADER

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
        name = name if self._group.size == 1 else f"{name}, divided over {self._group.size} ranks,"
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

    def _num_whole_parts(self, rules: Mapping[int, Division]) -> int:
        """Return the number of equal parts of what all ranks keep. Raises SettingsError unless each has some."""
        size, name = self._group.size, type(self._model).__name__
        is_undivided = any(hasattr(module, EXPAND) for module in self._model.modules())
        is_undivided = is_undivided or any(kept.names == (INDEXER,) for kept in self._tokens)
        is_undivided = is_undivided or any(not state.sections for state in self._states)
        if is_undivided and size > 1:
            raise SettingsError(
                f"--tensor-parallel-size {size}: {name} keeps a latent, keys of an indexer or a state without heads, "
                "which ranks cannot divide"
            )
        heads = [size * num_heads for kept in self._tokens for num_heads, _ in kept.shapes]
        units = [number for rule in rules.values() for number in rule.units]
        num_parts = 1 if is_undivided else gcd(MOST_PARTS, *heads, *units)
        if num_parts % size:
            raise SettingsError(
                f"--tensor-parallel-size {size}: the heads and channels that {name} keeps are in {num_parts} equal "
                "parts, which are to be divided equally"
            )
        return num_parts

    def _measured(self, block_size: int, kv_dtype: str) -> KVLayout:
        num_parts = self._num_parts
        state_bytes = num_parts * sum(each.part_bytes(num_parts) for each in self._states)
        widths = tuple(each.widths(num_parts) for each in self._tokens)
        if not state_bytes and not widths:
            raise ModelError(f"{type(self._model).__name__} keeps nothing in transformers' cache")
        if not widths:
            widths, block_size = (Widths(1, 0),), TOKENLESS_BLOCK // (num_parts * self._group.size)
        return KVLayout(0, widths, num_parts, block_size, kv_dtype, state_bytes)

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
        stored, end = self._read_state(pool, state_blocks), 0  # a copy, which the model may change
        for state in self._states:
            begin, end = end, end + state.part_bytes(self._num_parts)
            _set_state(cache.layers[state.layer], state, state.join(stored[:, begin:end]))

    def _keep(self, cache: Any, pool: PagedKVPool, slots: torch.Tensor, state_blocks: Sequence[Sequence[int]]) -> None:
        """Write to the pool what a cache of B sequences has of their last tokens, and their states.

        Each sequence has as many of the `slots`.
        """
        num_tokens = len(slots) // len(state_blocks)
        for number, kept in enumerate(self._tokens):
            layer = cache.layers[kept.layer]
            last = [_last_tokens(getattr(layer, name), num_tokens) for name in kept.names]
            tensors = [each.reshape(len(each), self._num_parts, -1) for each in last]
            keys, values = tensors if len(tensors) == 2 else (tensors[0], tensors[0][..., :0])
            pool.store(number, slots, keys.to(pool.compute_dtype), values.to(pool.compute_dtype))
        if self._states:
            states = [getattr(cache.layers[each.layer], each.name)[each.number].to(each.dtype) for each in self._states]
            of_each = zip(*(state.chunk(len(state_blocks)) for state in states), strict=True)
            for blocks, of_sequence in zip(state_blocks, of_each, strict=True):
                of_each_state = zip(self._states, of_sequence, strict=True)
                self._write_state(pool, blocks, [state.split(each, self._num_parts) for state, each in of_each_state])

    def _read_state(self, pool: PagedKVPool, state_blocks: Sequence[int]) -> torch.Tensor:
        """Return all bytes of state blocks [heads, num_bytes] uint8, in the order of `_write_state`."""
        return torch.stack(
            [
                torch.cat([part for layer in pool.layout.layers for part in head.read_tensors(layer, state_blocks)])
                for head in self._heads(pool)
            ]
        )

    def _write_state(self, pool: PagedKVPool, state_blocks: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        """Write bytes, in parts [heads, N] uint8, to state blocks.

        The first ones of a head go to K of the first layer, the next ones to V of that layer.
        """
        layout = pool.layout.with_heads(1)
        padding = layout.block_bytes * len(state_blocks) - sum(part.shape[1] for part in parts)
        filled = torch.cat([*parts, parts[0].new_zeros(len(parts[0]), padding)], dim=1)
        sizes = [len(state_blocks) * each for layer in layout.layers for each in layout.cache_bytes(layer)]
        for head, rest in zip(self._heads(pool), filled, strict=True):
            caches = iter(rest.split(sizes))
            for layer in layout.layers:
                head.write_tensors(layer, state_blocks, next(caches), next(caches))

    def _heads(self, pool: PagedKVPool) -> list[PagedKVPool | HeadSlice]:
        if self._sliced is None or self._sliced[0] is not pool:
            self._sliced = pool, [pool.heads(range(head, head + 1)) for head in range(pool.layout.num_kv_heads)]
        return self._sliced[1]


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


def _kept_states(cache: Any, rules: Mapping[int, Division], num_ranks: int) -> Iterator[KeptState]:
    for number, layer in enumerate(cache.layers):
        for name in ("conv_states", "recurrent_states"):
            sections = rules[number].states.get(name, ()) if number in rules else ()
            own = tuple(each if each.is_shared else Section(each.length // num_ranks) for each in sections)
            for place, tensor in getattr(layer, name, {}).items():
                if tensor is not None:
                    is_as_said = tensor.shape[:2] == (1, sum(each.length for each in own))
                    yield KeptState(number, name, place, tuple(tensor.shape), tensor.dtype, own if is_as_said else ())
