"""Load a model of transformers, and verify it against transformers' own attention.

Loading reads only this rank's parts of the checkpoint's tensors, and never runs code from the folder.

Verification computes one text in chunks and steps beside another text, and compares the logits with those of the whole
text at once. Sliding windows are narrowed for it, so that a short text exceeds them.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Lock
from types import EllipsisType
from typing import Any, Final

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, DynamicCache, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.utils.generic import ContextManagers
from transformers.utils.logging import disable_progress_bar
from transformers.utils.quantization_config import Mxfp4Config

from engine.attention.paged import Attention
from engine.forward_batch import build_batch
from engine.model.checkpoint import Checkpoint, Part, TextPart, whole_tensor
from engine.model.stored_floats import FloatCheckpoint
from engine.model.weights import open_checkpoint, spell
from engine.parallel import RankGroup
from engine.pipeline import Pipeline
from engine.transformers_backend.decoder import (
    EAGER,
    NAME,
    UNCOMPUTABLE,
    TransformersDecoder,
    Unpaged,
    check_quantizable,
    in_a_line,
    keep_latents,
    quantize_model,
)
from engine.transformers_backend.division import Cut, check_heads_divided, divide, finish_division
from engine.transformers_backend.mixers import divisions
from engine.transformers_backend.sequences import SequenceDecoder
from engine.transformers_backend.stages import keep_stage
from engine.transformers_backend.tried import TRIED, TRIED_WITH
from serving_core.errors import ModelError
from serving_core.layout import KVLayout
from serving_core.model_files.config import ModelConfig
from serving_core.model_files.load_progress import LoadProgress
from serving_core.model_files.rope import LONGROPE
from serving_core.model_files.stored_quantization import MXFP4
from serving_core.model_files.stored_tensors import FLOATS
from serving_core.requests import Share
from serving_core.settings import EngineSettings
from serving_core.sharding import Extent, Shard

logger = logging.getLogger(__name__)

NUM_TOKENS: Final = 70
NARROW_WINDOW: Final = 20
CUTS: Final = (0, 5, 33, 34, 35, 68, 69)
LARGEST_DIFFERENCE: Final = 1e-3  # of logits, relative to their spread
COARSE_DIFFERENCE: Final = 0.1  # with 16 bits
QUANTIZED_DIFFERENCE: Final = 0.25  # with 8-bit keys and values


def check_staged(config: ModelConfig) -> None:
    """Raise ModelError for an architecture that no test computes in pipeline stages, where verification is impossible.

    Call before loading.
    """
    if not _is_tried(config):
        raise ModelError(f"{config.architecture} was not tried in stages; --no-verify-model serves it nevertheless")


@torch.inference_mode()
def check_model(
    model: TransformersDecoder | SequenceDecoder,
    attention: Attention,
    group: RankGroup,
    config: ModelConfig,
    max_model_len: int,
) -> None:
    """Compare the model's logits with those of transformers' own attention. Raises ModelError if they differ.

    The text for it has at most max_model_len tokens. Call on all ranks, before the pool holds data. Does nothing for
    architectures that the tests cover with this version of transformers.
    """
    if _is_tried(config):
        return
    layout = attention.pool.layout
    most_tokens = (attention.pool.num_blocks // 2 - layout.num_state_blocks) * layout.block_size
    token_ids = [(31 * at + at * at) % config.vocab_size for at in range(min(NUM_TOKENS, max_model_len, most_tokens))]
    if not token_ids:
        raise ModelError(f"--verify-model needs {2 * layout.num_blocks_for(1)} KV blocks at least")
    with _narrow(model.module, NARROW_WINDOW):
        try:
            expected = model.eager(torch.tensor(token_ids, device=attention.pool.device))
        except UNCOMPUTABLE as error:
            raise ModelError(f"{config.architecture} cannot be compared: {in_a_line(error)}") from error
        found = _in_parts(model, attention, token_ids)
    verdict = b"" if expected is None or found is None else _verdict(expected, found, attention).encode()
    said = [data.decode() for data in group.exchange(verdict) if data]
    if said:
        raise ModelError(f"{config.architecture} {said[0]}; --no-verify-model serves it nevertheless")
    logger.info("%s agrees here with transformers' own attention", config.architecture)


def _is_tried(config: ModelConfig) -> bool:
    return config.architecture in TRIED and transformers.__version__ == TRIED_WITH


def _in_parts(
    model: TransformersDecoder | SequenceDecoder, attention: Attention, token_ids: list[int]
) -> torch.Tensor | None:
    """Return the logits of all tokens, computed in parts, each beside a part of the reversed text."""
    pool, logits = attention.pool, []
    num_blocks = pool.layout.num_blocks_for(len(token_ids))
    blocks, others = range(num_blocks - 1, -1, -1), range(num_blocks, 2 * num_blocks)
    backwards = token_ids[::-1]
    ends = [*(cut for cut in CUTS if cut < len(token_ids)), len(token_ids)]
    for start, end in pairwise(ends):
        beside = Share(backwards[start:end], start, others, samples=False)
        share = Share(token_ids[start:end], start, blocks, samples=True)
        batch = build_batch([beside, share], pool.layout.block_size, pool.device, pool.layout.num_state_blocks)
        wanted = torch.arange(end - start, 2 * (end - start), device=pool.device)
        logits.append(model(batch.wanting(wanted), attention))
    rows = [part for part in logits if part is not None]
    return torch.cat(rows) if rows else None


def _verdict(expected: torch.Tensor, found: torch.Tensor, attention: Attention) -> str:
    """Return the difference in words; empty if the logits agree."""
    expected, found = expected.float(), found.float()
    spread = expected - expected.mean(-1, keepdim=True)
    differences = (expected - found).norm(dim=-1) / spread.norm(dim=-1).clamp_min(1e-6)
    is_quantized = attention.pool.layout.is_quantized
    if attention.pool.compute_dtype == torch.float32 and not is_quantized:
        limit, difference = LARGEST_DIFFERENCE, float(differences.max())
    else:  # single tokens may differ: a router chose another expert
        limit, difference = QUANTIZED_DIFFERENCE if is_quantized else COARSE_DIFFERENCE, float(differences.median())
    if difference <= limit:  # not so for NaN
        return ""
    return f"is off by {difference:.2g} of its logits from transformers' own attention, more than {limit:g}"


@contextmanager
def _narrow(module: Any, window: int) -> Iterator[None]:
    """Narrow the sliding windows within the context."""
    holders = [module.config, *module.modules()]
    wide = [(holder, holder.sliding_window) for holder in holders if _window_of(holder) is not None]
    try:
        for holder, _ in wide:
            holder.sliding_window = window
        yield
    finally:
        for holder, before in wide:
            holder.sliding_window = before


def _window_of(holder: Any) -> int | None:
    window = getattr(holder, "sliding_window", None)
    return window if isinstance(window, int) else None


INTEGERS: Final = ("I64", "I32")  # of tables in a model
QUANTIZED: Final = ("U8",)  # storage formats of weights of which transformers makes floats
TAKEN_FOR: Final = {"MinistralForCausalLM": "MistralForCausalLM"}  # transformers' choice where there are layer_types
UNREADABLE: Final = (
    *UNCOMPUTABLE,
    ImportError,
    OSError,
    StrictDataclassError,
)  # errors that transformers raises for a config.json


def load_transformers(
    folder: Path,
    config: ModelConfig,
    layout: KVLayout,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    group: RankGroup,
    pipeline: Pipeline | None,
    settings: EngineSettings,
    *,
    shows_progress: bool = True,
) -> tuple[TransformersDecoder | SequenceDecoder, int]:
    """Load one rank's part of a model that transformers computes; return it and the bytes of its weights.

    A model that the paged attention cannot compute is computed sequence by sequence, in one stage. `layout` is that of
    the rank's pool, `shard` the rank's part of the model, `group` the ranks that compute the same layers, `pipeline`
    the connection to other stages, if any; `shows_progress`: progress is logged. Raises ModelError with one sentence
    for a model that transformers does not know, or that the attention or the cache does not support; SettingsError if
    the ranks cannot divide it.
    """
    if pipeline is not None and settings.verify_model:
        check_staged(config)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = _build(
        _read_config(folder, config, settings.max_model_len or config.max_position_embeddings), config, dtype
    )
    if config.has_latent_kv:
        keep_latents(model, NAME)
    names = model.state_dict()
    if pipeline is not None:
        keep_stage(model, shard)
    rules = divisions(model)
    cuts = divide(model, group, config.num_heads if config.has_latent_kv else config.num_kv_heads, rules)
    if group.size > 1 and not cuts:
        logger.warning("transformers has no plan to divide %s: every rank holds all weights", config.architecture)
    quantizes = settings.quantization != "none"
    if quantizes:
        check_quantizable(model, settings.quantization)
    try:
        checkpoint = open_checkpoint(folder)
        of_text = TextPart(checkpoint) if config.is_text_part else checkpoint
        of_floats, quantizer = _of_floats(of_text, config)
        stored = _stored(model, of_floats, names, cuts, quantizer)
        num_bytes = sum(each.num_bytes for each in stored.values())
        with LoadProgress(num_bytes, len(stored), is_shown=shows_progress) as progress:
            for each in stored.values():
                each.progress = progress
            _fill(model, stored, dtype, device, quantizer)
    except UNREADABLE as error:
        raise ModelError(f"transformers cannot fill {config.architecture}: {in_a_line(error)}") from error
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    finish_division(model, cuts, group.rank)
    model.train(False)
    num_bytes = quantize_model(model, settings.quantization) if quantizes else 0
    num_bytes += sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    try:
        return _paged(model, group, shard, device, layout, pipeline), num_bytes
    except Unpaged as error:
        name = config.architecture
        if pipeline is not None:
            raise ModelError(f"{error}; in one stage {name} would be computed sequence by sequence") from error
        of_layers = {model.get_submodule(path).layer_idx: rule for path, rule in rules.items()}
        model.set_attn_implementation(_own_attention(model))
        decoder = SequenceDecoder(model, device, group, of_layers, layout.block_size, layout.dtype)
        check_heads_divided(model, cuts, group, decoder.kept_layers)
        logger.warning("%s is computed sequence by sequence: %s", name, error)
        return decoder, num_bytes


def _paged(
    model: Any, group: RankGroup, shard: Shard, device: torch.device, layout: KVLayout, pipeline: Pipeline | None
) -> TransformersDecoder:
    if not model._supports_attention_backend:
        raise Unpaged(f"{type(model).__name__} does its attention itself, past transformers' interface")
    if _keeps_state(model.config):
        raise Unpaged(f"{type(model).__name__} keeps a state beside keys and values")
    if shard.query_heads.total < group.size:
        raise Unpaged(f"{type(model).__name__} has {shard.query_heads.total} attention heads for {group.size} ranks")
    return TransformersDecoder(model, group, shard, device, layout, pipeline)


def _keeps_state(theirs: PreTrainedConfig) -> bool:
    """Return whether transformers' cache of a model would have a state."""
    try:
        layers = DynamicCache(config=theirs).layers
    except UNCOMPUTABLE:  # a model that has no such cache can be computed without one
        return False
    return any(hasattr(layer, "has_previous_state") for layer in layers)


