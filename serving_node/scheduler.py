"""Decide for one node. Pure: commands, ends of steps and transfers, and the time come in; decisions come out.

The scheduler joins prefill (`prefill_node`) and decode (`decode_node`) over one KV pool. One step may hold both: one
token of each running sequence, then chunks of prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode_node.preallocation import Preallocation
from decode_node.preemption import Preemption
from decode_node.scheduler import DecodeScheduler, next_step
from decode_node.speculation import DraftModel, Speculation
from kv_transfer.distributed_kv.wire import TileRequest
from kv_transfer.results import Received, Sent, TransferFailed
from prefill_node.scheduler import PrefillScheduler
from protos import convert, fleet_pb2, inference_pb2
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.layout import KVLayout
from serving_core.node.blocks import BlockAllocator, BlockLease
from serving_core.node.costs import StepCosts, StepLoad, StepRates
from serving_core.node.leases import Leases
from serving_core.node.requests import Key, NodeRequest, NodeRequests, RequestState, fit_all
from serving_core.node.tiers import TierIndex
from serving_core.requests import Guide, Request, SampledToken, Work, has_drafts, take_each, would_end
from serving_core.shapes import Shape, check_shape, role_of
from serving_node.admission import Admission, Arrivals
from serving_node.decisions import CompileGrammar, Decisions, LoadAdapter, SendHeartbeat, UnloadAdapter
from serving_node.distributed_kv.source import DistributedKV, Opened
from serving_node.kv_offload import NO_OFFLOAD, KVOffload, OffloadPlan
from serving_node.migration import Migrations
from serving_node.outputs import CacheReport, Outputs, StepCounts
from serving_node.peer_fetch import PeerFetch, PeerServe
from serving_node.sources import KVSource, StepSource
from serving_node.transfers import WAITING_FOR_OTHERS, Endings, IncomingTransfers, OutgoingTransfers, Transfers


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a node's scheduler. Times are in seconds."""

    max_num_batched_tokens: int  # in one step
    max_num_seqs: int  # running slots; at most max_num_batched_tokens
    max_num_queued: int  # queued prompts, and requests that wait for credit, each
    credit_timeout_s: float
    descriptor_timeout_s: float
    num_speculative_tokens: int = 0  # draft tokens for a sequence in a step
    draft_model: DraftModel | None = None  # writes the draft tokens; None: prompt lookup
    tile_tokens: int = 0  # granularity of distributed KV; 0: none


