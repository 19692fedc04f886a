"""Build an engine from settings: load the weights, make the KV pool, and choose the backends that compute."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from engine.attention.backends import choose_attention
from engine.attention.distributed import TILE_KEYS
from engine.attention.native import NativeAttention
from engine.attention.paged import Attention
from engine.cache.kv_pool import PagedKVPool, device_room
from engine.cuda_graphs import cuda_graphs
from engine.engine import DecodeProgram, Engine, Model
from engine.fake import FakeModel
from engine.model.llama import LlamaDecoder
from engine.model.weights import load_adapters, load_weights, stores_own_head
from engine.native_decode import NativeDecode, is_recordable
from engine.numerics import computes_by_kernels, make_batch_invariant, numerics_facts
from engine.offload.placement import Placement, choose_store
from engine.ops.backends import choose_ops
from engine.parallel import LEADER, RankGroup, alone, choose_device, on_all_ranks
from engine.pipeline import Pipeline
from engine.stepper import StepStream
from serving_core.errors import ModelError, SettingsError
from serving_core.grammars import Grammars
from serving_core.layout import KVLayout
from serving_core.model_files.adapters import StoredAdapter, adapter_facts, read_adapters
from serving_core.model_files.config import FAKE_ARCHITECTURE, NATIVE, ModelConfig, read_model_config
from serving_core.model_files.fingerprint import fingerprint, layout_facts
from serving_core.model_files.stored_quantization import quantization_name
from serving_core.node.needs import check_settings, compute_dtype, model_layout, num_blocks_for
from serving_core.process.extras import require
from serving_core.process.heap import keep_freed_memory
from serving_core.settings import EngineSettings
from serving_core.sharding import Shard, rank_layout, shard_of
from serving_core.version import VERSION

logger = logging.getLogger(__name__)

NOT_TRIED: Final = "--batch-invariant tries products of torch out at the start, and not all weights are there then"
MODULES: Final = "modules"  # decode steps are computed module after module
MOST_TOLD_CHARS: Final = 64  # characters of one fact that ranks compare


def build_engine(settings: EngineSettings, group: RankGroup | None = None, num_kept_bytes: int = 0) -> Engine:
    """Load the model that the settings name, allocate the KV pool, choose the kernels, and return this rank's engine.

    Without a group, this process is the only rank; otherwise call on all ranks. A pool that takes the rest of a
    device's memory leaves `num_kept_bytes` free. Raises ModelError or SettingsError with one sentence if that fails.
    """
    if not settings.model:
        raise SettingsError("no model folder was given")
    keep_freed_memory()
    part = _part_of_rank(settings, group or alone())
    group, config, num_heads = part.group, part.config, len(part.shard.query_heads.held)
    adapters = read_adapters(settings.lora, config)
    facts = fingerprint(part.folder, config, part.model_layout, part.dtype_name, settings.quantization)
    facts |= adapter_facts(adapters)
    _check_alike(group, facts | part.shared_settings)
    grammars = Grammars(part.folder, config.eos_token_ids)
    stream, ops = StepStream(part.device), choose_ops(part.device)  # on CUDA a trial, which needs memory

    model, weight_bytes = on_all_ranks(group, ModelError, lambda: _load(part, adapters))
    part = _with_measured_layout(part, model)
    facts |= layout_facts(part.model_layout)
    pool, num_blocks = _make_pool(part, num_kept_bytes)
    attention = _choose_attention(part, model, pool)

    by_kernels = computes_by_kernels(model, attention, part.of_stage)
    kernels_alone = not any(group.exchange(b"" if by_kernels else b"torch"))  # on any rank
    is_batch_invariant = kernels_alone
    if settings.batch_invariant and not kernels_alone:
        if settings.weights_memory_bytes:
            raise SettingsError(f"--weights-memory-bytes: {NOT_TRIED}")
        assert isinstance(model, LlamaDecoder)
        attention, is_batch_invariant = make_batch_invariant(model, attention, num_heads, part.max_model_len, group)

    program = None
    if config.embedder is None:
        program = _choose_program(part, model, attention, num_blocks, exact=is_batch_invariant)
    description = _describe(part, model, attention, program)
    of_bits = {**description, "is_batch_invariant": "yes" if is_batch_invariant else "no"}
    return Engine(
        config=config,
        group=group,
        pipeline=part.pipeline,
        model=model,
        ops=ops,
        pool=pool,
        attention=attention,
        program=program,
        stream=stream,
        grammars=grammars,
        model_layout=part.model_layout,
        num_blocks=num_blocks,
        max_model_len=part.max_model_len,
        weight_bytes=weight_bytes,
        fingerprint=facts,
        description=description,
        numerics_facts=numerics_facts(of_bits, part.device, kernels_alone=kernels_alone),
        is_batch_invariant=is_batch_invariant,
        holds_remote_kv=is_batch_invariant and _can_hold_remote_kv(part, model, attention),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one rank computes, as the settings and config.json say before any weight is read."""

    settings: EngineSettings
    folder: Path
    config: ModelConfig
    group: RankGroup
    pipeline: Pipeline | None
    device: torch.device
    dtype_name: str
    tp_size: int
    shard: Shard
    model_layout: KVLayout  # over all ranks
    layout: KVLayout

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    @property
    def of_stage(self) -> RankGroup:
        """Return the ranks that compute the same layers as this one."""
        return self.pipeline.stage if self.pipeline else self.group

    @property
    def max_model_len(self) -> int:
        return self.settings.max_model_len or self.config.max_position_embeddings

    @property
    def shared_settings(self) -> dict[str, str]:
        """Return the settings, beside the model, that must be equal on all ranks."""
        return {
            "--sequence-parallel-min-tokens": str(self.settings.sequence_parallel_min_tokens),
            "--enforce-eager": str(self.settings.enforce_eager),
            "SplitServe's version": VERSION,
            "the number of KV blocks": str(num_blocks_for(self.settings, self.model_layout, self.tp_size)),
            "the longest request": str(self.max_model_len),
        }


