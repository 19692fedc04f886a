"""Compute the steps of one rank: scheduled tokens, forward batch, model, logits, sampler, tokens.

engine/build.py makes an engine from settings. An engine knows no network and no role.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import torch

from engine.attention.distributed import DistributedAttention, PartialAttention
from engine.attention.native import NativeAttention
from engine.attention.paged import Attention
from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import ForwardBatch, build_batch, next_batch
from engine.micro_batches import micro_batches
from engine.ops.base import Logits, Ops
from engine.parallel import LEADER, RankGroup
from engine.pipeline import Pipeline
from engine.pooling import pool
from engine.sampler import sample, sample_step
from engine.stepper import StepStream
from serving_core.errors import ModelError
from serving_core.grammars import Grammars
from serving_core.layout import KVLayout
from serving_core.model_files.config import ModelConfig
from serving_core.node.prefix import numerics_of
from serving_core.requests import OnLayer, Request, SampledToken, SamplingParams, Share, Work

WARM_UP_TOKENS: Final = 128
MIN_MEASURED_S: Final = 1e-6

PLAN = "plan"  # the scheduler's decisions
THREADS = "threads"  # between the event loop and the engine's thread
BUILD = "build"  # the tensors of a batch
COMPUTE = "compute"  # on CUDA only the launches: `sample` is the first part that waits for the device
SAMPLE = "sample"  # sampling from logits
DRAFT = "draft"  # the draft model, between two steps
AFTER = "after"  # processing of tokens: finish reasons, records, full blocks
SEND = "send"  # reports to the coordinator, and other decisions
IDLE = "idle"  # nothing to compute
PARTS: Final = (PLAN, BUILD, COMPUTE, SAMPLE, DRAFT, AFTER, SEND, THREADS, IDLE)
BETWEEN: Final = (PLAN, BUILD, SAMPLE, AFTER, SEND, THREADS)


class StepClock:
    """Adds up the seconds that each part of a step takes; `seconds` has them by part.

    Parts do not overlap, in whatever thread they run, and sum to the time from the start to the last lap.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: Final = dict.fromkeys(PARTS, 0.0)
        self._now = now
        self._last_s = now()

    def lap(self, part: str) -> None:
        """Add the time since the previous call to the total of `part`, one of PARTS."""
        now_s = self._now()
        self.seconds[part] += now_s - self._last_s
        self._last_s = now_s


class Model(Protocol):
    """One rank's part of a decoder, or the fake model."""

    num_divided_passes: int  # passes through the layers that used sequence parallelism
    reuses_prefixes: bool  # whether one call computes many tokens behind a cached prefix

    def __call__(
        self, batch: ForwardBatch, attention: Attention, on_layer: OnLayer | None = None
    ) -> torch.Tensor | None:
        """Compute a batch and write its KV into the pool of `attention`.

        Returns, on rank 0 of the last stage, the logits [S, vocab_size] of the rows in `batch.logit_rows`, or an
        embedder's hidden states [S, hidden_size]; None on every other rank. The fake model has no stages: each of its
        ranks computes all layers.
        """


class DecodeProgram(Protocol):
    """Computes whole decode steps of one decoder over one pool at once, instead of one module after the other.

    `name` says in descriptions how.

    Native kernels give the decoder's logits to the bit; CUDA graphs only as far as kernels for other numbers of rows
    agree, unless they were required to be exact.
    """

    name: str
    moves_batches: bool  # whether steps behind each other may have one batch

    def plan(self, batch: ForwardBatch) -> Any | None:
        """Prepare what `run` needs for this batch; return None if the program does not compute such batches.

        The batch's tokens may be unknown, and another batch may run meanwhile.
        """

    def plan_behind(self, batch: ForwardBatch, plan: Any, works: Sequence[Work]) -> Any | None:
        """Prepare the step behind the one with this batch and plan, for the same batch: `run` will move it, in place.

        `works` are the next tokens of its requests, one each. Returns None if that step needs another batch.
        """

    def run(self, batch: ForwardBatch, plan: Any, on_taken: Callable[[], None]) -> Logits | None:
        """Compute a batch, given what `plan` returned for it, and write its keys and values into the pool.

        Returns the logits [S, vocab_size] on rank 0, valid until the next run, and None on the others. Calls `on_taken`
        when the kernels have their inputs and are about to begin.
        """

    def close(self) -> None:
        """Release what would block the closing of a group of ranks. The program cannot run afterwards."""