class NodeScheduler:
    """Decides for the requests of one node. Methods that change state leave what they decide in `decisions`."""

    def __init__(
        self,
        allocator: BlockAllocator,
        layout: KVLayout,
        limits: Limits,
        shape: Shape,
        *,
        block_bytes: int,
        fingerprint: Mapping[str, str],
        numerics: bytes,
        is_batch_invariant: bool,
        eos_token_ids: Sequence[int],
        rates: StepRates,
        costs: StepCosts,
        tier: OffloadPlan = NO_OFFLOAD,
    ) -> None:
        """Create the scheduler of a node with role `shape`.

        `block_bytes` is the size of one block over all ranks and layers. `numerics` and `is_batch_invariant` are passed
        to Leases.
        """
        self._allocator = allocator
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._rates, self._costs = rates, costs
        self._node_requests = node_requests = NodeRequests()
        self._leases = leases = Leases(allocator, layout, numerics, is_batch_invariant=is_batch_invariant)
        self.decisions = decisions = Decisions()
        self._endings = endings = Endings(node_requests, leases, decisions)
        self.distributed_kv = None
        if limits.tile_tokens:
            self.distributed_kv = DistributedKV(node_requests, leases, allocator, endings, limits.tile_tokens)
        fit = self.distributed_kv.fit if self.distributed_kv is not None else fit_all
        self._prefill = prefill = PrefillScheduler(
            node_requests, leases, costs, max_num_queued=limits.max_num_queued, fit=fit
        )
        offloaded = TierIndex(tier.num_host, tier.num_disk) if tier.num_host or tier.num_disk else None
        self.kv_offload: KVOffload | None = None
        if offloaded is not None:
            self.kv_offload = KVOffload(tier, offloaded, allocator, leases, prefill, costs, decisions, block_bytes)
        self._cache_report = CacheReport(allocator, offloaded, leases.numerics_ids, decisions.report)
        self._outputs = Outputs(node_requests, leases, endings, self._cache_report, eos_token_ids)
        preallocation = Preallocation(node_requests, leases, max_num_queued=limits.max_num_queued)
        self._arrivals = Arrivals(
            node_requests,
            prefill,
            preallocation,
            fingerprint,
            layout.block_size,
            holds_remote_kv=self.distributed_kv is not None,
        )
        self._transfers = transfers = Transfers()
        self._incoming = IncomingTransfers(
            node_requests,
            leases,
            prefill,
            preallocation,
            endings,
            transfers,
            block_bytes=block_bytes,
            credit_timeout_s=limits.credit_timeout_s,
            on_committed=self._cache_report.report,
        )
        self._outgoing = OutgoingTransfers(
            node_requests, leases, endings, transfers, descriptor_timeout_s=limits.descriptor_timeout_s
        )
        self._migrations = Migrations(node_requests, leases, endings, transfers, self._outgoing)
        self._preemption = preemption = Preemption(node_requests, leases, self._incoming.revoke)
        self._decode = DecodeScheduler(node_requests, leases, preemption, fit)
        num_drafted = limits.num_speculative_tokens if is_batch_invariant else 0
        self.speculation = Speculation(
            node_requests, leases, eos_token_ids, num_drafted, limits.max_num_batched_tokens, limits.draft_model
        )
        self._admission = Admission(
            node_requests, leases, prefill, preallocation, preemption, costs, limits.max_num_seqs
        )
        self._peer_serve = PeerServe(leases, self.kv_offload, decisions, transfers, fingerprint)
        peer_fetch = PeerFetch(leases, prefill, decisions, transfers, block_bytes)
        self._step_sources: list[StepSource] = []
        if self.distributed_kv is not None:
            self.distributed_kv.join(self._admission, preemption)
            self._step_sources.append(self.distributed_kv)
        offload = [self.kv_offload] if self.kv_offload is not None else []
        self._sources: list[KVSource] = [*offload, peer_fetch, self._peer_serve, *self._step_sources]
        self.steps = StepCounts()
        self.is_draining = False
        self._knows_limits = False  # whether any request had a deadline
        self._take(shape)
        self._home = shape

    # ---- state and decisions ----

    @property
    def shape(self) -> Shape:
        """Return the numbers of the current role: prompt tokens and running slots of a step.

        Any request is served in any role.
        """
        return self._shape

    @property
    def home(self) -> Shape:
        """Return the shape that an operator set, as a role or a shape; if none did, the initial one.

        Temporary role changes leave it as it is.
        """
        return self._home

    @property
    def node_requests(self) -> NodeRequests:
        """Return the requests on the node, oldest first. The caller must not change them."""
        return self._node_requests

    @property
    def leases(self) -> list[tuple[Key, BlockLease]]:
        """Return every lease of the pool's blocks, each with its holder.

        The holder is (request id, epoch), or a kind of holder and a number.
        """
        leases: list[tuple[Key, BlockLease]] = [
            (each.key, lease)
            for each in self._node_requests
            for lease in (each.lease, each.state_source)
            if lease is not None
        ]
        for source in self._sources:
            leases += [((source.kind, number), lease) for number, lease in source.held.items()]
        return leases

    def check_integrity(self) -> None:
        """Recount blocks, requests and KV offload slots from scratch. Raises AssertionError if the counts differ."""
        self._allocator.check_integrity()
        self._node_requests.check_integrity()
        for source in self._sources:
            source.check_integrity()

    @property
    def is_idle(self) -> bool:
        """Return whether the node holds no request and no distributed KV of other nodes."""
        return not len(self._node_requests) and all(source.is_idle for source in self._sources)

    @property
    def wake_at_s(self) -> float | None:
        """Return the time at which the next `tick` is due; None if nothing waits."""
        wakes = [source.wake_at_s for source in self._sources]
        if self._node_requests.count(*WAITING_FOR_OTHERS):
            wakes += [self._incoming.wake_at_s, self._outgoing.wake_at_s]
        return min((at_s for at_s in wakes if at_s is not None), default=None)

    def describe(self, load: inference_pb2.NodeLoad) -> None:
        """Set the fields of the node's load that the scheduler knows, and report changes of the prefix cache."""
        self._cache_report.report()
        self.fill(load)

    def fill(self, load: inference_pb2.NodeLoad) -> None:
        """Set the fields of the node's load that the scheduler knows, without any change of state."""
        load.role = role_of(self._shape)
        load.shape.CopyFrom(convert.shape_to_wire(self._shape))
        load.state = "draining" if self.is_draining else "ready"
        load.num_running = self._node_requests.count(
            RequestState.PREFILLING, RequestState.PREFILLED, RequestState.RUNNING, RequestState.FROZEN
        )
        load.num_waiting = len(self._node_requests) - load.num_running
        load.num_waiting_tokens = self._prefill.num_waiting_tokens
        load.num_blocks = self._allocator.num_blocks
        load.num_blocks_free = self._allocator.num_free
        load.num_blocks_cached = self._allocator.num_cached
        load.num_blocks_leaked = self._allocator.num_leaked([lease for _, lease in self.leases])
        load.step_tokens.extend(self.steps.tokens.counts)
        load.num_step_tokens = self.steps.num_prompt_tokens + self.steps.num_output_tokens
        load.num_preemptions = self._preemption.num_preemptions
        load.num_prompt_tokens = self._prefill.num_prompt_tokens
        load.num_cached_tokens = self._prefill.num_cached_tokens
        load.num_prefill_tokens = self.steps.num_prompt_tokens
        load.num_kv_bytes = self._transfers.num_kv_bytes
        load.num_transfers_failed = self._transfers.num_failed
        load.prefill_tokens_per_s = self._rates.prefill_tokens_per_s
        load.lone_step_s = self._rates.lone_step_s
        load.step_s = self._rates.decode_step_s or load.step_s
        for source in self._sources:
            source.fill(load)
        if self._knows_limits:
            load.step_weights.extend(self._costs.weights)
            load.decode_margin = self._prefill.chunk_budget.decode_margin

    # ---- commands ----

    def attached(self) -> None:
        """Report the whole prefix cache next time: the coordinator is new or has dropped what it knew of this node."""
        self._cache_report.forget()

    def detached(self) -> None:
        """End every request without a report: the coordinator is gone and has given up all attempts on this node."""
        for node_request in list(self._node_requests):
            self._end(node_request)
        for source in self._sources:
            source.detached()

    def handle(self, command: fleet_pb2.NodeCommand, now: float) -> None:
        """Carry out a command of the coordinator at time `now`. Unknown commands are reported as failed."""
        match command.WhichOneof("command"):
            case "prefill":
                self._take_in(command.prefill.job, now)
            case "reserve":
                self._take_in(command.reserve.job, now, command.reserve)
            case "deliver":
                self._outgoing.deliver(command.deliver)
            case "migrate":
                self._migrations.migrate(command.migrate)
            case "keep":
                self._migrations.keep(command.keep)
            case "send_prefix":
                self._peer_serve.send_prefix(command.send_prefix, self._admission.num_blocks_wanted(), now)
            case "begun":
                self._begun(command.begun.attempt, now)
            case "cancel":
                self._cancel(command.cancel.attempt)
            case _:
                self._handle_own(command)
        self._admit()

    def _handle_own(self, command: fleet_pb2.NodeCommand) -> None:
        """Carry out a command about the node instead of a request."""
        match command.WhichOneof("command"):
            case "reshape":
                self._reshape(command)
            case "load_adapter":
                self.decisions.add(LoadAdapter(command.load_adapter.name, command.load_adapter.folder))
            case "unload_adapter":
                self._unload_adapter(command.unload_adapter.name)
            case other:
                message = f"the node does not know the command {other or 'that it was sent'}"
                self.refuse(command.attempt, RequestError(reasons.PAIRING_MISMATCH, message))

    def _reshape(self, command: fleet_pb2.NodeCommand) -> None:
        limits, shape = self._limits, convert.shape_from_wire(command.reshape.shape)
        try:
            check_shape(shape, max_num_batched_tokens=limits.max_num_batched_tokens, max_num_seqs=limits.max_num_seqs)
        except RequestError as error:
            self.refuse(command.attempt, error)
        else:
            self._take(shape)
            if not command.reshape.is_temporary:
                self._home = shape
        self.decisions.add(SendHeartbeat())

    def _unload_adapter(self, name: str) -> None:
        """Unload an adapter, unless requests use it: the coordinator orders it again."""
        if num := sum(each.request.adapter == name for each in self._node_requests):
            error = f"{num} requests use the adapter"
            self.decisions.report(adapter_changed=fleet_pb2.AdapterChanged(name=name, error=error))
        else:
            self.decisions.add(UnloadAdapter(name))

    def _take(self, shape: Shape) -> None:
        """Set the role. A role without running slots or prompt tokens still serves with the node's own limits."""
        self._shape = shape
        self._admission.num_slots = shape.slots or self._limits.max_num_seqs

    def _take_in(self, job: fleet_pb2.Job, now: float, reserve: fleet_pb2.Reserve | None = None) -> None:
        try:
            self._knows_limits |= job.HasField("due")
            node_request = self._arrivals.take_in(job, now, reserve)
        except RequestError as error:
            self.refuse(job.attempt, error)
        else:
            if node_request.is_compiling:
                self.decisions.add(CompileGrammar(node_request.request, job.asker))

    def compiled(self, request: Request, result: Guide | RequestError) -> None:
        """Record the end of a `CompileGrammar`: the request may start with its guide, or fails with the error.

        A request that has ended meanwhile is ignored.
        """
        node_request = self._node_requests.find(request)
        if node_request is None:
            return
        if isinstance(result, RequestError):
            self._endings.fail(node_request, result.reason, str(result))
        else:
            request.guide = result
        self._admit()

    def _begun(self, attempt: fleet_pb2.Attempt, now: float) -> None:
        """Note that another node has reported the first token of a request that decodes here."""
        node_request = self._node_requests.find(attempt)
        if node_request is not None:
            node_request.has_first_token = True
            node_request.note_first_token(now)

    def _cancel(self, attempt: fleet_pb2.Attempt) -> None:
        """Cancel an attempt. Every cancel is acknowledged, for an unknown attempt at once."""
        cancelled = fleet_pb2.Cancelled(attempt=attempt)
        node_request = self._node_requests.find(attempt)
        if node_request is None:
            if not any(source.cancel_fetch(attempt) for source in self._sources):
                self.decisions.report(cancelled=cancelled)
            return
        if node_request.ending == {}:  # the ending would report nothing
            node_request.ending = {"cancelled": cancelled}
        self._end(node_request, cancelled=cancelled)

    def _end(self, node_request: NodeRequest, **event: Any) -> None:
        for source in self._sources:
            source.cancel(node_request)
        self._endings.end(node_request, **event)

    # ---- steps ----

    def plan(self, now: float) -> list[Work]:
        """Return the next step: the next token of each running sequence, then chunks of prompts; perhaps empty.

        The caller must call `step_done` or `step_failed` afterwards.
        """
        for source in self._step_sources:
            source.before_step()
        works = self._plan(now)
        while self._refuse_hopeless() or (not works and self._unblock()):
            self._admit()
            works = works or self._plan(now)
        for index, (node_request, work) in enumerate(zip(self._node_requests.of_each(works), works, strict=True)):
            node_request.num_in_step = 1 + len(work.draft_tokens)
            if self._leases.is_checkpoint_due(node_request, work.start):
                works[index] = self._leases.take_checkpoint(node_request, work)
            if not node_request.has_first_token and node_request.prefill_began_s is None:
                node_request.prefill_began_s = now
        return works

    def _refuse_hopeless(self) -> bool:
        """Fail the prompts that the last plan left out because they would be late. Return whether there were any."""
        refused = self._prefill.take_hopeless()
        for node_request in refused:
            self._endings.fail(node_request, reasons.WOULD_BE_LATE, "the prompt cannot be read before its deadline")
        return bool(refused)

    def _unblock(self) -> bool:
        """Return whether a node that has nothing to compute may have something now."""
        if self._admission.start_kept() or self._admission.preempt_for_older():
            return True
        return any(source.unblock() for source in self._step_sources)

    def plan_next(self, works: Sequence[Work]) -> list[Work]:
        """Return the step behind a planned decode step, as `plan` would if no sequence ended and no event came.

        The list is empty if other requests might be part of that step. Its token ids are not known yet.
        """
        if self.speculation.is_on and self.speculation.may_extend(len(works)):
            return []
        return next_step(works, self._node_requests, self._leases)

    def ends_any(self, works: Sequence[Work], tokens: Sequence[SampledToken]) -> bool:
        """Return whether the results of a step, one for each of `works`, end any sequence.

        A result that is no token ends it too; stop strings are not considered. The method only reads requests, so
        another thread may call it while the step runs.
        """
        for work, token in zip(works, tokens, strict=True):
            if would_end(work.request, token, self._eos_token_ids):
                return True
        return False

    def _plan(self, now: float) -> list[Work]:
        works = self._decode.plan()
        running = self._node_requests.of_each(works)
        num_left = self._limits.max_num_batched_tokens - sum([work.num_tokens for work in works])
        is_full = not num_left and self._prefill.oldest_age < running[-1].age
        budget = 1 if is_full else min(self._shape.prompt_tokens or num_left, num_left)
        may_start = self._admission.start_rule(
            lambda node_request, num_spare: self._must_wait(node_request, num_spare, now)
        )
        chunks = self._prefill.plan(budget, may_start, self._start, running, now)
        if is_full and chunks:
            works.pop()  # an older prompt must not wait for ever-changing sequences
        works += chunks
        self._outgoing.note_prefilled(self._node_requests.in_state(RequestState.PREFILLING), now)
        return self.speculation.extend(works) if self.speculation.is_on else works

    def _must_wait(self, node_request: NodeRequest, num_spare: int, now: float) -> bool:
        """Return whether a prompt waits for its grammar, or for blocks from KV offload or from another node.

        Requests with distributed KV have no block hashes to look up.
        """
        if node_request.is_compiling:
            return True
        if node_request.distributed is not None:
            return False
        return any(source.must_wait(node_request, num_spare, now) for source in self._sources)

    def _start(self, node_request: NodeRequest) -> bool:
        if not self._admission.start(node_request):
            return False
        for source in self._sources:
            source.started(node_request)
        return True

    def expected_step_s(self, works: Sequence[Work]) -> float:
        """Return the expected seconds of a running step from earlier steps; inf without a comparable step."""
        return self._costs.expected_s(_load_of([self._node_requests.of(work.request) for work in works], works))

    def sends_while(self, works: Sequence[Work]) -> list[Work]:
        """Return the parts of a step that belong to requests which another node decodes.

        Their blocks may be sent while the step computes.
        """
        if not self._node_requests.count(RequestState.PREFILLING):
            return []  # as in most steps
        return [work for work in works if self._node_requests.of(work.request).is_outgoing]

    def step_done(
        self,
        works: Sequence[Work],
        tokens: Sequence[SampledToken],
        step_s: float,
        now: float,
        *,
        goes_on: bool = False,
    ) -> None:
        """Record a finished step, which gave these tokens for `works` and took `step_s` seconds.

        Tokens are reported, ended requests end, and full blocks enter the prefix cache. `goes_on` means that the step
        ended no sequence and the step planned ahead already runs, as if `plan` had returned it.
        """
        node_requests = self._node_requests.of_each(works)
        given = take_each(works, tokens)
        if self.distributed_kv is not None:
            given = [[] if work.request.remote_kv_error else taken for work, taken in zip(works, given, strict=True)]
        self._count_step(node_requests, works, list(map(len, given)), step_s, now)
        for node_request, work in zip(node_requests, works, strict=True):
            node_request.num_in_step = 1 if goes_on else 0
            node_request.num_computed += work.num_tokens
        odd = [token for token in tokens if token.error is not None or token.embedding]
        taken_by = list(zip(node_requests, given, strict=True))
        # A failed part publishes no blocks.
        good = [each for each, taken in taken_by if not (taken and taken[-1].error)] if odd else node_requests
        self._leases.publish_all(good)
        step_tokens = fleet_pb2.StepTokens(step_s=step_s)
        ended = self._outputs.take(node_requests, works, given, step_tokens, now)
        if step_tokens.tokens or step_tokens.epochs:
            self.decisions.report(step_tokens=step_tokens)
        if outgoing := [each for each in node_requests if each.outgoing is not None]:
            self._outgoing.note_prefilled(outgoing, now)
        self._report_progress(node_requests, now)
        for node_request in ended:
            self._endings.end(node_request)
        for source in self._step_sources:
            source.after_step(node_requests, step_s, now)
        for node_request, taken in taken_by if outgoing or odd else ():
            if taken and (taken[-1].embedding or taken[-1].error is not None):
                self._outputs.end_without_token(node_request, taken[-1], now)
            elif taken and node_request.migration is not None:
                self._migrations.note_decoded(node_request)
        self._settle_step(node_requests)

    def _report_progress(self, node_requests: Sequence[NodeRequest], now: float) -> None:
        """Report prompts of which a step has computed a part: that the prefill has begun, and with a deadline, by which
        the coordinator plans, each time how many tokens are left.
        """
        if not self._node_requests.count(RequestState.PREFILLING):
            return  # as in most steps
        for each in node_requests:
            if each.state is not RequestState.PREFILLING or (each.due is None and each.has_reported_progress):
                continue
            if each.num_to_compute and not each.is_ending and each.prefill_began_s is not None:
                attempt, prefill_s = convert.attempt_of(each.request), now - each.prefill_began_s
                progress = fleet_pb2.Progress(attempt=attempt, num_left=each.num_to_compute, prefill_s=prefill_s)
                self.decisions.report(progress=progress)
                each.has_reported_progress = True

    def _count_step(
        self,
        node_requests: Sequence[NodeRequest],
        works: Sequence[Work],
        nums_given: Sequence[int],
        step_s: float,
        now: float,
    ) -> None:
        """Count a finished step. Steps with draft tokens are left out of the cost measurements."""
        load = _load_of(node_requests, works)
        has_draft_tokens = has_drafts(works)
        if not has_draft_tokens:
            self._rates.add(load.num_prompt_tokens, load.num_sequences, step_s)
            self._prefill.chunk_budget.record_step(load, step_s, now)
        if self.speculation.is_on and not load.num_prompt_tokens:
            self.speculation.record_step(works, nums_given, step_s)
        num_more = sum(nums_given) - len(works) if has_draft_tokens else 0
        self.steps.add(load, step_s, num_more)

    def step_failed(self, works: Sequence[Work], cause: str) -> None:
        """Fail all requests of a step that gave nothing. `cause` is visible to clients."""
        node_requests = [self._node_requests.of(work.request) for work in works]
        for node_request in node_requests:
            node_request.num_in_step = 0
            self._endings.fail(node_request, reasons.STEP_FAILED, cause)
        self._settle_step(node_requests)

    def _settle_step(self, node_requests: Sequence[NodeRequest]) -> None:
        for node_request in node_requests:
            if node_request.ending is not None:
                self._endings.settle(node_request)
        self._admit()

    # ---- transfers ----

    def credited(self, epoch: int, descriptor: bytes) -> None:
        """Record that every rank is ready for a `Receive` or `FetchPrefix`, and report its descriptor."""
        self._transfers.credited(epoch, descriptor)

    def receiving(self, epoch: int) -> None:
        """Record that the first blocks of a `Receive` or `FetchPrefix` arrive."""
        self._transfers.receiving(epoch)

    def received(self, epoch: int, result: Received | TransferFailed, now: float) -> None:
        """Record the end of a `Receive` or `FetchPrefix`: its request continues, or fails or waits again."""
        self._transfers.received(epoch, result, now)
        self._admit()

    def caught_up(self, epoch: int) -> None:
        """Record that all ready blocks of a `Send` have left; a migrating sequence may freeze."""
        self._transfers.caught_up(epoch)

    def sent(self, epoch: int, result: Sent | TransferFailed, now: float) -> None:
        """Record that the `Send` with this epoch has ended with this result, and report it to the coordinator.

        A prompt that is sent ends its request here. A revoked one waits for its next descriptor, or is sent to it.
        """
        self._transfers.sent(epoch, result, now)
        self._admit()

    # ---- KV outside the pool, for a node with KV offload or distributed KV ----

    def loaded(self, load_id: int, num_good: int, now: float) -> None:
        """Record the end of a `Load`: its leading `num_good` blocks are loaded on every rank.

        They enter the prefix cache, and the prompt that waits for them may start. Requires KV offload.
        """
        assert self.kv_offload is not None
        self.kv_offload.loaded(load_id, num_good, now)
        self._admit()

    def lost(self, slots: Sequence[int]) -> None:
        """Record that these KV offload slots hold nothing, because an `Offload` could not copy blocks to them."""
        assert self.kv_offload is not None
        self.kv_offload.lost(slots)

    def opened(self, node_request: NodeRequest, remote_kv: Opened | None, now: float) -> None:
        """Record the end of an `OpenRemoteKV`; on success the blocks of the sent tiles are freed here.

        `remote_kv` is None if no KV holder had room.
        """
        assert self.distributed_kv is not None
        self.distributed_kv.opened(node_request, remote_kv, now)
        self._admit()

    def lease_remote_kv(self, number: int, most_tiles: int, tile_request: TileRequest, now: float) -> list[int]:
        """Lease blocks for at most `most_tiles` tiles of another node's request; return them, perhaps none.

        `number` is that of the connection. A request that asks again and gets none has blocks reserved for it.
        """
        if self.is_draining or self.distributed_kv is None:
            return []
        block_ids = self.distributed_kv.lease_remote_kv(number, most_tiles, tile_request, now)
        self._admit()
        return block_ids

    def release_remote_kv(self, number: int) -> None:
        """Free the blocks that connection `number` of another node has. Requires distributed KV."""
        assert self.distributed_kv is not None
        self.distributed_kv.held_kv.release(number)
        self._admit()

    # ---- time ----

    def tick(self, now: float) -> None:
        """End waits that have passed their deadline."""
        self._incoming.tick(now)
        self._outgoing.tick(now)
        for source in self._sources:
            source.tick(now)
        self._admit()

    def _admit(self) -> None:
        """Let requests have the running slots and blocks that are free."""
        for node_request in self._admission.admit():
            self._incoming.receive(node_request)

    def refuse(self, attempt: fleet_pb2.Attempt, error: RequestError) -> None:
        """Report to the coordinator that an attempt failed with this error, without adding its request."""
        self.decisions.report(failed=fleet_pb2.Failed(attempt=attempt, reason=error.reason, message=str(error)))


def _load_of(node_requests: Sequence[NodeRequest], works: Sequence[Work]) -> StepLoad:
    """Return the load of a step with these requests and their scheduled tokens."""
    running = [
        work.start
        for node_request, work in zip(node_requests, works, strict=True)
        if node_request.state is RequestState.RUNNING
    ]
    load = StepLoad(len(running), sum(running))
    if len(running) < len(works):
        for node_request, work in zip(node_requests, works, strict=True):
            if node_request.state is not RequestState.RUNNING:
                load.add_chunk(work.start, work.num_tokens)
    return load
