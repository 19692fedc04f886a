"""Compute one rank's part of a node's model: the model, its KV pool and the sampling of tokens. Knows no network and no
role.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch

from engine.acceptance import verify
from engine.attention.backends import choose_attention, invariant_attentions
from engine.attention.distributed import DistributedAttention
from engine.attention.native import NativeAttention
from engine.attention.paged import Attention
from engine.attention.partial import TILE_KEYS, PartialAttention
from engine.cache.kv_pool import PagedKVPool, device_room
from engine.decode_program import DecodeProgram, choose_program, num_scratch_blocks
from engine.fake import FakeModel
from engine.forward_batch import Built, ForwardBatch, build_batch
from engine.histories import differing_histories
from engine.micro_batches import micro_batches
from engine.model.llama import LlamaDecoder
from engine.model.lora_weights import load_adapters
from engine.model.weights import load_weights, stores_own_head
from engine.numerics import numerics_facts
from engine.offload.placement import Placement, choose_store
from engine.ops.backends import choose_ops
from engine.ops.base import Likeliest
from engine.parallel import LEADER, RankGroup, alone, choose_device, on_all_ranks
from engine.pipeline import Pipeline
from engine.pooling import pool
from engine.sampler import sample, take_scores
from engine.stepper import BUILD, COMPUTE, HAND_OVER, SAMPLE, StepClock
from engine.streams import StepStream
from serving_core.errors import ModelError, SettingsError
from serving_core.grammars import Grammars
from serving_core.layout import KVLayout
from serving_core.model_files.adapters import adapter_facts, read_adapters
from serving_core.model_files.config import FAKE_ARCHITECTURE, NATIVE, ModelConfig, read_model_config
from serving_core.model_files.fingerprint import fingerprint
from serving_core.model_files.stored_quantization import quantization_name
from serving_core.node.needs import check_settings, compute_dtype, model_layout, num_blocks_for
from serving_core.node.prefix import numerics_of
from serving_core.process.extras import require
from serving_core.process.heap import keep_freed_memory
from serving_core.requests import OnLayer, Request, SampledToken, SamplingParams, Share, Work
from serving_core.settings import EngineSettings
from serving_core.sharding import Shard, rank_layout, shard_of

logger = logging.getLogger(__name__)

NOT_TRIED: Final = "--batch-invariant tries products of torch out at the start, and not all weights are there then"
MOST_TOLD_CHARS: Final = 64  # characters of one fact that ranks compare

WARM_UP_TOKENS: Final = 128
MIN_MEASURED_S: Final = 1e-6


class Model(Protocol):
    """One rank's part of a decoder, or the fake model."""

    def __call__(
        self, batch: ForwardBatch, attention: Attention, on_layer: OnLayer | None = None
    ) -> torch.Tensor | None:
        """Compute a batch and write its KV into the pool of `attention`.

        Returns, on rank 0 of the last stage, the logits [S, vocab_size] of the rows in `batch.logit_rows`, or an
        embedder's hidden states [S, hidden_size]; None on every other rank. The fake model has no stages: each of its
        ranks computes all layers.
        """


class Logits(NamedTuple):
    """The logits of the wanted rows of a step, or an embedder's hidden states."""

    rows: torch.Tensor
    likeliest: Likeliest | None = None  # the largest logits and their tokens, if known


