"""A node's worker driven by hand: commands, steps, ends of transfers and the time go in, and what it decides is kept.

The KV is that of tests/toy_kv.py, so a step that reads a wrong block fails, and every token can be worked out on paper
(`answer_of`). After everything that happens the pool is counted from scratch.
"""

from dataclasses import dataclass, replace

from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.results import Received, Sent, TransferFailed
from protos import convert, fleet_pb2, inference_pb2
from serving_core.layout import KVLayout
from serving_core.node.blocks import BlockAllocator
from serving_core.node.costs import StepCosts, StepRates
from serving_core.node.prefix import hint_of
from serving_core.node.requests import RequestState
from serving_core.requests import NO_TOKEN, Request, SampledToken, SamplingParams
from serving_core.shapes import preset
from serving_node.decisions import (
    CancelLoad,
    CancelTransfer,
    CompileGrammar,
    FetchPrefix,
    FinishSend,
    Load,
    Offload,
    Receive,
    Send,
    SendMore,
)
from serving_node.kv_offload import NO_OFFLOAD
from serving_node.scheduler import Limits, NodeScheduler
from serving_node.worker import Worker
from tests import fleet_events as events
from tests.toy_kv import FINGERPRINT, HERE, NUM_TOKEN_IDS, ToyKV, answer_of

BLOCK_SIZE = 4
BLOCK_BYTES = 100
LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, block_size=BLOCK_SIZE, dtype="float32")
STEP_S = 0.5
NEVER = NUM_TOKEN_IDS  # a token that the toy never says
EMBEDDING = b"of any prompt..."


