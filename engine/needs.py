"""What an engine needs, from its settings and the headers of its model's files: so that it can be told before anything
is loaded. Torch-free."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.errors import SettingsError
from engine.layout import DTYPE_BYTES, KVLayout
from engine.model_config import FAKE_ARCHITECTURE, ModelConfig
from engine.settings import EngineSettings
from engine.sharding import check_tp_size, head_range, most_kv_heads
from engine.stored_quantization import check_quantization
from engine.weight_files import StoredTensor, stored_tensors

MOST_INVARIANT_RANKS: Final = 2  # whose sum does not depend on the order
WEIGHT_BITS: Final = {"int8": 8, "int4": 4}
PACKED_BYTES: Final = 4  # of the integers that hold quantized weights
TIED_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory of all ranks of one node together. The weights take at least so much, the pool once it is full."""

    weight_bytes: int
    pool_bytes: int


def compute_dtype(settings: EngineSettings, config: ModelConfig) -> str:
    """The dtype computed in: the one asked for, or the model's own."""
    return config.dtype if settings.dtype == "auto" else settings.dtype


def model_layout(settings: EngineSettings, config: ModelConfig) -> KVLayout:
    """The KV cache of all ranks together."""
    dtype = compute_dtype(settings, config) if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    return config.kv_layout(settings.block_size, dtype)


def check_settings(settings: EngineSettings, config: ModelConfig, tp_size: int) -> None:
    """Raises SettingsError where this model cannot be served with these settings by so many ranks."""
    limit = config.max_position_embeddings
    if settings.max_model_len > limit:
        raise SettingsError(f"--max-model-len {settings.max_model_len} is more than the model's {limit}")
    if config.architecture == FAKE_ARCHITECTURE:
        _check_fake(settings, compute_dtype(settings, config))
        return
    check_tp_size(config, tp_size)
    check_quantization(settings.quantization, config.stored_quantization)
    if settings.batch_invariant and tp_size > MOST_INVARIANT_RANKS:
        raise SettingsError(
            f"--batch-invariant: sums over {tp_size} ranks are added in an order that depends on the batch, "
            f"and --tensor-parallel-size can be {MOST_INVARIANT_RANKS} at most"
        )


def num_blocks_for(settings: EngineSettings, layout: KVLayout, tp_size: int) -> int:
    """Blocks in the pool of every rank, given the whole model's layout: as many as fit where the most KV heads are.
    Raises SettingsError."""
    if settings.num_kv_blocks:
        return settings.num_kv_blocks
    largest = layout.with_heads(most_kv_heads(tp_size, layout.num_kv_heads))
    num_blocks = settings.kv_cache_memory_bytes // largest.block_bytes
    if num_blocks == 0:
        raise SettingsError(
            f"--kv-cache-memory-bytes {settings.kv_cache_memory_bytes} holds no block of {largest.block_bytes} bytes"
        )
    return num_blocks


def needs_of(settings: EngineSettings, config: ModelConfig) -> Needs:
    """What a node of these settings needs. Raises ModelError when the files are not whole, or SettingsError."""
    tp_size, layout = settings.tensor_parallel_size, model_layout(settings, config)
    ranks = [layout.with_heads(len(head_range(rank, tp_size, layout.num_kv_heads))) for rank in range(tp_size)]
    pool_bytes = num_blocks_for(settings, layout, tp_size) * sum(rank.block_bytes for rank in ranks)
    if config.architecture == FAKE_ARCHITECTURE:
        return Needs(0, pool_bytes)
    tensors = stored_tensors(Path(settings.model))
    if config.tie_word_embeddings:
        tensors.pop(TIED_HEAD, None)
    dtype_bytes, bits = DTYPE_BYTES[compute_dtype(settings, config)], WEIGHT_BITS.get(settings.quantization)
    return Needs(sum(_loaded_bytes(tensor, dtype_bytes, bits) for tensor in tensors.values()), pool_bytes)


def _loaded_bytes(tensor: StoredTensor, dtype_bytes: int, bits: int | None) -> int:
    num_elements = math.prod(tensor.shape)
    if not tensor.is_float:
        return num_elements * PACKED_BYTES
    if bits is not None and len(tensor.shape) > 1:
        return num_elements * bits // 8
    return num_elements * dtype_bytes


def _check_fake(settings: EngineSettings, dtype: str) -> None:
    if dtype != "float32":
        raise SettingsError(f"--dtype {dtype}: the fake model counts in float32")
    if settings.quantization != "none":
        raise SettingsError(f"--quantization {settings.quantization}: the fake model has no weights")
    if settings.kv_cache_dtype != "auto":
        raise SettingsError(f"--kv-cache-dtype {settings.kv_cache_dtype}: the fake model counts in float32")
