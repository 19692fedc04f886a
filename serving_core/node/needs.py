"""Compute what an engine needs from its settings and the headers of its model's files, before anything is loaded.
Torch-free.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serving_core.errors import SettingsError
from serving_core.layout import DTYPE_BYTES, KVLayout
from serving_core.model_files.adapters import read_adapters
from serving_core.model_files.config import FAKE_ARCHITECTURE, ModelConfig, read_model_config, text_names
from serving_core.model_files.stored_quantization import FP8, StoredQuantization, check_quantization, weight_name
from serving_core.model_files.stored_tensors import StoredTensor, stored_tensors
from serving_core.settings import WEIGHT_BITS, EngineSettings
from serving_core.sharding import check_num_ranks, check_pp_size, check_tp_size, rank_layout

MOST_INVARIANT_RANKS: Final = 2  # a sum of two does not depend on the order
HOST_POOL_BYTES: Final = 512 * 2**20  # if no size of the pool is given
PACKED_BYTES: Final = 4  # of the integers that hold quantized weights
MXFP4_SCALES: Final = "_scales"  # the ending of the names of scales of gpt-oss
INTEGER_BYTES: Final = {"I8": 1, "U8": 1}  # of other integer dtypes
TIED_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Needs:
    """Hold the memory that all ranks of one node need together: at least for the weights, and for the whole pool."""

    weight_bytes: int
    pool_bytes: int


def compute_dtype(settings: EngineSettings, config: ModelConfig) -> str:
    """Return the dtype to compute in: the one in the settings, or the model's own for auto."""
    return config.dtype if settings.dtype == "auto" else settings.dtype


def model_layout(settings: EngineSettings, config: ModelConfig) -> KVLayout:
    """Return the KV layout of the whole model, over all ranks, with the block size and dtype of the settings."""
    dtype = compute_dtype(settings, config) if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    return config.kv_layout(settings.block_size, dtype)


def check_settings(settings: EngineSettings, config: ModelConfig, tp_size: int) -> None:
    """Raise SettingsError if pipeline stages of `tp_size` ranks each cannot serve this model with these settings."""
    check_num_ranks(tp_size, settings.pipeline_parallel_size)
    check_pp_size(config, settings.pipeline_parallel_size)
    limit = config.max_position_embeddings
    if settings.max_model_len > limit:
        raise SettingsError(f"--max-model-len {settings.max_model_len} is more than the model's {limit}")
    if config.architecture == FAKE_ARCHITECTURE:
        _check_fake(settings, compute_dtype(settings, config))
        if config.embedder is not None:
            raise SettingsError("the fake model makes no embeddings: it has no hidden states")
        return
    check_tp_size(config, tp_size)
    if config.is_transformers:
        _check_transformers(settings, config)
    check_quantization(settings.quantization, config.stored_quantization)
    if settings.batch_invariant and tp_size > MOST_INVARIANT_RANKS:
        raise SettingsError(
            f"--batch-invariant: sums over {tp_size} ranks may be added in an order that depends on the batch, "
            f"and --tensor-parallel-size can be {MOST_INVARIANT_RANKS} at most"
        )


def num_blocks_for(settings: EngineSettings, layout: KVLayout, tp_size: int, device_bytes: int = 0) -> int:
    """Return the number of blocks in the pool of every rank: as many as fit on the rank with the largest blocks.

    `layout` is the whole model's. `device_bytes` is what a CUDA device has left for a pool whose size is not set.
    Raises SettingsError if not even one block fits.
    """
    if settings.num_kv_blocks:
        return settings.num_kv_blocks
    block_bytes = max(rank.block_bytes for rank in _rank_layouts(settings, layout, tp_size))
    pool_bytes = settings.kv_cache_memory_bytes or device_bytes or HOST_POOL_BYTES
    num_blocks = pool_bytes // block_bytes
    if num_blocks == 0:
        raise SettingsError(f"--kv-cache-memory-bytes {pool_bytes} holds no block of {block_bytes} bytes")
    return num_blocks


def check_model(settings: EngineSettings) -> None:
    """Raise ModelError or SettingsError for settings and model files with which a node cannot start.

    Finds what can be found without torch, whose import takes a second.
    """
    if not settings.model:
        raise SettingsError("no model folder was given")
    config = read_model_config(Path(settings.model), settings.model_impl, settings.runner)
    check_settings(settings, config, settings.tensor_parallel_size)
    needs_of(settings, config)