def prompt_of(length, first=0):
    """Tokens in which no two places look alike for long."""
    return [(place * place + place // 3 + first) % NUM_TOKEN_IDS for place in range(length)]


@dataclass
class Opened:
    """Blocks that another node may write to."""

    request: Request
    block_ids: list[int]
    num_cached: int
    descriptor: bytes


class Ports:
    """Clock and engine of a worker for which nothing happens by itself: tests begin steps and let the time pass."""

    now = step_age_s = 0.0

    def time(self):
        return self.now

    def wake_at(self, moment_s):
        pass

    def wake(self):
        pass

    def measured_load(self):
        return inference_pb2.NodeLoad()


@dataclass
class Outgoing:
    """What has been said of one that is sent."""

    descriptor: bytes
    block_ids: list[int]
    is_finished: bool = False
    tail: bytes = b""


class Node(Ports):
    """One node, its clock and its pool."""

    def __init__(
        self,
        num_blocks=16,
        *,
        budget=64,
        slots=8,
        role="mixed",
        max_num_queued=100,
        caching=True,
        credit_timeout_s=30.0,
        descriptor_timeout_s=60.0,
        name="",
        numerics=HERE,
        is_batch_invariant=False,
        costs=None,
        draft_tokens=0,
        draft_model=None,
        tier=NO_OFFLOAD,
        eos_token_id=NEVER,
        tile_tokens=0,
    ):
        self.name = name
        self.numerics = numerics
        self.allocator = BlockAllocator(num_blocks, caching=caching)
        self.rates = StepRates()
        self.kv = ToyKV(num_blocks, BLOCK_SIZE, numerics, is_batch_invariant=is_batch_invariant)
        self.budget = budget
        self.scheduler = NodeScheduler(
            self.allocator,
            LAYOUT,
            Limits(
                budget,
                slots,
                max_num_queued,
                credit_timeout_s,
                descriptor_timeout_s,
                draft_tokens,
                draft_model,
                tile_tokens,
            ),
            preset(role, max_num_batched_tokens=budget, max_num_seqs=slots),
            block_bytes=BLOCK_BYTES,
            fingerprint=FINGERPRINT,
            numerics=numerics,
            is_batch_invariant=is_batch_invariant,
            eos_token_ids=(eos_token_id,),
            rates=self.rates,
            costs=costs or StepCosts(),
            tier=tier,
        )
        self.worker = worker = Worker(self.scheduler, self, self)
        worker.engine = worker.transfers = worker.grammars = worker.offload = self
        self.compiling = []  # requests whose grammar is compiled
        self.tier_kv = {}  # what each slot of the KV offload holds
        self.tier_names = {}  # by slot: what the pool called what was copied there
        self.tells_lost = True  # of what could not be copied
        self._evicted = {}  # by block: its name when the pool gave it up last
        self._note_evictions()
        self.most_offloaded = num_blocks  # blocks that are copied at once
        self.loads = {}  # that have begun
        self.num_loads = 0
        self.loads_at_once = True
        self.now = 0.0
        self.events = []
        self._request_ids = {}  # by epoch
        self.opened = {}  # by epoch
        self.sending = {}
        self.prefix_fetch_begun = {}
        self.cancelled = []  # epochs of transfers that are to end
        self.works = []  # of the step that runs
        self.hints = set()  # blocks that the coordinator believes to be here
        self.numerics_ids = set()  # of all blocks that requests ever had
        self.credits_at_once = True
        self.num_heartbeats = 0
        self.sampled = []  # tokens of the step that runs
        self._num_requests = 0

    # ---- commands ----

    def prefill(self, name, prompt, **job):
        """A prompt to be read here and answered elsewhere."""
        request, wire = self._job(name, prompt, **job)
        self.handle(prefill=fleet_pb2.Prefill(job=wire))
        return request

    def reserve(self, name, prompt, *, tp_size=1, ahead=0, is_whole=False, **job):
        """An answer to be written here to a prompt that is read elsewhere; or to be written on, with so many tokens
        ahead."""
        request, wire = self._job(name, prompt, **job)
        sizes = {"prefill_tp_size": tp_size, "num_tokens_ahead": ahead}
        self.handle(reserve=fleet_pb2.Reserve(job=wire, is_whole=is_whole, **sizes))
        return request

    def local(self, name, prompt, **job):
        """A prompt to be read and answered here."""
        request, wire = self._job(name, prompt, **job)
        self.handle(reserve=fleet_pb2.Reserve(job=wire, local_prefill=True))
        return request

    def deliver(self, request, descriptor=b"descriptor"):
        self.handle(deliver=fleet_pb2.Deliver(attempt=convert.attempt_of(request), descriptor=descriptor))

    def begun(self, request):
        """Another node has read it, and given the first token."""
        self.handle(begun=fleet_pb2.Begun(attempt=convert.attempt_of(request)))

    def migrate(self, request, num_blocks=16, num_known=None, descriptor=None, **beginning):
        """The answer is to go on where so many blocks are granted, and so many tokens known: by default its prompt."""
        if descriptor is None:
            num_known = request.num_prompt_tokens if num_known is None else num_known
            descriptor = a_descriptor(num_blocks, num_tokens=num_known, **beginning)
        self.handle(migrate=fleet_pb2.Migrate(attempt=convert.attempt_of(request), descriptor=descriptor))

    def keep(self, request):
        self.handle(keep=fleet_pb2.Keep(attempt=convert.attempt_of(request)))

    def cancel(self, request):
        self.handle(cancel=fleet_pb2.Cancel(attempt=convert.attempt_of(request)))

    def handle(self, **command):
        for body in command.values():
            if hasattr(body, "job"):
                self._request_ids[body.job.attempt.epoch] = body.job.attempt.request_id
        self.worker.handle(fleet_pb2.NodeCommand(**command))
        self.check()

    def reshape(self, prompt_tokens, slots, accepts_transfers=False, is_temporary=False):
        shape = inference_pb2.Shape(prompt_tokens=prompt_tokens, slots=slots, accepts_transfers=accepts_transfers)
        self.handle(reshape=fleet_pb2.Reshape(shape=shape, is_temporary=is_temporary))

    def detached(self):
        self.worker.detached()
        self.check()

    def _job(
        self,
        name,
        prompt,
        *,
        salt=None,
        age=None,
        epoch=None,
        num_prompt_tokens=None,
        max_tokens=4,
        due=None,
        priority=0,
        adapter="",
        pooling=None,
        fetch_prefix=None,
        **sampling,
    ):
        """All begin alike, and have nothing to share unless they are given the same salt."""
        prompt = prompt_of(prompt) if isinstance(prompt, int) else list(prompt)
        self._num_requests += 1
        request = Request(
            name,
            self._num_requests if epoch is None else epoch,
            prompt,
            num_prompt_tokens or len(prompt),
            SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **sampling}),
            name if salt is None else salt,
            adapter=adapter,
            pooling=pooling,
        )
        wire = convert.job_to_wire(request, self._num_requests if age is None else age, due, priority)
        if fetch_prefix is not None:
            wire.fetch_prefix.CopyFrom(fetch_prefix)
        return request, wire

    # ---- steps ----

    def begin(self):
        """Plans a step, which then runs; gives its shares."""
        assert not self.works, "a step is running"
        num_loads = self.num_loads
        self.works = self.worker.plan()
        self.worker.carry_out()
        if not self.works and self.loads_at_once and self.num_loads > num_loads:
            return self.begin()  # what was waited for is there
        assert sum(work.num_tokens + len(work.draft_tokens) for work in self.works) <= self.budget
        assert all(work.num_tokens > 0 for work in self.works)
        assert len({work.request.request_id for work in self.works}) == len(self.works)
        shares = [(work.request.request_id, work.start, work.num_tokens) for work in self.works]
        writing = [
            node_request.request
            for node_request in self.scheduler.node_requests
            if node_request.state is RequestState.RUNNING
        ]
        self.sampled = self.kv.step(self.works, writing)
        self.check()
        return shares

    def end(self):
        """The step that runs is done."""
        works, self.works = self.works, []
        if not works:
            return
        self.kv.verify(works)
        self.now += STEP_S
        given = [SampledToken(token_id) for token_id in self.sampled]
        if any(work.request.pooling for work in works):
            sampling = [work.request for work in works if work.samples]
            embedding = SampledToken(NO_TOKEN, embedding=EMBEDDING)
            given = [embedding if each.pooling else token for each, token in zip(sampling, given, strict=True)]
        self.worker.step_done(works, given, STEP_S)
        self.settle()

    def fail_step(self):
        """The step that runs gives nothing."""
        works, self.works = self.works, []
        for work in works:
            self.kv.spoil(work.block_ids, range(work.start, work.start + work.num_tokens + len(work.draft_tokens)))
        self.now += STEP_S
        self.worker.step_failed(works, "the cause")
        self.settle()

    def step(self):
        shares = self.begin()
        self.end()
        return shares

    def steps(self, most=200):
        """Steps until there is nothing to compute; gives the shares of all."""
        shares = []
        while share := self.step():
            shares.append(share)
            assert len(shares) <= most, "it computes without end"
        return shares

    def compiled(self, result):
        """The grammar of the first request that waits for one is compiled, or refused."""
        self.worker.compiled(self.compiling.pop(0), result)
        self.check()

    # ---- transfers ----

    def grant(self, request):
        """Every rank awaits the blocks."""
        self.worker.credited(request.epoch, self.opened[request.epoch].descriptor)
        self.check()

    def arrive(self, request, tail=None, num_tokens=1, num_bytes=None):
        """All KV is here, and with it the tokens that follow those that were known."""
        opened = self.opened.pop(request.epoch)
        known = request.token_ids + answer_of(request.token_ids, num_tokens)
        numerics_ids = self.kv.receive(replace(request, token_ids=known[:-1]), opened.block_ids, opened.num_cached)
        if tail is None:
            tail = convert.to_tail(known[len(request.token_ids) :], numerics_ids)
        if num_bytes is None:
            num_bytes = (len(opened.block_ids) - opened.num_cached) * BLOCK_BYTES
        self.worker.received(request.epoch, Received(tail, num_bytes))
        self.check()

    def receive_fails(self, request, reason="TRANSFER_FAILED", message="lost on the way"):
        del self.opened[request.epoch]
        self.worker.received(request.epoch, TransferFailed(reason, message))
        self.check()

    def coming(self, request):
        """The first of its KV is here."""
        self.worker.receiving(request.epoch)
        self.settle()

    def caught_up(self, request):
        """What was ready of it has left."""
        self.worker.caught_up(request.epoch)
        self.check()

    def sent(self, request, num_bytes=0):
        """The other node has all of it."""
        assert self.sending.pop(request.epoch).is_finished
        self.worker.sent(request.epoch, Sent(num_bytes))
        self.check()

    def send_fails(self, request, reason="TRANSFER_FAILED", message="lost on the way"):
        del self.sending[request.epoch]
        self.worker.sent(request.epoch, TransferFailed(reason, message))
        self.check()

    def writes(self, name, prompt, **job):
        """One whose KV has come, and which is being written now."""
        request = self.reserve(name, prompt, **job)
        assert request.epoch in self.opened, "it got no credit"
        self.arrive(request)
        return request

    def has_read(self, name, prompt, **job):
        """One that is read for another node, and waits for its descriptor."""
        request = self.prefill(name, prompt, **job)
        while self.begin():
            self.end()
        assert self.words(name) == ["first_token"]
        return request

    # ---- time ----

    def tick(self, now):
        self.now = now
        self.worker.tick()
        self.check()

    # ---- what it tells ----

    def words(self, name):
        """The kinds of what was told of a request, in order, but for the progress of its prefill."""
        return [kind for kind, _ in self._of(name)]

    def progress(self, name):
        """The tokens left and the time of its prefill, each time that they were reported."""
        reports = [event.progress for event in self.events if event.WhichOneof("event") == "progress"]
        return [(each.num_left, round(each.prefill_s, 6)) for each in reports if _names(each, name)]

    def tokens(self, name):
        """The tokens that were told of a request. Their places in the answer are checked."""
        told = [token for _, token in self._of(name) if token is not None]
        first = told[0].index if told else 0
        assert [token.index for token in told] == list(range(first, first + len(told)))
        return [token.token_id for token in told]

    def finish_reasons(self, name):
        return [token.finish_reason for _, token in self._of(name) if token is not None]

    def event(self, name, kind):
        """The one event of this kind that was told of a request."""
        (event,) = [getattr(event, kind) for event in self.events if _names(getattr(event, kind), name)]
        return event

    def descriptors(self, name):
        return [event.reserved.descriptor for event in self.events if _names(event.reserved, name)]

    def _of(self, name):
        story = []
        for event in self.events:
            kind = event.WhichOneof("event")
            if kind == "step_tokens":
                story += [(kind, token) for token in event.step_tokens.tokens if _names(token, name)]
            elif kind not in ("cache_changed", "progress") and _names(getattr(event, kind), name):
                story.append((kind, event.first_token.token if kind == "first_token" else None))
        return story

    @property
    def load(self):
        load = inference_pb2.NodeLoad()
        self.scheduler.describe(load)
        self.settle()
        return load

    @property
    def num_free(self):
        return self.allocator.num_free

    # ---- the worker's other ports: link, transfers, grammars and KV offload ----

    def send(self, **event):
        if "heartbeat" in event:
            self.num_heartbeats += 1
        else:
            self._hear(fleet_pb2.NodeEvent(**event))

    def settle(self):
        self.worker.carry_out()
        self.check()

    def carry_out(self, decision):
        match decision:
            case Receive(node_request=node_request, num_blocks=num_blocks):
                self._open(node_request, num_blocks)
            case Send(epoch=epoch, descriptor=descriptor, block_ids=block_ids):
                assert epoch not in self.sending, "it is being sent already"
                self.sending[epoch] = Outgoing(descriptor, list(block_ids))
            case SendMore(epoch=epoch, block_ids=block_ids):
                sending = self.sending[epoch]
                assert not sending.is_finished
                assert block_ids[: len(sending.block_ids)] == sending.block_ids
                sending.block_ids = list(block_ids)
            case FinishSend(epoch=epoch, block_ids=block_ids, tail=tail):
                sending = self.sending[epoch]
                assert not sending.is_finished
                assert block_ids[: len(sending.block_ids)] == sending.block_ids
                sending.block_ids, sending.is_finished, sending.tail = list(block_ids), True, tail
            case FetchPrefix(offer=offer):
                self._open_to_lender(offer.epoch, decision)
            case CancelTransfer(epoch=epoch):
                self.cancelled.append(epoch)
            case CompileGrammar(request=request):
                self.compiling.append(request)
            case Offload() | Load() | CancelLoad():
                self._do_in_tier(decision)

    def _hear(self, event):
        if event.HasField("step_tokens"):
            event.step_tokens.CopyFrom(events.all_tokens(event.step_tokens, self._request_ids))
        self.events.append(event)
        if event.HasField("cache_changed"):
            self.hints -= set(event.cache_changed.removed)
            self.hints |= set(event.cache_changed.stored)

    def _open(self, node_request, num_blocks):
        epoch = node_request.request.epoch
        assert epoch not in self.opened, "it is being received already"
        block_ids, num_cached = list(node_request.lease.block_ids[:num_blocks]), node_request.num_cached_blocks
        sizes = {"num_cached": num_cached, "num_tokens": len(node_request.request.token_ids)}
        descriptor = a_descriptor(num_blocks, behind=node_request.behind, **sizes)
        self.opened[epoch] = Opened(node_request.request, block_ids, num_cached, descriptor)
        self.kv.spoil(block_ids, range(num_cached * BLOCK_SIZE, num_blocks * BLOCK_SIZE))  # it may begin to arrive
        if self.credits_at_once:
            self.worker.credited(epoch, descriptor)

    def _open_to_lender(self, epoch, fetch_prefix):
        self.prefix_fetch_begun[epoch] = fetch_prefix
        num_blocks = len(fetch_prefix.block_ids)
        self.kv.spoil(fetch_prefix.block_ids, range(fetch_prefix.num_cached * BLOCK_SIZE, num_blocks * BLOCK_SIZE))
        descriptor = a_descriptor(
            num_blocks, num_cached=fetch_prefix.num_cached, num_tokens=num_blocks * BLOCK_SIZE, epoch=epoch
        )
        self.worker.credited(epoch, descriptor)

    def _do_in_tier(self, decision):
        match decision:
            case Offload(copies=copies):
                self._offload(copies)
            case Load(load_id=load_id):
                self.loads[load_id] = decision
                self.num_loads += 1
                if self.loads_at_once:
                    self.load_ends(load_id)
            case CancelLoad(load_id=load_id):
                del self.loads[load_id]

    def _offload(self, copies):
        for source, target in copies.demotions:
            self.tier_kv[target] = self.tier_kv.get(source)
            self.tier_names[target] = self.tier_names.pop(source)
        num_lost = max(0, len(copies.slots) - self.most_offloaded)
        for index, (block_id, slot) in enumerate(zip(copies.block_ids, copies.slots, strict=True)):
            self.tier_kv[slot] = None if index < num_lost else self.kv.content(block_id)
            self.tier_names[slot] = self._evicted[block_id]
        if self.tells_lost:
            lost = [slot for slot in self.tier_kv if self.tier_kv[slot] is None]
            self.scheduler.lost(lost)
            self._forget(lost)

    def _forget(self, slots):
        """Nothing is in these slots any more, but for those that are being read."""
        for slot in slots:
            if not any(slot in load.slots for load in self.loads.values()):
                self.tier_names.pop(slot, None)

    def load_ends(self, load_id, num_good=None):
        """The leading blocks of a load are there: all that it can find, unless it is said how many."""
        load = self.loads.pop(load_id)
        num_held = next((at for at, slot in enumerate(load.slots) if self.tier_kv[slot] is None), len(load.slots))
        num_good = num_held if num_good is None else min(num_held, num_good)
        for slot, block_id in list(zip(load.slots, load.block_ids, strict=True))[:num_good]:
            self.kv.put(block_id, self.tier_kv[slot])
        self.kv.spoil_blocks(load.block_ids[num_good:])
        self._forget(load.slots[num_good:])
        self.worker.loaded(load_id, num_good)
        self.check()

    def _note_evictions(self):
        put = self.allocator.on_evict

        def note(name, block_id):
            self._evicted[block_id] = name
            put(name, block_id)

        self.allocator.on_evict = put and note

    # ---- proof ----

    def check(self):
        self.scheduler.check_integrity()
        self.kv.check_names(self.allocator)
        for node_request in self.scheduler.node_requests:
            if node_request.lease is not None:
                names, block_ids = node_request.names, node_request.lease.block_ids
                self.numerics_ids.update(names.numerics_ids)
                self.kv.check_table(node_request.request, block_ids, names.names, names.numerics_ids, self.allocator)

    def check_empty(self):
        """Nothing is here any more, and the coordinator knows what is left."""
        assert self.scheduler.is_idle
        assert not self.opened
        assert not self.sending
        assert not self.prefix_fetch_begun
        assert self.num_free == self.allocator.num_blocks
        assert self.scheduler.wake_at_s is None
        load = self.load
        assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 0, 0)
        assert not self.loads
        held = {hint_of(name) for name in (*self.allocator.blocks_by_name, *self.tier_names.values())}
        assert self.hints == held
        self.hints.clear()
        self.scheduler.attached()
        self.scheduler.describe(inference_pb2.NodeLoad())  # which tells everything anew
        self.settle()
        assert self.hints == held


def token_of(tail):
    """The one token that follows the last block."""
    (token_id,), _ = convert.from_tail(tail)
    return token_id


def a_descriptor(num_blocks, *, num_cached=0, num_tokens, epoch=1, behind=b""):
    """No two are alike."""
    return TransferDescriptor.draw(
        epoch=epoch,
        layout=LAYOUT,
        prefill_tp=1,
        decode_tp=1,
        addresses=["somewhere"],
        num_blocks=num_blocks,
        num_cached_blocks=num_cached,
        ttl_s=600.0,
        num_tokens=num_tokens,
        behind=behind,
    ).encode()


def _names(message, name):
    return message.attempt.request_id == name
