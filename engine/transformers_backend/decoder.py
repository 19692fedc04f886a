"""Wrap a decoder that transformers computes, with SplitServe's KV pool and attention.

Attention: models call a function registered in transformers' attention and mask interfaces. No mask is ever made: a
Sight takes its place, which is derived from the model's mask function; only causal attention and sliding windows are
supported. The current step is a context variable, since not every model passes its caller's arguments on.

Latent KV: a layer computes the keys and values of all heads from one vector per token. The pool holds only the vectors,
as the single key head of a cache without values. Queries are transformed to the vectors' width by the matrices that
would make keys, and the attention output is transformed to values afterwards.

Quantization: linear modules compute with quantized weights; the hooks by which ranks divide the modules stay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.attention.paged import Attention, PortableAttention, Scoring
from engine.forward_batch import ForwardBatch
from engine.model.llama import LAYERS_PER_REPORT
from engine.parallel import LEADER, RankGroup
from engine.pipeline import Pipeline
from engine.quantization.quantized_linear import QuantizedMatrix, quantized_matrix
from engine.transformers_backend.stages import StageTransfer
from serving_core.errors import ModelError
from serving_core.layout import KVLayout
from serving_core.requests import OnLayer
from serving_core.settings import INPUT_BITS, WEIGHT_BITS
from serving_core.sharding import Extent, Shard

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the indices of a batch and a head, and positions of queries and keys; returns which queries attend to which
keys.
"""


class Unpaged(ModelError):
    """A model that the paged attention cannot compute."""


POSITIONS = (0, 1, 2, 3, 7, 64, 1000, 8191, 8192, 2**20)  # query positions at which a mask is tried
NEAR = (-1000, -64, -2, -1, 0, 1, 2, 63, 64)  # distances to keys at which a mask is tried


@dataclass(frozen=True, slots=True)
class Sight:
    """A replacement of a mask: a token attends to itself and the tokens before it, or to the last `window` of them."""

    window: int | None


def sight_of(mask_function: MaskFunction, window: int | None) -> Sight:
    """Return the Sight that equals a mask function, which is tried at some positions.

    A sliding window must have the length `window`. Raises Unpaged for any other mask.
    """
    queries, keys = _pairs(window)
    sees = mask_function(0, 0, queries, keys)
    distances = queries - keys
    for candidate in (None, window):
        if torch.equal(sees, (distances >= 0) if candidate is None else (distances >= 0) & (distances < candidate)):
            return Sight(candidate)
    raise Unpaged("attention under a mask that is neither causal nor a sliding window is not supported")