class Engine:
    """One rank's part of a loaded model. One thread at a time may call its methods.

    The ranks of a group compute every step together: rank 0 calls `step`, the others call `follow` with the same
    shares. With pipeline stages, each stage computes its layers on the output of the stage before it. If a peer does
    not keep up, `step` and `follow` raise RuntimeError, and the engine cannot be used any more.

    `model` and `attention` compute a step; `program`, if not None, computes a whole decode step. Between steps the
    caller may replace them by equivalent objects, and may replace `clock`.
    """

    def __init__(self, settings: EngineSettings, group: RankGroup | None = None, num_kept_bytes: int = 0) -> None:
        """Load the model and allocate the KV pool; without a group, as the only rank.

        A pool that takes the rest of a device's memory leaves `num_kept_bytes` free. Raises ModelError or SettingsError
        with one sentence if loading fails.
        """
        if not settings.model:
            raise SettingsError("no model folder was given")
        keep_freed_memory()
        folder = Path(settings.model)
        self.group: Final = group or alone()
        self.clock = StepClock()
        self.config: Final = read_model_config(folder, settings.model_impl, settings.runner)
        device = choose_device(settings.device)
        dtype = compute_dtype(settings, self.config)
        rank, pp_size = self.group.rank, settings.pipeline_parallel_size
        tp_size = self.group.size // pp_size
        if tp_size * pp_size != self.group.size:
            raise SettingsError(f"--pipeline-parallel-size is {pp_size}, and there are {self.group.size} ranks")
        check_settings(settings, self.config, tp_size)
        is_fake = self.config.architecture == FAKE_ARCHITECTURE
        self._pipeline = None if pp_size == 1 or is_fake else Pipeline(self.group, pp_size, device)
        self._of_stage = self._pipeline.stage if self._pipeline else self.group
        shard = shard_of(self.config, rank, tp_size, pp_size)
        self.model_layout: Final = model_layout(settings, self.config)  # layout over all ranks
        self.layout: Final = rank_layout(self.model_layout, rank, tp_size, pp_size)
        self.max_model_len: Final = settings.max_model_len or self.config.max_position_embeddings
        num_blocks = num_blocks_for(settings, self.model_layout, tp_size)
        self.eos_token_ids: Final = self.config.eos_token_ids
        adapters = read_adapters(settings.lora, self.config)
        of_model = fingerprint(folder, self.config, self.model_layout, dtype, settings.quantization)
        self.fingerprint: Final = of_model | adapter_facts(adapters)
        _check_alike(self.group, self.fingerprint | _shared_settings(settings, num_blocks, self.max_model_len))
        self.grammars: Final = Grammars(folder, self.eos_token_ids)  # may be used while a step runs
        self._device = device
        self._stream = StepStream(device)
        self._ops = choose_ops(device)
        torch_dtype: torch.dtype = getattr(torch, dtype)

        def load() -> tuple[Model, int]:
            where = (device, shard, self.group, self._pipeline)
            model, num_bytes = _build_model(folder, self.config, torch_dtype, *where, settings, self.layout)
            if adapters:
                assert isinstance(model, LlamaDecoder)
                num_bytes += load_adapters(model, adapters, torch_dtype, device)
            return model, num_bytes

        self.model, weight_bytes = on_all_ranks(self.group, ModelError, load)
        self.weight_bytes: Final = weight_bytes
        room = on_all_ranks(self.group, SettingsError, lambda: device_room(settings, device, num_kept_bytes))
        least_room = min(int(each) for each in self.group.exchange(str(room).encode()))
        self.num_blocks: Final = num_blocks_for(settings, self.model_layout, tp_size, least_room)
        self.kv_pool_bytes: Final = self.layout.block_bytes * self.num_blocks
        num_allocated = self.num_blocks + num_scratch_blocks(settings, device)
        self.pool: Final = PagedKVPool(self.layout, num_allocated, device, torch_dtype)
        self.attention = self._choose_attention(len(shard.query_heads.held), verifies=settings.verify_model)
        kernels_alone = not any(self.group.exchange(b"" if self._is_by_kernels() else b"torch"))  # on any rank
        if settings.batch_invariant and settings.weights_memory_bytes and not kernels_alone:
            raise SettingsError(f"--weights-memory-bytes: {NOT_TRIED}")
        self.is_batch_invariant: Final = kernels_alone or (
            settings.batch_invariant and self._make_invariant(torch_dtype, len(shard.query_heads.held))
        )
        """Whether the bits of a token's logits and KV depend only on the tokens before it, not on chunks, steps or
        other requests of the batch.
        """
        self.program: DecodeProgram | None = None
        if self.config.embedder is None:
            of_pool = (self.attention, self.num_blocks, self.max_model_len)
            self.program = choose_program(self.model, *of_pool, self.group, exact=self.is_batch_invariant)
        self.description: Final = self._describe(settings, dtype, tp_size)
        facts = {**self.description, "program": type(self.program).__name__}
        facts["history_free"] = "yes" if self.is_batch_invariant else "no"
        self.numerics_facts: Final = numerics_facts(facts, device, kernels_alone=kernels_alone)
        """Facts beside the fingerprint that the bits of outputs depend on."""
        self.numerics: Final = numerics_of(self.numerics_facts)

    def _describe(self, settings: EngineSettings, dtype: str, tp_size: int) -> dict[str, str]:
        device = self._device
        return {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "dtype": dtype,
            "quantization": quantization_name(settings.quantization, self.config.stored_quantization),
            "attention": self.attention.name,
            "threads": str(torch.get_num_threads()),
            "tp_size": str(tp_size),
            "pp_size": str(settings.pipeline_parallel_size),
            "sequence_parallel_min_tokens": str(settings.sequence_parallel_min_tokens if tp_size > 1 else 0),
            "layers_offloaded": str(self._num_offloaded()),
            "batch_invariant": "yes" if settings.batch_invariant else "no",
            "model_impl": f"transformers {version('transformers')}" if self.config.is_transformers else NATIVE,
        }

    def close(self) -> None:
        """Release the decode program. Call before the group is closed: NCCL waits for all CUDA graphs that use the
        group.
        """
        if self.program is not None:
            self.program.close()
            self.program = None

    @property
    def num_divided_passes(self) -> int:
        """Return the number of passes through the layers that used sequence parallelism."""
        return self.model.num_divided_passes if isinstance(self.model, LlamaDecoder) else 0

    @property
    def can_schedule_async(self) -> bool:
        """Return whether `prepare` and `step_prepared` may be called (async scheduling)."""
        return self.group.size == 1 and self.config.embedder is None

    @torch.inference_mode()
    def prepare(self, works: Sequence[Work]) -> Built:
        """Build the batch of a step whose requests each lack one token that is not yet known.

        May run beside a running step, from one thread at a time.
        """
        shares = [Share((0,), work.start, work.block_ids, True, adapter=work.request.adapter) for work in works]
        program = self.program
        with self._stream.taken():
            batch = build_batch(shares, self.layout.block_size, self._device)
            return Built(batch, program.plan(batch) if program is not None and program.matches(batch) else None)

    @torch.inference_mode()
    def step_prepared(
        self,
        works: Sequence[Work],
        built: Built,
        before: Sequence[SampledToken],
        on_begun: Callable[[], None],
        until_known: Callable[[], None],
    ) -> list[SampledToken]:
        """Compute a step like `step`, from a batch of `prepare` and the tokens `before` of the preceding step.

        Calls `on_begun` when the computation begins. Calls `until_known` before it reads the requests; when
        `until_known` returns, the requests must hold the tokens `before`.
        """
        self.clock.lap(HAND_OVER)
        token_ids = torch.tensor([token.token_id for token in before], dtype=torch.int64, device="cpu")
        with self._stream.step():
            built.batch.token_ids.copy_(token_ids)
            logits = self._logits(built.batch, None, built.plan, on_begun)
            assert logits is not None, "this is the only rank"
            self.clock.lap(COMPUTE)
            until_known()
            self.clock.lap(HAND_OVER)
            tokens = self._tokens(logits, works)
        self.clock.lap(SAMPLE)
        return tokens

    @torch.inference_mode()
    def step(self, works: Sequence[Work], on_layer: OnLayer | None = None) -> list[SampledToken]:
        """Compute the scheduled requests on rank 0 and return the sampled tokens, in order.

        Returns one token for each request that samples, and one more for each accepted draft token (see Work.take); an
        embedder returns an embedding. Modifies only the scores and the pooled state of the requests. Draft tokens
        require an engine that is `is_batch_invariant`.
        """
        assert self.group.rank == LEADER, "the other ranks follow"
        self.clock.lap(HAND_OVER)
        with self._stream.step(on_layer) as layers:
            if any(work.request.remote_kvs for work in works):
                logits: Logits | None = Logits(self._step_with_remote_kvs(works, layers.on_queued))
            else:
                logits = self._step([work.share for work in works], layers.on_queued)
            assert logits is not None, "rank 0 has them"
            layers.await_all_but_last()
            self.clock.lap(COMPUTE)
            tokens = self._tokens(logits, works)
        self.clock.lap(SAMPLE)
        return tokens

    @property
    def holds_remote_kv(self) -> bool:
        """Return whether requests may use distributed KV and get the same bits as without it."""
        decoder, whole_tiles = self.model, TILE_KEYS % self.layout.block_size == 0
        if not isinstance(decoder, LlamaDecoder) or not isinstance(self.attention, NativeAttention):
            return False
        return self.group.size == 1 and self.is_batch_invariant and decoder.windows == {None} and whole_tiles

    def partial_attention(self) -> PartialAttention:
        """Return partial attention over this node's pool for requests of other nodes.

        It may run beside the steps of this engine. Requires `holds_remote_kv`.
        """
        assert isinstance(self.attention, NativeAttention)
        return PartialAttention(self.attention)

    def _step_with_remote_kvs(self, works: Sequence[Work], on_layer: OnLayer | None) -> torch.Tensor:
        """Compute each request with distributed KV by itself, so that a failed KV holder fails that request alone.

        A step waits at most once for a silent KV holder.
        """
        silent: set[str] = set()
        is_remote = iter([self._with_remote_kvs(work, silent) for work in works if work.request.remote_kvs])
        plain = [work.share for work in works if not work.request.remote_kvs]
        logits = self._step(plain, on_layer) if plain else None
        num_rows = [each.num_scored + each.samples for each in plain]
        rest = iter(() if logits is None else torch.split(logits.rows, num_rows))
        return torch.cat([next(is_remote if work.request.remote_kvs else rest) for work in works])

    def _with_remote_kvs(self, work: Work, silent: set[str]) -> torch.Tensor:
        """Compute one request with distributed KV; add the addresses of KV holders that do not answer to `silent`."""
        batch, request = self._batch([work.share]), work.request
        assert isinstance(self.attention, NativeAttention)
        try:
            if lost := silent.intersection(remote_kv.address for remote_kv in request.remote_kvs):
                raise TimeoutError(f"{lost.pop()} does not answer")
            logits = self.model(batch, DistributedAttention(self.attention, request.remote_kvs), None)
        except OSError as error:
            silent.update(remote_kv.address for remote_kv in request.remote_kvs if remote_kv.is_silent)
            request.remote_kv_error = str(error) or type(error).__name__
            return torch.zeros((len(batch.logit_rows), self.config.vocab_size), dtype=self.pool.compute_dtype)
        assert logits is not None
        return logits

    def _tokens(self, logits: Logits, works: Sequence[Work]) -> list[SampledToken]:
        rows, likeliest = logits
        if self.config.embedder is not None:
            return pool(rows, works)
        if any(work.num_scored for work in works):
            rows, likeliest = take_scores(rows, works, self._ops), None
        sampling = [work for work in works if work.samples]
        if any(work.draft_tokens for work in sampling):
            return verify(rows, sampling, self.eos_token_ids, self._ops, likeliest)
        requests = [work.request for work in sampling]
        return sample(rows, requests, self.eos_token_ids, self._ops, likeliest) if requests else []

    @torch.inference_mode()
    def likeliest(self, shares: Sequence[Share]) -> list[int]:
        """Compute the shares and return the likeliest next token of each share that samples, from the model's raw
        logits.

        Each share must sample or want no logits. Requires a single rank.
        """
        logits = self._step(shares, None)
        assert logits is not None, "it has one rank"
        ends = torch.tensor([share.num_scored + 1 for share in shares if share.samples]).cumsum(0) - 1
        if not len(ends):
            return []
        _, tokens = logits.likeliest or self._ops.likeliest(logits.rows)
        return tokens[ends.to(tokens.device)].tolist()

    def follow(self, shares: Sequence[Share], on_layer: OnLayer | None = None) -> None:
        """Compute, on another rank, the step that rank 0 computes."""
        assert self.group.rank != LEADER, "rank 0 leads"
        with self._stream.step(on_layer) as layers:
            self._step(shares, layers.on_queued)

    def warm_up(self) -> float:
        """Pay the costs of first calls. Call on all ranks, before the pool holds data.

        Returns, on rank 0, the measured prefill rate in prompt tokens per second. Raises ModelError on rank 0 if the
        logits are not finite.
        """
        num_tokens = min(WARM_UP_TOKENS, self.max_model_len, self.num_blocks * self.layout.block_size)
        request = Request("warm-up", 0, [0] * num_tokens, num_tokens, SamplingParams(max_tokens=1, temperature=0))
        if self.config.embedder is not None:
            request.pooling = self.config.embedder.pooling
        blocks = range(self.layout.num_blocks_for(num_tokens))
        prompt, last_token = Work(request, 0, num_tokens, blocks), Work(request, num_tokens - 1, 1, blocks)
        started_at = 0.0
        for work in (prompt, last_token, prompt):  # times the second prompt, without the costs of first calls
            started_at = time.perf_counter()
            if self.group.rank == LEADER:
                [token] = self.step([work])
                if token.error is not None:
                    raise ModelError(str(token.error))
            else:
                self.follow([work.share])
        return num_tokens / max(time.perf_counter() - started_at, MIN_MEASURED_S)

    def _choose_attention(self, num_heads: int, *, verifies: bool) -> Attention:
        """Choose the attention backend. Raises ModelError if transformers computes different logits with it than with
        its own attention.
        """
        if not self.config.is_transformers:
            ours = self.config.differences
            return self._attention_of_all(num_heads, score_scale=ours.score_scale, softcap=ours.score_softcap)
        from engine.transformers_backend.decoder import TransformersDecoder
        from engine.transformers_backend.loading import check_model

        assert isinstance(self.model, TransformersDecoder)
        attention = self._attention_of_all(num_heads, portable_only=self.model.needs_portable)
        if verifies:
            check_model(self.model, attention, self.group, self.config, self.max_model_len)
        return attention

    def _attention_of_all(self, num_heads: int, **options: Any) -> Attention:
        """Return the backend that every rank chooses, or the portable one if the choices differ."""
        attention = choose_attention(self.pool, num_heads, **options)
        names = {name.decode() for name in self.group.exchange(attention.name.encode())}
        if len(names) == 1:
            return attention
        logger.warning("attention is portable: on some ranks only that would do (%s)", ", ".join(sorted(names)))
        return choose_attention(self.pool, num_heads, **{**options, "portable_only": True})

    def _num_offloaded(self) -> int:
        offloaded = self.model.offloaded if isinstance(self.model, LlamaDecoder) else None
        return 0 if offloaded is None else len(offloaded.layer_bytes)

    def _is_by_kernels(self) -> bool:
        """Return whether batch-invariant compiled kernels compute every sum of the model."""
        if isinstance(self.model, FakeModel):
            return True
        if self.config.is_transformers or self.layout.is_quantized or not self._of_stage.adds_alike:
            return False
        assert isinstance(self.model, LlamaDecoder)
        return isinstance(self.attention, NativeAttention) and self.model.is_batch_invariant(self.pool.compute_dtype)

    def _make_invariant(self, dtype: torch.dtype, num_heads: int) -> bool:
        """Take the fastest batch-invariant attention that passes the trial; return whether there is one."""
        assert isinstance(self.model, LlamaDecoder)
        self.model.make_batch_invariant(dtype, self._device)
        for attention in invariant_attentions(self.attention, num_heads):
            self.attention = attention
            if self.layout.is_quantized:
                return False
            differing = differing_histories(self.model, attention, self.config.vocab_size, self.max_model_len)
            told = {data.decode() for data in self.group.exchange(" and ".join(differing).encode()) if data}
            if not told:
                return True
            logger.warning("--batch-invariant: with %s attention, bits differ %s", attention.name, " and ".join(told))
        return False

    @torch.inference_mode()
    def _step(self, shares: Sequence[Share], on_layer: OnLayer | None) -> Logits | None:
        """Compute a step on rank 0."""
        if self._pipeline is not None:
            rows = self._step_of_stages(self._pipeline, shares, on_layer)
            return None if rows is None else Logits(rows)
        return self._logits(self._batch(shares), on_layer)

    def _step_of_stages(
        self, pipeline: Pipeline, shares: Sequence[Share], on_layer: OnLayer | None
    ) -> torch.Tensor | None:
        """Compute a step in micro-batches over the pipeline stages. `on_layer` is called during the last micro-batch
        only.
        """
        parts = micro_batches(shares, pipeline.num_stages, self.layout.block_size)
        logits: list[torch.Tensor] = []
        num_rows = 0
        for number, part in enumerate(parts, 1):
            batch = self._batch(part)
            num_rows += len(batch.logit_rows)
            of_part = self._logits(batch, on_layer if number == len(parts) else None)
            self.clock.lap(COMPUTE)
            logits += [] if of_part is None else [of_part.rows]
        together = torch.cat(logits) if logits else None
        width = self.config.vocab_size if self.config.embedder is None else self.config.hidden_size
        return pipeline.logits_on_leader(together, num_rows, width, self.pool.compute_dtype)

    def _batch(self, shares: Sequence[Share]) -> ForwardBatch:
        batch = build_batch(shares, self.layout.block_size, self._device)
        self.clock.lap(BUILD)
        return batch

    def _logits(
        self,
        batch: ForwardBatch,
        on_layer: OnLayer | None,
        plan: Any = None,
        on_begun: Callable[[], None] | None = None,
    ) -> Logits | None:
        """Compute the logits of a batch.

        `plan` is the decode program's plan, if already built. `on_begun` is called when the kernels have their inputs,
        or before the first kernel runs.
        """

        def begin() -> None:
            if on_begun is not None:
                on_begun()
            self.clock.lap(BUILD)

        if self.program is not None and on_layer is None and self.program.matches(batch):
            rows = self.program.run(batch, begin, plan)
            return None if rows is None else Logits(rows, self.program.likeliest(len(rows)))
        begin()
        given = self.model(batch, self.attention, on_layer)
        return None if given is None else Logits(given)