def _own_attention(model_class: Any) -> str:
    return "sdpa" if model_class._supports_sdpa else EAGER


# transformers exchanges functions of its classes while it builds a model: two threads would leave them exchanged.
_BUILDING: Final = Lock()


def _build(theirs: PreTrainedConfig, config: ModelConfig, dtype: torch.dtype) -> Any:
    """Build the whole model on the meta device."""
    model_class = _class_of(theirs, config.architecture)
    theirs.dtype = dtype
    theirs._attn_implementation = NAME if model_class._supports_attention_backend else _own_attention(model_class)
    try:
        with _BUILDING, ContextManagers(model_class.get_init_context(dtype, False, False, None)):
            return model_class(theirs)
    except UNREADABLE as error:
        raise ModelError(
            f"transformers cannot build {config.architecture} of this config.json: {in_a_line(error)}"
        ) from error


def _read_config(folder: Path, config: ModelConfig, max_model_len: int) -> PreTrainedConfig:
    try:
        theirs: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except UNREADABLE as error:
        raise ModelError(f"transformers cannot read this config.json: {in_a_line(error)}") from error
    if config.is_text_part:
        theirs = theirs.get_text_config(decoder=True)
        theirs.tie_word_embeddings = config.tie_word_embeddings  # which the whole model's config decides
    names = {"vocab_size": config.vocab_size, "num_hidden_layers": config.num_layers}
    names |= {"hidden_size": config.hidden_size, "num_attention_heads": config.num_heads}
    for name, ours in names.items():
        if (value := getattr(theirs, name, None)) != ours and not (value is None and name == "num_attention_heads"):
            raise ModelError(f"transformers reads {name} as {value}, and config.json says {ours}")
    longest = getattr(theirs, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < config.max_position_embeddings:
        raise ModelError(
            f"transformers reads max_position_embeddings as {longest}, and config.json says "
            f"{config.max_position_embeddings}"
        )
    _check_rotation(theirs, max_model_len)
    return theirs


def _check_rotation(theirs: PreTrainedConfig, max_model_len: int) -> None:
    """Raise ModelError if a token's rotation depends on the longest text in its batch."""
    rope = getattr(theirs, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]
    for kind in kinds:
        if kind.get("rope_type") != LONGROPE:
            continue
        limit = kind.get("original_max_position_embeddings") or theirs.max_position_embeddings
        logger.info("rope type 'longrope': a text may have the %d tokens of the context before its extension", limit)
        if max_model_len > limit:
            raise ModelError(
                f"rope type 'longrope' changes with the longest text of a batch beyond {limit} tokens, and "
                f"--max-model-len is {max_model_len}"
            )


def _class_of(theirs: PreTrainedConfig, architecture: str) -> Any:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(theirs), None)
    if model_class is None or architecture not in (model_class.__name__, TAKEN_FOR.get(model_class.__name__)):
        raise ModelError(f"transformers has no text decoder {architecture!r} for model_type {theirs.model_type!r}")
    return model_class


