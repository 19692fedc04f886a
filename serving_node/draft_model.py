"""Derive and check the settings of a node's draft model. Torch-free."""

from pathlib import Path

from serving_core.errors import SettingsError
from serving_core.model_files.config import ModelConfig, read_model_config
from serving_core.node.needs import check_settings, model_layout, needs_of
from serving_core.settings import EngineSettings
from serving_node.settings import DRAFT, NodeSettings


def draft_engine(settings: NodeSettings) -> EngineSettings | None:
    """Return the settings of the draft model's engine; None if the settings name no draft model.

    Raises SettingsError if they contradict each other.
    """
    flags, engine, what = settings.drafting, settings.engine, f"--speculation {settings.speculation}"
    if settings.speculation != DRAFT:
        if flags.speculative_model:
            raise SettingsError(f"{what}: there is a --speculative-model, which --speculation {DRAFT} computes with")
        return None
    if not flags.speculative_model:
        raise SettingsError(f"{what} needs the folder of a smaller model: --speculative-model")
    if engine.num_ranks > 1:
        sizes = f"{engine.tensor_parallel_size} and --pipeline-parallel-size {engine.pipeline_parallel_size}"
        raise SettingsError(f"{what}: a draft model is for a node of one rank, and --tensor-parallel-size is {sizes}")
    return EngineSettings(
        model=flags.speculative_model,
        dtype=engine.dtype,
        quantization=flags.speculative_quantization,
        device=engine.device,
        block_size=engine.block_size,
        kv_cache_memory_bytes=flags.speculative_kv_cache_memory_bytes,
        enforce_eager=engine.enforce_eager,
        enable_prefix_caching=False,
    )


def draft_bytes(draft: EngineSettings | None) -> int:
    """Return the bytes that the draft model's weights and pool take; 0 for None. Raises SettingsError or ModelError."""
    if draft is None:
        return 0
    needs = needs_of(draft, read_model_config(Path(draft.model)))
    return needs.weight_bytes + needs.pool_bytes


def check_draft_model(settings: NodeSettings) -> tuple[EngineSettings, ModelConfig] | None:
    """Return the settings of the draft model's engine and its config; None without a draft model.

    Raises ModelError, or SettingsError if the draft model does not fit the node's model.
    """
    draft, engine = draft_engine(settings), settings.engine
    if draft is None:
        return None
    config = read_model_config(Path(draft.model))
    vocab_size = read_model_config(Path(engine.model), engine.model_impl, engine.runner).vocab_size
    if config.vocab_size != vocab_size:
        raise SettingsError(
            f"--speculative-model has a vocabulary of {config.vocab_size} tokens, and the model one of {vocab_size}: "
            "they must be the same"
        )
    if config.embedder is not None:
        raise SettingsError("--speculative-model makes embeddings, and is to write")
    check_settings(draft, config, 1)
    block_bytes = model_layout(draft, config).block_bytes
    if draft.kv_cache_memory_bytes < block_bytes:
        raise SettingsError(
            f"--speculative-kv-cache-memory-bytes {draft.kv_cache_memory_bytes} holds no block of {block_bytes} bytes"
        )
    return draft, config
