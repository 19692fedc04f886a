"""Builds a model of transformers and fills it from safetensors files, by transformers' own rules for names, fused and
tied weights and buffers. No code from the folder is ever run."""

import logging
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from types import EllipsisType
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
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
from transformers.utils.generic import ContextManagers
from transformers.utils.logging import disable_progress_bar

from engine.foreign.decoder import UNCOMPUTABLE, ForeignDecoder, in_a_line
from engine.foreign.division import Cut, divide, leave_biases
from engine.foreign.interface import NAME
from engine.foreign.latent import keep_latents
from engine.foreign.quantized import check_quantizable, quantize_model
from engine.foreign.stages import keep_stage
from engine.foreign.verification import check_staged
from engine.model.checkpoint import Checkpoint, Part, whole_tensor
from engine.model.weights import open_checkpoint, spell
from engine.parallel import RankGroup
from engine.pipeline import Pipeline
from serving_core.errors import ModelError
from serving_core.layout import KVLayout
from serving_core.load_progress import LoadProgress
from serving_core.model_config import ModelConfig
from serving_core.rope_config import LONGROPE
from serving_core.settings import EngineSettings
from serving_core.sharding import Extent, Shard
from serving_core.stored_tensors import FLOATS

logger = logging.getLogger(__name__)

TAKEN_FOR: Final = {"MinistralForCausalLM": "MistralForCausalLM"}  # by transformers, where there are layer_types
UNREADABLE: Final = (
    *UNCOMPUTABLE,
    ImportError,
    OSError,
    StrictDataclassError,
)  # what transformers raises of a config.json


def load_foreign(
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
) -> tuple[ForeignDecoder, int]:
    """One rank's part of a model and the bytes of its weights. `layout` is that of the rank's pool, `group` are the
    ranks that compute the same layers, `pipeline` leads to other stages, if there are any; `shows_progress`: as
    LoadProgress has it. Raises ModelError with one sentence for what transformers does not know, and where the model
    does not do what our attention and our cache can; SettingsError for ranks that cannot divide it."""
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
    cuts = divide(model, group, config.num_heads if config.has_latent_kv else config.num_kv_heads)
    if group.size > 1 and not cuts:
        logger.warning("transformers has no plan to divide %s: every rank holds all weights", config.architecture)
    quantizes = settings.quantization != "none"
    if quantizes:
        check_quantizable(model, settings.quantization)
    try:
        stored = _stored(model, open_checkpoint(folder), names, cuts)
        num_bytes = sum(each.num_bytes for each in stored.values())
        with LoadProgress(num_bytes, len(stored), is_shown=shows_progress) as progress:
            for each in stored.values():
                each.progress = progress
            _fill(model, stored, dtype, device)
    except UNREADABLE as error:
        raise ModelError(f"transformers cannot fill {config.architecture}: {in_a_line(error)}") from error
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    leave_biases(model, cuts, group.rank)
    model.train(False)
    num_bytes = quantize_model(model, settings.quantization) if quantizes else 0
    num_bytes += sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return ForeignDecoder(model, group, shard, device, layout, pipeline), num_bytes


def _build(theirs: PreTrainedConfig, config: ModelConfig, dtype: torch.dtype) -> Any:
    """The whole model, on the meta device."""
    theirs.dtype, theirs._attn_implementation = dtype, NAME
    model_class = _class_of(theirs, config.architecture)
    try:
        with ContextManagers(model_class.get_init_context(dtype, False, False, None)):
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
    names = {"vocab_size": config.vocab_size, "num_hidden_layers": config.num_layers}
    names |= {"hidden_size": config.hidden_size, "num_attention_heads": config.num_heads}
    for name, ours in names.items():
        if getattr(theirs, name, None) != ours:
            raise ModelError(f"transformers reads {name} as {getattr(theirs, name, None)}, and config.json says {ours}")
    if (longest := getattr(theirs, "max_position_embeddings", 0)) < config.max_position_embeddings:
        raise ModelError(
            f"transformers reads max_position_embeddings as {longest}, and config.json says "
            f"{config.max_position_embeddings}"
        )
    _check_rotation(theirs, max_model_len)
    return theirs


def _check_rotation(theirs: PreTrainedConfig, max_model_len: int) -> None:
    """Raises ModelError where the rotation of a token would depend on the longest text in its batch."""
    rope = getattr(theirs, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]
    for kind in kinds:
        limit = kind.get("original_max_position_embeddings") or theirs.max_position_embeddings
        if kind.get("rope_type") != LONGROPE:
            continue
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
    if not model_class._supports_attention_backend:
        raise ModelError(f"{architecture} is not supported: it does its attention itself, past transformers' interface")
    return model_class


class _Stored:
    """What this rank holds of a tensor, in place of the slice of a file that transformers reads, in any thread."""

    def __init__(self, checkpoint: Checkpoint, name: str, lock: Lock, dim: int, runs: list[range] | None) -> None:
        """Of one dimension these runs; None: all."""
        self._checkpoint, self._name, self._lock = checkpoint, name, lock
        self._dim, self._runs = dim, runs
        self._part = whole_tensor(name, checkpoint.describe(name)[0], FLOATS)
        self.progress: LoadProgress | None = None  # that hears of its bytes when they are read

    @property
    def num_bytes(self) -> int:
        """What it takes in the file."""
        of_all = self._checkpoint.stored_bytes(self._part)
        return of_all if self._runs is None else of_all * sum(map(len, self._runs)) // self._part.shape[self._dim]

    def __getitem__(self, key: EllipsisType) -> torch.Tensor:
        """A copy of it."""
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
    model: PreTrainedModel, checkpoint: Checkpoint, names: dict[str, Any], cuts: Mapping[str, Cut]
) -> "dict[str, _Stored]":
    """All tensors of the checkpoint, less what other ranks hold. `names` are those of the whole model."""
    lock = Lock()
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    operations = {pattern: each.operations for each in converters for pattern in each.source_patterns}
    held, stored = model.state_dict().keys(), {}
    for name in sorted(checkpoint.names(), key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        if target in names and target not in held:
            continue
        if target not in cuts:
            stored[name] = _Stored(checkpoint, name, lock, 0, None)
            continue
        cut, (shape, _) = cuts[target], checkpoint.describe(name)
        parts = cut.parts
        if pattern is not None:
            if not all(isinstance(each, MergeModulelist | Concatenate) for each in operations[pattern]):
                raise ModelError(f"{target} is made of other tensors in a way that ranks cannot divide")
            parts = 1  # each part is a tensor of its own
        total = shape[cut.dim] if len(shape) >= -cut.dim else 0
        is_as_said = total * cut.parts == cut.total * parts  # else it is of another shape, and refused later
        stored[name] = _Stored(checkpoint, name, lock, cut.dim, cut.runs(total, parts) if is_as_said else None)
    return stored


def _fill(model: PreTrainedModel, stored: dict[str, _Stored], dtype: torch.dtype, device: torch.device) -> None:
    conversions: list[Any] = list(get_model_conversion_mapping(model))
    load_config = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        device_map={"": device},
        weight_mapping=conversions,
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