def _of_floats(checkpoint: Checkpoint, config: ModelConfig) -> tuple[Checkpoint, HfQuantizer | None]:
    """Return the checkpoint, read as floats, and None.

    For gpt-oss, return the checkpoint as it is, and the quantizer by which transformers makes floats of its weights.
    """
    stored = config.stored_quantization
    if stored is None:
        return checkpoint, None
    if stored.method == MXFP4:
        return checkpoint, Mxfp4HfQuantizer(Mxfp4Config(dequantize=True), pre_quantized=True)
    return FloatCheckpoint(checkpoint, stored), None


class _Stored:
    """This rank's part of a tensor, used instead of the file slice that transformers reads, from any thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        lock: Lock,
        dim: int,
        runs: list[range] | None,
        dtypes: tuple[str, ...],
    ) -> None:
        """Hold these runs of dimension `dim`; None: all. The tensor must have one of `dtypes`."""
        self._checkpoint, self._name, self._lock = checkpoint, name, lock
        self._dim, self._runs = dim, runs
        self._part = whole_tensor(name, checkpoint.describe(name)[0], dtypes)
        self.progress: LoadProgress | None = None  # told of the bytes when they are read

    @property
    def num_bytes(self) -> int:
        """Return the tensor's bytes in the file."""
        of_all = self._checkpoint.stored_bytes(self._part)
        return of_all if self._runs is None else of_all * sum(map(len, self._runs)) // self._part.shape[self._dim]

    def get_dtype(self) -> str:
        """Return the name of the stored dtype, as transformers asks file slices for it."""
        return self._checkpoint.describe(self._part.name)[1]

    def __getitem__(self, key: EllipsisType) -> torch.Tensor:
        """Return a copy of this rank's part."""
        with self._lock:
            self._checkpoint.check(self._part)
            if self._runs is None:
                tensor = self._checkpoint.read_all(self._part)
            else:
                tensor = torch.cat([self._read(self._part, run) for run in self._runs], dim=self._dim)
            if self.progress is not None:
                self.progress.add(self.num_bytes)
            return tensor

    def _read(self, part: Part, run: range) -> torch.Tensor:
        extents = list(part.extents)
        extents[self._dim] = Extent(extents[self._dim].total, run)
        return self._checkpoint.read_all(part._replace(extents=tuple(extents)))