@lru_cache(maxsize=16)
def _pairs(window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions of queries and keys that distinguish masks."""
    edges = () if window is None else (window - 1, window, window + 1, 2 * window)
    positions = {*POSITIONS, *edges}
    pairs = [
        (query, key)
        for query in sorted(positions)
        for key in sorted({query - distance for distance in (*NEAR, *edges)} | {0, query // 2})
        if key >= 0
    ]
    queries, keys = torch.tensor(pairs, device="cpu").unbind(1)
    return queries, keys


EXPAND = "expand_kv"  # the module with which transformers' layers make keys and values


class Expansion(NamedTuple):
    """The matrices of H heads that make keys and values of latents of width L.

    Beside its L numbers a latent has the rotated ones, which end each head's key unchanged.
    """

    keys: torch.Tensor  # [H, width without rotation, L]
    values: torch.Tensor  # [H, width of V, L]

    def of(self, heads: slice) -> "Expansion":
        """Return the expansion of some of the heads."""
        return Expansion(self.keys[heads], self.values[heads])

    def absorbed(self, queries: torch.Tensor) -> torch.Tensor:
        """Map queries [T, H, D] to [T, H, width of a token's vector], so that they can be multiplied by vectors.

        Their products with the vectors equal those of the queries with the keys.
        """
        plain, rotated = queries.tensor_split((self.keys.shape[1],), dim=2)
        return torch.cat((torch.einsum("thd,hdl->thl", plain, self.keys), rotated), dim=2)

    def expanded(self, attended: torch.Tensor) -> torch.Tensor:
        """Map attention outputs over vectors [T, H, width of a vector] to those over values [T, H, width of V]."""
        return torch.einsum("thl,hvl->thv", attended[..., : self.values.shape[2]], self.values)


class Latents:
    """Replaces the method with which a layer makes keys and values of latents."""

    def __init__(self, layer: Any, name: str) -> None:
        """Wrap the layer's method. Only the attention named `name` gets latents; any other gets keys and values."""
        self._layer, self._name = layer, name

    def __call__(self, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one key head [1, 1, T, width of a token's vector], and values of width 0."""
        if self._layer.config._attn_implementation != self._name:
            expanded: tuple[torch.Tensor, torch.Tensor] = type(self._layer).expand_kv(self._layer, latents, rotated)
            return expanded
        vectors = torch.cat((latents, rotated), dim=-1)
        return vectors, vectors[..., :0]

    @property
    def expansion(self) -> Expansion:
        """Return the matrices that make keys and values of latents, for the layer's heads on this rank."""
        widths = self._layer.qk_nope_head_dim, self._layer.v_head_dim
        weight = self._layer.kv_b_proj.weight
        keys, values = weight.view(-1, sum(widths), weight.shape[1]).split(widths, dim=1)
        return Expansion(keys, values)


def keep_latents(model: nn.Module, name: str) -> None:
    """Make the model's layers call the attention of this name with latents instead of keys and values.

    Raises ModelError for layers not known to have latents.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, EXPAND)]
    if not layers or any(layer.kv_b_proj.bias is not None for layer in layers):
        raise ModelError(f"latent KV as {type(model).__name__} has it is not supported")
    for layer in layers:
        setattr(layer, EXPAND, Latents(layer, name))


def expansion_of(layer: nn.Module) -> Expansion | None:
    """Return the matrices that expand the latents with which a layer calls attention.

    None if the layer passes keys and values.
    """
    latents = getattr(layer, EXPAND, None)
    return latents.expansion if isinstance(latents, Latents) else None


NAME: Final = "splitserve_paged"
WITHOUT_EFFECT: Final = (  # arguments that only transformers' own backends read
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
)


class Call(NamedTuple):
    """The attention call of one layer: T tokens, H heads, K key heads.

    Scores are capped at softcap, and each head's sink takes part in the sum of its weights. With latents, keys are the
    tokens' vectors, and values have width 0.
    """

    layer: int
    queries: torch.Tensor  # [T, H, D]
    keys: torch.Tensor  # [T, K, D]
    values: torch.Tensor  # [T, K, width of V]
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [H]
    expansion: Expansion | None  # of latents

    @property
    def is_scored(self) -> bool:
        """Return whether scores are changed by a soft cap or sinks, beyond the scaling."""
        return self.softcap is not None or self.sinks is not None

    @property
    def is_unusual(self) -> bool:
        """Return whether only the portable attention supports the call."""
        return self.is_scored or self.keys.shape[2] != self.values.shape[2]

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Return the shape of the attention output: [T, H, width of V]."""
        width = self.values.shape[2] if self.expansion is None else self.expansion.values.shape[1]
        return self.queries.shape[0], self.queries.shape[1], width


class Step(Protocol):
    """Computes the attention of the step that a model computes at the moment."""

    def attend(self, call: Call) -> torch.Tensor:
        """Store the call's keys and values, and return the attention output [T, H, width of V]."""


_step: ContextVar[Step] = ContextVar("step")


@contextmanager
def answering(step: Step) -> Iterator[None]:
    """Return a context in which `step` computes the attention calls of the models that this thread runs."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Sight | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for transformers: take [1, heads, T, width], return [1, T, heads, width] and no weights."""
    asked = sorted(name for name, value in others.items() if value is not None and name not in WITHOUT_EFFECT)
    if dropout:
        asked.append("dropout")
    if asked:
        raise Unpaged(f"{type(module).__name__} asks attention for {asked[0]}, which is not supported")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not isinstance(attention_mask, Sight):
        raise Unpaged(f"{type(module).__name__} asks for attention without a layer's number or a mask of its layer")
    window = attention_mask.window
    if sliding_window not in (None, window):
        raise Unpaged(f"{type(module).__name__} asks for a window of {sliding_window} under a mask of {window}")
    queries, keys, values = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(scaling, complex):  # the root of a negative number
        raise ModelError(f"{type(module).__name__} asks for scores times {scaling}, which is not a real number")
    call = Call(layer, queries, keys, values, scaling, window, softcap, s_aux, expansion_of(module))
    return _step.get().attend(call).unsqueeze(0), None


def _see(*, mask_function: MaskFunction, config: Any, **others: Any) -> Sight:
    window = getattr(config, "sliding_window", None)
    return sight_of(mask_function, window if isinstance(window, int) else None)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _see)


EXPERTS: Final = 3  # dimensions of stacked experts' weights


def check_quantizable(model: Any, quantization: str) -> None:
    """Raise ModelError if most weights of a model would stay unquantized: it has stacked experts, or no linear modules.

    `quantization` is the value of --quantization, for the message.
    """
    name = type(model).__name__
    if any(parameter.ndim == EXPERTS for parameter in model.parameters()):
        raise ModelError(f"--quantization {quantization}: transformers computes {name}, with experts as they are")
    if not _linear_modules(model):
        raise ModelError(f"--quantization {quantization}: transformers computes {name}, without linear modules")


def quantize_model(model: Any, quantization: str) -> int:
    """Quantize the linear modules of a filled model, and free the originals; return the bytes of the quantized weights.

    The head and the expansion of latents stay as they are. `quantization` is a value of --quantization.
    """
    num_bytes = 0
    for module in _linear_modules(model):
        matrix = quantized_matrix(module.weight.detach(), WEIGHT_BITS[quantization])
        if module.bias is not None:
            matrix.set_bias(module.bias)
        matrix.round_inputs(INPUT_BITS.get(quantization, 16))
        module.weight = module.bias = None
        module.forward = _Product(matrix)
        num_bytes += matrix.num_bytes
    return num_bytes


def _linear_modules(model: Any) -> list[Any]:
    left = {model.get_output_embeddings()} | {each.kv_b_proj for each in model.modules() if hasattr(each, EXPAND)}
    linear = [module for module in model.modules() if type(module) is nn.Linear and module not in left]
    return [module for module in linear if getattr(module, "weight", None) is not None]


class _Product:
    def __init__(self, matrix: QuantizedMatrix) -> None:
        self._matrix = matrix

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self._matrix(x.reshape(-1, x.shape[-1]))
        return outputs.view(*x.shape[:-1], outputs.shape[1])


EAGER: Final = "eager"  # name of transformers' own attention
MOST_CHARACTERS: Final = 300
UNCOMPUTABLE: Final = (  # errors that models raise
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class TransformersDecoder:
    """One rank's part of a loaded model that transformers' code computes, over SplitServe's KV pool."""

    num_divided_passes = 0
    reuses_prefixes = True

    def __init__(
        self,
        model: nn.Module,
        group: RankGroup,
        shard: Shard,
        device: torch.device,
        layout: KVLayout,
        pipeline: Pipeline | None,
    ) -> None:
        """Try the model, whose layers the ranks of `group` compute. `layout` is that of the rank's pool.

        Raises Unpaged unless each layer calls attention once, in order, with keys and values that match the layout.
        """
        self._model: Any = model
        self._group = group
        self._shard = shard
        transfers = None if pipeline is None else StageTransfer(model, shard, pipeline)
        asked = self._ask(device)
        if transfers is not None:
            transfers.is_on = True
        self._is_divided: Final = _is_divided(asked, layout, shard)
        """Whether each rank's model calls attention with that rank's heads instead of all heads."""
        self.needs_portable: Final = any(call.is_unusual for call in asked)
        """Whether only the portable attention supports the model's calls."""

    def __call__(
        self, batch: ForwardBatch, attention: Attention, on_layer: OnLayer | None = None
    ) -> torch.Tensor | None:
        """Compute a batch and write its keys and values into the pool of `attention`.

        Returns the logits [S, vocab_size] of the wanted rows on rank 0 of the last stage, None on the others.
        """
        step: Step = _Paged(batch, attention, on_layer)
        if not self._is_divided:
            step = _Divided(step, self._group, self._shard)
        with answering(step):
            return self._logits(batch.token_ids, batch.positions, batch.logit_rows)

    def eager(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [T, vocab_size] of one text with transformers' own attention.

        Ranks other than 0 return None.
        """
        rows = torch.arange(len(token_ids), device=token_ids.device)
        self._model.config._attn_implementation = EAGER
        try:
            return self._logits(token_ids, rows, rows)
        finally:
            self._model.config._attn_implementation = NAME

    @property
    def module(self) -> Any:
        """Return the model, an object of transformers."""
        return self._model

    def _logits(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        token_ids = token_ids.unsqueeze(0)
        logits = self._model(
            input_ids=token_ids,
            position_ids=positions.unsqueeze(0),
            # With a mask, transformers does not take a jump in the positions for the beginning of another text. It
            # hides nothing.
            attention_mask=torch.ones_like(token_ids),
            use_cache=False,
            logits_to_keep=rows,
        ).logits.squeeze(0)
        if len(logits) != len(rows):
            raise Unpaged(f"{type(self._model).__name__} gives logits of other tokens than those that were wanted")
        return logits if self._shard.is_last and self._group.rank == LEADER else None

    @torch.inference_mode()
    def _ask(self, device: torch.device) -> list[Call]:
        trial = _Trial()
        ids = torch.zeros(2, dtype=torch.int64, device=device)
        with answering(trial):
            try:
                self._logits(ids, torch.arange(2, device=device), torch.arange(1, device=device))
            except UNCOMPUTABLE as error:
                name = type(self._model).__name__
                raise Unpaged(f"{name} cannot be computed in steps: {in_a_line(error)}") from error
        return trial.calls


def in_a_line(error: Exception) -> str:
    """Return an error's text as one line of at most MOST_CHARACTERS characters, and "..." behind it if it is longer."""
    said = " ".join(str(error).split())
    return said if len(said) <= MOST_CHARACTERS else f"{said[:MOST_CHARACTERS]}..."


class _Trial:
    """Records the attention calls of a trial."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def attend(self, call: Call) -> torch.Tensor:
        self.calls.append(call)
        return call.queries.new_zeros(call.output_shape)


class _Paged:
    """Attention over the pool, for one batch."""

    def __init__(self, batch: ForwardBatch, attention: Attention, on_layer: OnLayer | None) -> None:
        self._batch = batch
        self._attention = attention
        self._on_layer = on_layer
        self._plans: dict[int | None, Any] = {}

    def attend(self, call: Call) -> torch.Tensor:
        attention, window = self._attention, call.window
        attention.pool.store(call.layer, self._batch.slots, call.keys, call.values)
        if window not in self._plans:
            self._plans[window] = attention.plan(self._batch, window)
        attend = self._scored(call) if call.is_scored else attention.attend
        queries = call.queries if call.expansion is None else call.expansion.absorbed(call.queries)
        # Backends scale by the width of a head. (Skipped where it changes nothing, since it rounds.)
        factor = call.scaling * queries.shape[2] ** 0.5
        queries = queries if abs(factor - 1) < 1e-9 else queries * factor
        attended = attend(queries, call.layer, self._plans[window])
        self._report(call.layer + 1 - attention.pool.layout.first_layer)
        return attended if call.expansion is None else call.expansion.expanded(attended)

    def _scored(self, call: Call) -> Callable[[torch.Tensor, int, Any], torch.Tensor]:
        attention, scoring = self._attention, Scoring(call.softcap, call.sinks)
        assert isinstance(attention, PortableAttention), "the engine takes no other for such models"
        return lambda queries, layer, plan: attention.attend(queries, layer, plan, scoring)

    def _report(self, num_done: int) -> None:
        if self._on_layer is None:
            return
        if num_done % LAYERS_PER_REPORT == 0 or num_done == self._attention.pool.layout.num_layers:
            self._on_layer(num_done)


class _Divided:
    """Attention of all heads, divided over the ranks."""

    def __init__(self, step: Step, group: RankGroup, shard: Shard) -> None:
        self._step = step
        self._group = group
        self._queries, self._keys = (slice(heads.held.start, heads.held.stop) for heads in _heads(shard))

    def attend(self, call: Call) -> torch.Tensor:
        own = call._replace(
            queries=call.queries[:, self._queries],
            keys=call.keys[:, self._keys],
            values=call.values[:, self._keys],
            sinks=None if call.sinks is None else call.sinks[self._queries],
            expansion=None if call.expansion is None else call.expansion.of(self._queries),
        )
        attended = call.queries.new_zeros(call.output_shape)
        attended[:, self._queries] = self._step.attend(own)
        self._group.all_reduce(attended)
        return attended


def _heads(shard: Shard) -> tuple[Extent, Extent]:
    return shard.query_heads, shard.kv_heads


def _is_divided(calls: list[Call], layout: KVLayout, shard: Shard) -> bool:
    """Return whether the calls are for the heads of the rank's own layout rather than for all. Raises Unpaged for
    others.
    """
    if not calls:
        raise Unpaged("a model that does its attention itself, past transformers' interface, is not supported")
    if [call.layer for call in calls] != list(layout.layers):
        raise Unpaged(
            f"{len(calls)} times attention over keys and values is asked for, and only once in each of "
            f"{layout.num_layers} layers, in order, is supported"
        )
    own, whole = (tuple(len(heads.held) for heads in _heads(shard)), tuple(heads.total for heads in _heads(shard)))
    num_heads = {(call.queries.shape[1], call.keys.shape[1]) for call in calls}
    if num_heads not in ({own}, {whole}):
        raise Unpaged(
            f"the model has {calls[0].queries.shape[1]} query and {calls[0].keys.shape[1]} KV heads in layer 0, and "
            f"config.json says {whole[0]} and {whole[1]}"
        )
    for call, widths in zip(calls, layout.widths, strict=True):
        if (call.keys.shape[2], call.values.shape[2]) != widths:
            raise Unpaged(
                f"a head of layer {call.layer} has {call.keys.shape[2]} + {call.values.shape[2]} elements in K + V, "
                f"and config.json says {widths.keys} + {widths.values}"
            )
    return num_heads == {own}