def _part_of_rank(settings: EngineSettings, group: RankGroup) -> _Part:
    folder = Path(settings.model)
    config = read_model_config(folder, settings.model_impl, settings.runner)
    device = choose_device(settings.device)
    pp_size = settings.pipeline_parallel_size
    tp_size = group.size // pp_size
    if tp_size * pp_size != group.size:
        raise SettingsError(f"--pipeline-parallel-size is {pp_size}, and there are {group.size} ranks")
    check_settings(settings, config, tp_size)
    has_stages = pp_size > 1 and config.architecture != FAKE_ARCHITECTURE
    layout = model_layout(settings, config)
    return _Part(
        settings=settings,
        folder=folder,
        config=config,
        group=group,
        pipeline=Pipeline(group, pp_size, device) if has_stages else None,
        device=device,
        dtype_name=compute_dtype(settings, config),
        tp_size=tp_size,
        shard=shard_of(config, group.rank, tp_size, pp_size),
        model_layout=layout,
        layout=rank_layout(layout, group.rank, tp_size, pp_size),
    )


def _check_alike(group: RankGroup, facts: Mapping[str, str]) -> None:
    """Raise SettingsError on every rank if the ranks differ in a fact, such as the model that each rank loads from its
    own machine.
    """
    told = [json.loads(data) for data in group.exchange(json.dumps(_brief(facts)).encode())]
    for name in sorted(set().union(*told)):
        values = [each.get(name, "nothing") for each in told]
        if len(set(values)) > 1:
            raise SettingsError(f"{name} must be the same on all ranks, and is {', '.join(values)}")