def _shared_settings(settings: EngineSettings, num_blocks: int, max_model_len: int) -> dict[str, str]:
    """Return the settings, beside the model, that must be equal on all ranks."""
    return {
        "--sequence-parallel-min-tokens": str(settings.sequence_parallel_min_tokens),
        "--enforce-eager": str(settings.enforce_eager),
        "SplitServe's version": version("splitserve"),
        "the number of KV blocks": str(num_blocks),
        "the longest request": str(max_model_len),
    }


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


def _build_model(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    group: RankGroup,
    pipeline: Pipeline | None,
    settings: EngineSettings,
    layout: KVLayout,
) -> tuple[Model, int]:
    """Return the model and the number of bytes of its weights."""
    if config.architecture == FAKE_ARCHITECTURE:
        return FakeModel(config, folder, group), 0
    of_stage = pipeline.stage if pipeline else group
    if config.is_transformers:
        require("transformers")
        from engine.transformers_backend.loading import load_transformers  # here, as it takes seconds to import

        is_leader = group.rank == LEADER
        of_rank = (device, shard, of_stage, pipeline)
        return load_transformers(folder, config, layout, dtype, *of_rank, settings, shows_progress=is_leader)
    if config.tie_word_embeddings and stores_own_head(folder, dtype, is_text_part=config.is_text_part):
        logger.warning("config.json ties the head to the embedding; the weights hold another head, which computes")
        config = replace(config, tie_word_embeddings=False)
    with torch.device("meta"):
        decoder = LlamaDecoder(config, device, shard, of_stage, pipeline, settings.sequence_parallel_min_tokens)
    placement = None
    if settings.weights_memory_bytes:
        store = choose_store(settings, device)
        placement = Placement(decoder.own_layers, settings.weights_memory_bytes, store)
    what = (settings.quantization, config.stored_quantization, placement)
    num_bytes = load_weights(
        decoder, folder, dtype, device, *what, is_text_part=config.is_text_part, shows_progress=group.rank == LEADER
    )
    decoder.offloaded = placement.finish() if placement else None
    return decoder, num_bytes