class PreparedStep(NamedTuple):
    """The batch of a decode step whose tokens are not known, with what a decode program prepared for it, if any."""

    batch: ForwardBatch
    plan: Any | None


@dataclass(eq=False, kw_only=True)
class Engine:
    """One rank's part of a loaded model. One thread at a time may call its methods.

    The ranks of a group compute every step together: rank 0 calls `step`, the others call `follow` with the same
    shares. With pipeline stages, each stage computes its layers on the output of the stage before it. If a peer does
    not keep up, `step` and `follow` raise RuntimeError, and the engine cannot be used any more.

    Between steps the caller may replace `model` and `attention` by equivalent objects, `program` also by None, and
    `clock`.
    """

    config: ModelConfig
    group: RankGroup
    pipeline: Pipeline | None  # None: one stage
    model: Model
    ops: Ops
    pool: PagedKVPool
    attention: Attention
    program: DecodeProgram | None  # None: module after module
    stream: StepStream
    grammars: Grammars  # may be used while a step runs
    model_layout: KVLayout  # layout over all ranks
    num_blocks: int  # blocks of the pool that requests may have
    max_model_len: int
    weight_bytes: int
    fingerprint: dict[str, str]
    description: dict[str, str]
    numerics_facts: dict[str, str]  # facts beside the fingerprint that the bits of outputs depend on
    is_batch_invariant: bool
    """Whether the bits of a token's logits and KV depend only on the tokens before it, not on chunks, steps or other
    requests of the batch.
    """
    holds_remote_kv: bool  # whether requests may use distributed KV and get the same bits as without it
    clock: StepClock = field(default_factory=StepClock)

    @torch.inference_mode()
    def step(self, works: Sequence[Work], on_layer: OnLayer | None = None) -> list[SampledToken]:
        """Compute the scheduled tokens of each request on rank 0, and return the sampled tokens in order.

        Returns one token for each request that samples, and one more for each accepted draft token (see Work.take); an
        embedder returns an embedding. `on_layer` is called with the number of leading layers whose KV is in the pool.
        Modifies only the scores, the pooled state and the error of remote KV of the requests. Draft tokens require an
        engine that is `is_batch_invariant`.
        """
        assert self.group.rank == LEADER, "the other ranks follow"
        self.clock.lap(THREADS)
        shares = [work.share for work in works]
        with self.stream.step(on_layer) as layers:
            if any(work.request.remote_kvs for work in works):
                logits: Logits | None = self._logits_with_remote_kvs(works, shares, layers.on_queued)
            else:
                logits = self._logits(shares, layers.on_queued)
            assert logits is not None, "rank 0 has them"
            layers.await_all_but_last()
            self.clock.lap(COMPUTE)
            tokens = self._sample(logits, works, shares)
        self.clock.lap(SAMPLE)
        return tokens

    def follow(self, shares: Sequence[Share], on_layer: OnLayer | None = None) -> None:
        """Compute this rank's part of a step that rank 0 computes; not for rank 0.

        `shares` are the scheduled tokens of each request. `on_layer` is called with the number of leading layers whose
        KV is in the pool.
        """
        assert self.group.rank != LEADER, "rank 0 leads"
        with torch.inference_mode(), self.stream.step(on_layer) as layers:
            self._logits(shares, layers.on_queued)

    @torch.inference_mode()
    def likeliest(self, shares: Sequence[Share]) -> list[int]:
        """Compute the scheduled tokens (`shares`); return the likeliest next token of each request that samples.

        The model's raw logits decide. A request that does not sample must want no logits. Requires a single rank.
        """
        logits = self._logits(shares, None)
        assert logits is not None, "it has one rank"
        ends = torch.tensor([share.num_scored + 1 for share in shares if share.samples]).cumsum(0) - 1
        if not len(ends):
            return []
        _, tokens = logits.likeliest or self.ops.likeliest(logits.rows)
        return tokens[ends.to(tokens.device)].tolist()

    # ---- async scheduling: the next step is built while this one runs ----

    @property
    def can_schedule_async(self) -> bool:
        """Return whether `prepare` and `step_prepared` may be called: on a single rank, for a model that generates."""
        return self.group.size == 1 and self.config.embedder is None

    def prepare(self, works: Sequence[Work], behind: PreparedStep | None = None) -> PreparedStep:
        """Build the batch of a decode step in which each request's one token is not known yet.

        `behind` is the step before, if it was prepared too and these works are its requests' next tokens. It must be
        computed before this one; if it fails or is dropped, so must this one be dropped. May run beside a running step,
        from one thread at a time.

        Steps behind each other may have one batch, which two threads use without a lock. The thread that calls this
        owns `context_lengths` and the columns of `block_tables` that no step before needs. The engine's thread owns
        all else, and moves it to a step's tokens when that step begins. So this reads no tensor of a batch that moves,
        and it does not matter whether the step before has begun, or fails.
        """
        layout, device, program = self.layout, self.pool.device, self.program
        with self.stream.taken():
            if behind is not None and behind.plan is not None:
                assert program is not None, "it has made the plan"
                plan = program.plan_behind(behind.batch, behind.plan, works)
                if plan is not None:
                    return PreparedStep(behind.batch, plan)
                if program.moves_batches:
                    behind = None
            if behind is None or layout.num_state_blocks:
                shares = [Share((0,), work.start, work.block_ids, True, adapter=work.request.adapter) for work in works]
                batch = build_batch(shares, layout.block_size, device, layout.num_state_blocks)
            else:
                batch = next_batch(behind.batch, [work.block_ids for work in works], layout.block_size, device)
            return PreparedStep(batch, None if program is None else program.plan(batch))

    def step_prepared(
        self,
        works: Sequence[Work],
        prepared: PreparedStep,
        before: Sequence[SampledToken],
        on_begun: Callable[[], None],
        until_known: Callable[[], None],
    ) -> list[SampledToken]:
        """Compute a step like `step`, from the batch that `prepare` has built of these `works`, none with draft tokens.

        Call in inference mode, as a Stepper does.

        `before` has the preceding step's token of each request, in order. Calls `on_begun` when the computation begins.
        Calls `until_known` before it reads the requests; when `until_known` returns, the requests must hold the tokens
        `before`.
        """
        self.clock.lap(THREADS)
        token_ids = [token.token_id for token in before]
        with self.stream.step():
            prepared.batch.know(token_ids)
            logits = self._computed(prepared.batch, prepared.plan, None, on_begun)
            assert logits is not None, "this is the only rank"
            self.clock.lap(COMPUTE)
            until_known()
            self.clock.lap(THREADS)
            tokens = sample(
                logits.rows, [work.request for work in works], self.config.eos_token_ids, self.ops, logits.likeliest
            )
        self.clock.lap(SAMPLE)
        return tokens

    # ---- the parts of a step ----

    def _logits(self, shares: Sequence[Share], on_layer: OnLayer | None) -> Logits | None:
        """Compute the logits of a step; None on all ranks but rank 0."""
        if self.pipeline is not None:
            return self._logits_of_stages(self.pipeline, shares, on_layer)
        batch = self._batch(shares)
        plan = None if self.program is None or on_layer is not None else self.program.plan(batch)
        return self._computed(batch, plan, on_layer)

    def _logits_of_stages(self, pipeline: Pipeline, shares: Sequence[Share], on_layer: OnLayer | None) -> Logits | None:
        """Compute a step in micro-batches over the pipeline stages. `on_layer` is called during the last micro-batch
        only.
        """
        parts = micro_batches(shares, pipeline.num_stages, self.layout.block_size)
        computed: list[torch.Tensor] = []
        num_rows = 0
        for number, part in enumerate(parts, 1):
            batch = self._batch(part)
            num_rows += len(batch.logit_rows)
            of_part = self._computed(batch, None, on_layer if number == len(parts) else None)
            self.clock.lap(COMPUTE)
            computed += [] if of_part is None else [of_part.rows]
        together = torch.cat(computed) if computed else None
        width = self.config.vocab_size if self.config.embedder is None else self.config.hidden_size
        rows = pipeline.logits_on_leader(together, num_rows, width, self.pool.compute_dtype)
        return None if rows is None else Logits(rows)

    def _batch(self, shares: Sequence[Share]) -> ForwardBatch:
        layout = self.layout
        batch = build_batch(shares, layout.block_size, self.pool.device, layout.num_state_blocks)
        self.clock.lap(BUILD)
        return batch

    def _computed(
        self,
        batch: ForwardBatch,
        plan: Any | None,
        on_layer: OnLayer | None,
        on_begun: Callable[[], None] | None = None,
    ) -> Logits | None:
        """Compute the logits of a batch: with the decode program, given its plan, else with the model.

        `on_begun` is called when the kernels have their inputs, or before the first kernel runs.
        """

        def begin() -> None:
            if on_begun is not None:
                on_begun()
            self.clock.lap(BUILD)

        if plan is not None:
            assert self.program is not None
            return self.program.run(batch, plan, begin)
        begin()
        rows = self.model(batch, self.attention, on_layer)
        return None if rows is None else Logits(rows)

    def _sample(self, logits: Logits, works: Sequence[Work], shares: Sequence[Share]) -> list[SampledToken]:
        if self.config.embedder is not None:
            return pool(logits.rows, works)
        return sample_step(logits, works, shares, self.config.eos_token_ids, self.ops)

    # ---- distributed KV ----

    def partial_attention(self) -> PartialAttention:
        """Return an object that computes partial attention over this node's pool for requests of other nodes.

        It may run beside the steps of this engine. Requires `holds_remote_kv`.
        """
        assert isinstance(self.attention, NativeAttention)
        return PartialAttention(self.attention)

    def _logits_with_remote_kvs(
        self, works: Sequence[Work], shares: Sequence[Share], on_layer: OnLayer | None
    ) -> Logits:
        """Compute each request with distributed KV by itself, so that a failed KV holder fails that request alone.

        A step waits at most once for a silent KV holder.
        """
        silent: set[str] = set()
        both = list(zip(works, shares, strict=True))
        remote = iter([self._with_remote_kvs(*each, silent) for each in both if each[0].request.remote_kvs])
        plain = [share for work, share in both if not work.request.remote_kvs]
        logits = self._logits(plain, on_layer) if plain else None
        num_rows = [each.num_scored + each.samples for each in plain]
        rest = iter(() if logits is None else torch.split(logits.rows, num_rows))
        return Logits(torch.cat([next(remote if work.request.remote_kvs else rest) for work in works]))

    def _with_remote_kvs(self, work: Work, share: Share, silent: set[str]) -> torch.Tensor:
        """Compute one request with distributed KV; add the addresses of KV holders that do not answer to `silent`."""
        batch, request = self._batch([share]), work.request
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

    # ---- before the first step, and after the last ----

    def warm_up(self) -> float:
        """Compute trial steps, which pay the costs of first calls; return the measured prompt tokens per second.

        Call on all ranks, before the pool holds data. Raises ModelError on rank 0 if the logits are not finite.
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

    def close(self) -> None:
        """Release the decode program; the engine can still compute, module after module.

        Call before the group is closed: NCCL waits for all CUDA graphs that use the group.
        """
        if self.program is not None:
            self.program.close()
            self.program = None

    @property
    def layout(self) -> KVLayout:
        """Return the layout of this rank's KV; `model_layout` is that of all ranks together."""
        return self.pool.layout

    @property
    def kv_pool_bytes(self) -> int:
        return self.layout.block_bytes * self.num_blocks

    @property
    def eos_token_ids(self) -> Sequence[int]:
        return self.config.eos_token_ids

    @property
    def num_divided_passes(self) -> int:
        """Return how often a batch passed through the layers with sequence parallelism."""
        return self.model.num_divided_passes

    @property
    def reuses_prefixes(self) -> bool:
        """Return whether a step computes many tokens behind a cached prefix in one call, so that the cache pays."""
        return self.model.reuses_prefixes

    @property
    def numerics(self) -> bytes:
        """Return an 8-byte digest of `numerics_facts`, a part of the numerics id of blocks."""
        return numerics_of(self.numerics_facts)