def _stored(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    names: dict[str, Any],
    cuts: Mapping[str, Cut],
    quantizer: HfQuantizer | None,
) -> "dict[str, _Stored]":
    """Return all tensors of the checkpoint, reduced to this rank's parts. `names` are those of the whole model."""
    lock = Lock()
    conversions = get_model_conversion_mapping(model, None, quantizer)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    operations = {pattern: each.operations for each in converters for pattern in each.source_patterns}
    held, stored = model.state_dict().keys(), {}
    of_weights = FLOATS if quantizer is None else (*FLOATS, *QUANTIZED)
    for name in sorted(checkpoint.names(), key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        if target in names and target not in held:
            continue
        dtypes = of_weights if target not in names or names[target].is_floating_point() else INTEGERS
        if target not in cuts:
            stored[name] = _Stored(checkpoint, name, lock, 0, None, dtypes)
            continue
        cut, (shape, _) = cuts[target], checkpoint.describe(name)
        total = shape[cut.dim] if len(shape) >= -cut.dim else 0
        if pattern is not None:
            if not all(isinstance(each, MergeModulelist | Concatenate) for each in operations[pattern]):
                raise ModelError(f"{target} is made of other tensors in a way that ranks cannot divide")
            of_tensor = tuple(each for each in cut.sections if each.length == total)
            cut = replace(cut, sections=of_tensor[:1])  # each section is a tensor of its own
        runs = cut.runs if total == cut.total else None  # else the tensor has another shape, and is refused later
        stored[name] = _Stored(checkpoint, name, lock, cut.dim, runs, dtypes)
    return stored


def _fill(
    model: PreTrainedModel,
    stored: dict[str, _Stored],
    dtype: torch.dtype,
    device: torch.device,
    quantizer: HfQuantizer | None,
) -> None:
    conversions: list[Any] = list(get_model_conversion_mapping(model, None, quantizer))
    load_config = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        device_map={"": device},
        weight_mapping=conversions,
        hf_quantizer=quantizer,
    )
    found, _ = model._load_pretrained_model(model, stored, None, load_config)
    model._adjust_missing_and_unexpected_keys(found)
    if missing := sorted(found.missing_keys - model.all_tied_weights_keys.keys()):
        raise ModelError(f"the weights lack {spell(missing)}")
    if found.unexpected_keys:
        raise ModelError(f"the weights hold {spell(sorted(found.unexpected_keys))}, which the model has no use for")
    for name, shape, wanted in sorted(found.mismatched_keys):
        raise ModelError(f"{name} has shape {list(shape)}, and the model wants {list(wanted)}")
    if found.conversion_errors:
        raise ModelError(f"the weights of {spell(sorted(found.conversion_errors))} cannot be converted")
    model._finalize_model_loading(model, load_config, found)