def needs_of(settings: EngineSettings, config: ModelConfig) -> Needs:
    """Return the memory that a node with these settings needs, from the headers of the model's files.

    Raises ModelError if the files are incomplete or broken, and SettingsError if the pool holds no block.
    """
    tp_size, layout = settings.tensor_parallel_size, model_layout(settings, config)
    rank_layouts = _rank_layouts(settings, layout, tp_size)
    pool_bytes = num_blocks_for(settings, layout, tp_size) * sum(rank.block_bytes for rank in rank_layouts)
    if config.architecture == FAKE_ARCHITECTURE:
        return Needs(0, pool_bytes)
    tensors = stored_tensors(Path(settings.model))
    if config.is_text_part:
        tensors = {name: tensors[stored] for name, stored in text_names(tensors).items()}
    if config.tie_word_embeddings or config.embedder is not None:
        tensors.pop(TIED_HEAD, None)
    stored, dtype_bytes = config.stored_quantization, DTYPE_BYTES[compute_dtype(settings, config)]
    if stored is not None and stored.become_floats:
        tensors = {name: each for name, each in tensors.items() if not _is_beside(name)}
    else:
        stored = None
    sizes = (
        _loaded_bytes(each, dtype_bytes, WEIGHT_BITS.get(settings.quantization), stored) for each in tensors.values()
    )
    weight_bytes = sum(sizes)
    if settings.weights_memory_bytes:
        weight_bytes = min(weight_bytes, settings.weights_memory_bytes * settings.num_ranks)
    adapter_bytes = dtype_bytes * sum(adapter.num_elements for adapter in read_adapters(settings.lora, config))
    return Needs(weight_bytes + adapter_bytes, pool_bytes)


def _is_beside(name: str) -> bool:
    """Return whether a tensor of a quantized checkpoint holds no weight's numbers."""
    return weight_name(name) is None or name.endswith(MXFP4_SCALES)


def _rank_layouts(settings: EngineSettings, layout: KVLayout, tp_size: int) -> list[KVLayout]:
    pp_size = settings.pipeline_parallel_size
    return [rank_layout(layout, rank, tp_size, pp_size) for rank in range(pp_size * tp_size)]


def _loaded_bytes(
    tensor: StoredTensor, dtype_bytes: int, bits: int | None, becomes_floats: StoredQuantization | None
) -> int:
    """Return the bytes of a tensor once it is loaded. `becomes_floats` is the format of quantized weights that do."""
    num_elements, stored_bytes = math.prod(tensor.shape), INTEGER_BYTES.get(tensor.dtype, PACKED_BYTES)
    if not tensor.is_float and tensor.dtype != FP8:
        if becomes_floats is None:
            return num_elements * stored_bytes
        num_elements = num_elements * stored_bytes * 8 // becomes_floats.bits
    if bits is not None and len(tensor.shape) > 1:
        return num_elements * bits // 8
    return num_elements * dtype_bytes


def _check_transformers(settings: EngineSettings, config: ModelConfig) -> None:
    computed = f"transformers computes {config.architecture}"
    if config.embedder is not None:
        raise SettingsError(f"{computed}, and embeddings are made by models that our own code computes")
    if settings.lora:
        raise SettingsError(f"--lora: {computed}, and adapters are for models that our own code computes")
    if settings.weights_memory_bytes:
        raise SettingsError(f"--weights-memory-bytes: {computed}, with all weights in memory")
    if settings.sequence_parallel_min_tokens:
        raise SettingsError(f"--sequence-parallel-min-tokens: {computed}, with all tokens on every rank")
    if settings.batch_invariant:
        raise SettingsError(f"--batch-invariant: {computed}, in a way in which bits have a history")


def _check_fake(settings: EngineSettings, dtype: str) -> None:
    if dtype != "float32":
        raise SettingsError(f"--dtype {dtype}: the fake model counts in float32")
    if settings.quantization != "none":
        raise SettingsError(f"--quantization {settings.quantization}: the fake model has no weights")
    if settings.lora:
        raise SettingsError("--lora: the fake model has no weights")
    if settings.weights_memory_bytes:
        raise SettingsError("--weights-memory-bytes: the fake model has no weights")
    if settings.sequence_parallel_min_tokens:
        raise SettingsError("--sequence-parallel-min-tokens: the fake model has no products between which to divide")
    if settings.kv_cache_dtype != "auto":
        raise SettingsError(f"--kv-cache-dtype {settings.kv_cache_dtype}: the fake model counts in float32")