def _brief(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the facts with each long value replaced by its digest."""
    return {
        name: value if len(value) <= MOST_TOLD_CHARS else hashlib.sha256(value.encode()).hexdigest()[:16]
        for name, value in facts.items()
    }


def _load(part: _Part, adapters: list[StoredAdapter]) -> tuple[Model, int]:
    """Return the model and the number of bytes of its weights."""
    config, is_leader = part.config, part.group.rank == LEADER
    if config.architecture == FAKE_ARCHITECTURE:
        return FakeModel(config, part.folder, part.group), 0
    if config.is_transformers:
        require("transformers")
        from engine.transformers_backend.loading import load_transformers  # here, as it takes seconds to import

        of_rank = (part.device, part.shard, part.of_stage, part.pipeline)
        return load_transformers(
            part.folder, config, part.layout, part.dtype, *of_rank, part.settings, shows_progress=is_leader
        )
    decoder, num_bytes = _load_decoder(part, is_leader)
    return decoder, num_bytes + (load_adapters(decoder, adapters, part.dtype, part.device) if adapters else 0)


def _with_measured_layout(part: _Part, model: Model) -> _Part:
    """Return the part with the layout of what the model keeps, where only trying it has told."""
    if not part.config.is_transformers:
        return part
    from engine.transformers_backend.sequences import SequenceDecoder

    if not isinstance(model, SequenceDecoder):
        return part
    whole = model.layout.with_heads(model.layout.num_kv_heads * part.tp_size)
    return replace(part, model_layout=whole, layout=model.layout)


def _load_decoder(part: _Part, shows_progress: bool) -> tuple[LlamaDecoder, int]:
    config, settings, device = part.config, part.settings, part.device
    if config.tie_word_embeddings and stores_own_head(part.folder, part.dtype, is_text_part=config.is_text_part):
        logger.warning("config.json ties the head to the embedding; the weights hold another head, which computes")
        config = replace(config, tie_word_embeddings=False)
    of_rank = (device, part.shard, part.of_stage, part.pipeline)
    with torch.device("meta"):
        decoder = LlamaDecoder(config, *of_rank, settings.sequence_parallel_min_tokens)
    placement = None
    if settings.weights_memory_bytes:
        store = choose_store(settings, device)
        placement = Placement(decoder.own_layers, settings.weights_memory_bytes, store)
    what = (settings.quantization, config.stored_quantization, placement)
    is_text_part = config.is_text_part
    num_bytes = load_weights(
        decoder, part.folder, part.dtype, device, *what, is_text_part=is_text_part, shows_progress=shows_progress
    )
    if placement is None:
        decoder.stack_experts()
    else:
        decoder.offloaded = placement.finish()
    return decoder, num_bytes


def _make_pool(part: _Part, num_kept_bytes: int) -> tuple[PagedKVPool, int]:
    """Return the pool, and the number of its blocks that requests may have."""
    settings, group, device = part.settings, part.group, part.device
    room = on_all_ranks(group, SettingsError, lambda: device_room(settings, device, num_kept_bytes))
    least_room = min(int(each) for each in group.exchange(str(room).encode()))
    num_blocks = num_blocks_for(settings, part.model_layout, part.tp_size, least_room)
    num_allocated = num_blocks + num_scratch_blocks(settings, device)
    return PagedKVPool(part.layout, num_allocated, device, part.dtype), num_blocks


def num_scratch_blocks(settings: EngineSettings, device: torch.device) -> int:
    """Return how many scratch blocks the pool needs behind the requests' blocks: 1 for CUDA graphs, else 0.

    With several stages there are no graphs, since stages wait for each other on the host.
    """
    has_graphs = device.type == "cuda" and settings.pipeline_parallel_size == 1 and not settings.enforce_eager
    return int(has_graphs)


def _choose_attention(part: _Part, model: Model, pool: PagedKVPool) -> Attention:
    """Choose the attention backend. Raises ModelError if transformers computes different logits with it than with its
    own attention.
    """
    num_heads = len(part.shard.query_heads.held)
    if not part.config.is_transformers:
        ours = part.config.differences
        scoring = {"score_scale": ours.score_scale, "softcap": ours.score_softcap}
        return _attention_of_all(part.group, pool, num_heads, **scoring)
    from engine.transformers_backend.decoder import TransformersDecoder
    from engine.transformers_backend.loading import check_model
    from engine.transformers_backend.sequences import SequenceDecoder

    assert isinstance(model, TransformersDecoder | SequenceDecoder)
    attention = _attention_of_all(part.group, pool, num_heads, portable_only=model.needs_portable)
    if part.settings.verify_model:
        check_model(model, attention, part.group, part.config, part.max_model_len)
    return attention


def _attention_of_all(group: RankGroup, pool: PagedKVPool, num_heads: int, **options: Any) -> Attention:
    """Return the backend that every rank chooses, or the portable one if the choices differ."""
    attention = choose_attention(pool, num_heads, **options)
    names = {name.decode() for name in group.exchange(attention.name.encode())}
    if len(names) == 1:
        return attention
    logger.warning("attention is portable: on some ranks only that would do (%s)", ", ".join(sorted(names)))
    return choose_attention(pool, num_heads, **{**options, "portable_only": True})


def _choose_program(
    part: _Part, model: Model, attention: Attention, num_blocks: int, *, exact: bool
) -> DecodeProgram | None:
    """Return the fastest decode program, or None if only module after module works.

    `exact`: its logits must equal the model's to the bit. Requests own the first num_blocks blocks of the pool; the
    others are scratch. Call on all ranks, before the pool holds data.
    """
    if not isinstance(model, LlamaDecoder) or model.offloaded is not None:  # modules wait for their offloaded weights
        return None
    if isinstance(attention, NativeAttention):
        return NativeDecode(model, attention) if is_recordable(model, attention) else None
    if attention.pool.num_blocks > num_blocks and not model.awaits_routing(attention.pool.compute_dtype):
        return cuda_graphs(model, attention, num_blocks, part.max_model_len, part.group, exact=exact)
    return None


def _can_hold_remote_kv(part: _Part, model: Model, attention: Attention) -> bool:
    if not isinstance(model, LlamaDecoder) or not isinstance(attention, NativeAttention):
        return False
    return part.group.size == 1 and model.windows == {None} and TILE_KEYS % part.layout.block_size == 0


def _describe(part: _Part, model: Model, attention: Attention, program: DecodeProgram | None) -> dict[str, str]:
    settings, device, tp_size = part.settings, part.device, part.tp_size
    offloaded = model.offloaded if isinstance(model, LlamaDecoder) else None
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": part.dtype_name,
        "quantization": quantization_name(settings.quantization, part.config.stored_quantization),
        "attention": attention.name,
        "program": MODULES if program is None else program.name,
        "threads": str(torch.get_num_threads()),
        "tp_size": str(tp_size),
        "pp_size": str(settings.pipeline_parallel_size),
        "sequence_parallel_min_tokens": str(settings.sequence_parallel_min_tokens if tp_size > 1 else 0),
        "layers_offloaded": str(0 if offloaded is None else len(offloaded.layer_bytes)),
        "batch_invariant": "yes" if settings.batch_invariant else "no",
        "model_impl": f"transformers {version('transformers')}" if part.config.is_transformers else NATIVE,
    }
