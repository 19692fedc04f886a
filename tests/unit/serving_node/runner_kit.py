"""A whole node with the fake engine over a loopback network, and what it tells its coordinator."""

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from engine.build import build_engine
from engine.cache.tier_store import TierStore
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.transports.loopback import LoopbackNetwork
from protos import convert, fleet_pb2
from serving_core.node.costs import StepRates
from serving_core.requests import Request, SamplingParams
from serving_core.settings import EngineSettings
from serving_node.kv_offload import OffloadPlan
from serving_node.ranks.leading import Followers
from serving_node.runner import NodeRunner
from serving_node.settings import NodeSettings
from tests import fleet_events as events
from tests.tiny_models import VOCAB_SIZE, write_fake_model

BLOCK_SIZE = 4
DEADLINE_S = 240.0


class GatedEngine:
    """The fake engine, whose steps wait for the test if it wants them to, and fail where it says so."""

    def __init__(self, engine):
        self._engine = engine
        self._gate = threading.Semaphore(0)
        self.is_open = True
        self.plans = []
        self.num_behind = 0  # of them, those that followed the one before at once
        self.error = None
        self.before_end = lambda: None  # called in the engine's thread when a step is computed

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, works, on_layer=None):
        self._begin(works)
        tokens = self._engine.step(works, on_layer)
        self.before_end()
        return tokens

    def step_prepared(self, works, built, before, on_begun, until_known):
        self.num_behind += 1
        on_begun()
        self._begin(works)
        tokens = self._engine.step_prepared(works, built, before, on_begun, until_known)
        self.before_end()
        return tokens

    def _begin(self, works):
        self.plans.append(_plan_of(works))
        if not self.is_open:
            assert self._gate.acquire(timeout=DEADLINE_S), "the test never let the step end"
        if self.error is not None:
            raise self.error

    def let_the_loop_look_ahead(self):
        """Let no step end before the loop has had its turns to take in the step before and to offer the next one,
        however busy the machine is."""
        loop = asyncio.get_running_loop()
        self.before_end = lambda: asyncio.run_coroutine_threadsafe(_take_turns(), loop).result(DEADLINE_S)

    def let_one_end(self):
        self._gate.release()

    def open(self):
        self.is_open = True
        self._gate.release()


async def _take_turns():
    for _ in range(10):
        await asyncio.sleep(0)


class RecordedRates(StepRates):
    """Notes the prompt tokens and the decoding requests of each step."""

    def __init__(self, start_tokens_per_s):
        super().__init__(start_tokens_per_s)
        self.steps = []

    def add(self, num_prompt_tokens, num_decoding, step_s):
        self.steps.append((num_prompt_tokens, num_decoding))
        super().add(num_prompt_tokens, num_decoding, step_s)


class Harness:
    """The node, and everything it has told its coordinator."""

    def __init__(
        self, engine_settings, name, network, followers, settings, start_tokens_per_s, num_tier_blocks, looks_ahead
    ):
        self.name = name
        self.network = network
        self.engine = GatedEngine(build_engine(engine_settings))
        self.engine.can_schedule_async = looks_ahead and self.engine.can_schedule_async
        self.tier = TierStore(self.engine.pool, num_tier_blocks, 0) if num_tier_blocks else None
        tp_size = 1 + len(followers)
        self.sender = KVSender(network.dialer(), self.engine.pool, tp_size=tp_size, deadline_s=DEADLINE_S)
        self.receiver = KVReceiver(network.listener(name), self.engine.pool, tp_size=tp_size)
        self.events = []
        self._request_ids = {}  # by epoch
        self.on_event = None
        self.rates = RecordedRates(start_tokens_per_s)
        self.node = NodeRunner(
            NodeSettings(engine=engine_settings, **settings).resolved("decode", "cpu"),
            "decode",
            name,
            self.engine,
            self.sender,
            self.receiver,
            followers,
            self,
            self.rates,
            self.tier,
            OffloadPlan(num_host=num_tier_blocks, reads_always=True),
        )

    def send(self, **event):
        """What the node calls its link for."""
        step = event.get("step_tokens")
        if step is not None and self._request_ids.keys() >= set(step.epochs):  # else a coordinator reads it
            event = {"step_tokens": events.all_tokens(step, self._request_ids)}
        self.events.append(fleet_pb2.NodeEvent(**event))
        if self.on_event is not None:
            self.on_event(self.events[-1])

    def prefill(self, request):
        self.handle(prefill=fleet_pb2.Prefill(job=job(request)))

    def reserve(self, request, ahead=0):
        self.handle(reserve=fleet_pb2.Reserve(job=job(request), prefill_tp_size=1, num_tokens_ahead=ahead))

    def local(self, name, prompt, **options):
        request = make_request(name, prompt, **options)
        self.handle(reserve=fleet_pb2.Reserve(job=job(request), local_prefill=True))
        return request

    def deliver(self, request, descriptor):
        self.handle(deliver=fleet_pb2.Deliver(attempt=convert.attempt_of(request), descriptor=descriptor))

    def migrate(self, request, descriptor):
        self.handle(migrate=fleet_pb2.Migrate(attempt=convert.attempt_of(request), descriptor=descriptor))

    def keep(self, request):
        self.handle(keep=fleet_pb2.Keep(attempt=convert.attempt_of(request)))

    def cancel(self, request):
        self.handle(cancel=fleet_pb2.Cancel(attempt=convert.attempt_of(request)))

    def handle(self, **command):
        for body in command.values():
            if hasattr(body, "job"):
                self._request_ids[body.job.attempt.epoch] = body.job.attempt.request_id
        self.node.handle(about_its_attempt(fleet_pb2.NodeCommand(**command)))

    def of(self, name):
        """What was said of a request: (kind, token ids), in order, the tokens of steps joined."""
        story = []
        for event in self.events:
            kind = event.WhichOneof("event")
            if kind == "step_tokens":
                story += [(kind, token.token_id) for token in event.step_tokens.tokens if _names(token, name)]
            elif kind == "first_token" and _names(event.first_token, name):
                story.append((kind, event.first_token.token.token_id))
            elif kind not in ("cache_changed", "first_token", "progress") and _names(getattr(event, kind), name):
                story.append((kind, None))
        return story

    def kinds(self, name):
        return [kind for kind, _ in self.of(name)]

    def event(self, name, kind):
        (event,) = [getattr(each, kind) for each in self.events if _names(getattr(each, kind), name)]
        return event

    def last_token(self, name):
        tokens = [token for event in self.events for token in event.step_tokens.tokens if _names(token, name)]
        return tokens[-1]

    @property
    def load(self):
        return self.node.heartbeat().load

    async def until(self, condition, look_s=0.001):
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(look_s)

    async def until_told(self, name, kind):
        await self.until(lambda: kind in self.kinds(name))

    async def until_step(self, number):
        """The step of this number, counted from 1, runs; the node has taken in the one before, and may have offered the
        one behind."""
        await self.until(lambda: len(self.engine.plans) == number == 1 + sum(self.node.steps.tokens.counts))

    async def idle(self):
        async with asyncio.timeout(DEADLINE_S):
            await self.node.idle()


def _plan_of(works):
    return [(work.request.request_id, work.start, work.num_tokens) for work in works]


def _names(message, name):
    return message.attempt.request_id == name


_next_epoch = iter(range(1000, 10**9)).__next__


def make_request(name, prompt, *, epoch=None, num_prompt_tokens=None, max_tokens=4, **sampling):
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0, "ignore_eos": True, **sampling})
    return Request(name, epoch or _next_epoch(), list(prompt), num_prompt_tokens or len(prompt), sampling)


def about_its_attempt(command):
    """As the coordinator sends it."""
    body = getattr(command, command.WhichOneof("command"), None)
    attempt = getattr(getattr(body, "job", body), "attempt", None)
    if attempt is not None:
        command.attempt.CopyFrom(attempt)
    return command


def job(request):
    """Its age is the number of its attempt."""
    return convert.job_to_wire(request, request.epoch)


@asynccontextmanager
async def running(
    tmp_path,
    network=None,
    name="node",
    followers=None,
    num_blocks=64,
    caching=True,
    gated=False,
    token_s=0.0,
    start_tokens_per_s=0.0,
    engine=None,
    num_tier_blocks=0,
    looks_ahead=True,
    **settings,
):
    """One node, of the fake model unless the settings of another engine are given. In the end nothing is held any
    more."""
    sizes = {"block_size": BLOCK_SIZE, "num_kv_blocks": num_blocks, "enable_prefix_caching": caching}
    engine = {"model": str(write_fake_model(tmp_path / "fake", token_s=token_s))} if engine is None else engine
    network, followers = network or LoopbackNetwork(), followers or Followers(0)
    settings_of_engine = EngineSettings(**{**sizes, **engine})
    sizes = start_tokens_per_s, num_tier_blocks
    harness = Harness(settings_of_engine, name, network, followers, settings, *sizes, looks_ahead)
    harness.engine.is_open = not gated
    task = asyncio.create_task(harness.node.run())
    try:
        yield harness
        load = harness.load
        assert load.num_blocks_free == load.num_blocks, "a block is still held"
        assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 0, 0)
        assert harness.receiver.num_open == harness.sender.num_open == 0
    finally:
        task.cancel()
        harness.engine.open()
        await asyncio.gather(task, return_exceptions=True)
        await harness.sender.close()
        await harness.receiver.close()
        if harness.tier is not None:
            harness.tier.close()


@asynccontextmanager
async def fleet(tmp_path, *names, **options):
    """Several nodes of one network."""
    network = LoopbackNetwork()
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running(tmp_path, network, name, **options)) for name in names]


def carry_descriptors(writer, reader):
    """What a coordinator does between two nodes: descriptors of one go to the other."""

    def on_event(event):
        if event.HasField("reserved"):
            deliver = fleet_pb2.Deliver(attempt=event.reserved.attempt, descriptor=event.reserved.descriptor)
            reader.node.handle(about_its_attempt(fleet_pb2.NodeCommand(deliver=deliver)))

    writer.on_event = on_event


class MigratingRequest:
    """What a coordinator does with one answer that moves back and forth between two nodes."""

    def __init__(self, writer, other, request, *, num_migrations, num_ahead=8, num_between=3):
        self.writer, self.other = writer, other
        self.request = request  # the attempt that counts
        self.num_migrations, self.num_ahead, self.num_between = num_migrations, num_ahead, num_between
        self.tokens = {}  # by their place in the answer, as they were told
        self.answer = []  # of them, those before the first that is not there yet: two nodes tell of them
        self.next_indexes = []
        self._to_be = None  # the attempt at the other node
        self._at = 0
        writer.on_event, other.on_event = partial(self.hear, writer), partial(self.hear, other)

    def hear(self, node, event):
        kind = event.WhichOneof("event")
        assert kind not in ("failed", "migration_failed", "revoked"), event
        if kind in ("first_token", "step_tokens"):
            for token in [event.first_token.token] if kind == "first_token" else event.step_tokens.tokens:
                assert token.index not in self.tokens, "a token was told twice"
                self.tokens[token.index] = token
            while len(self.answer) in self.tokens:
                self.answer.append(self.tokens[len(self.answer)])
            self._move_in_time()
        elif kind == "reserved":
            self.writer.migrate(self.request, event.reserved.descriptor)
        elif kind == "committed":
            self._has_migrated(node, event.committed.next_index)

    def _move_in_time(self):
        if self._to_be is not None or len(self.next_indexes) == self.num_migrations:
            return
        if len(self.answer) - self._at >= self.num_between:
            known = [token.token_id for token in self.answer]
            prompt = self.request.token_ids[: self.request.num_prompt_tokens]
            self._to_be = replace(self.request, epoch=_next_epoch(), token_ids=[*prompt, *known])
            self.other.reserve(self._to_be, ahead=self.num_ahead)

    def _has_migrated(self, node, next_index):
        assert node is self.other
        self.next_indexes.append(next_index)
        self.writer.cancel(self.request)
        self.request, self._to_be, self._at = self._to_be, None, next_index
        self.writer, self.other = self.other, self.writer


def by_name(node, all_migrating, readers):
    """Each mover hears of its own answer alone; descriptors of other requests go to their readers."""

    def on_event(event):
        kind = event.WhichOneof("event")
        if kind == "step_tokens":
            for token in event.step_tokens.tokens:
                if migrating := all_migrating.get(token.attempt.request_id):
                    migrating.hear(node, fleet_pb2.NodeEvent(step_tokens=fleet_pb2.StepTokens(tokens=[token])))
        elif kind != "cache_changed":
            name = getattr(event, kind).attempt.request_id
            if name in all_migrating:
                all_migrating[name].hear(node, event)
            elif kind == "reserved":
                deliver = fleet_pb2.Deliver(attempt=event.reserved.attempt, descriptor=event.reserved.descriptor)
                readers[name].handle(deliver=deliver)

    return on_event


def answer_on_paper(prompt, num_tokens):
    context = list(prompt)
    while len(context) < len(prompt) + num_tokens:
        total = sum(token * place for place, token in enumerate(context, start=1))
        context.append((total + len(context)) % VOCAB_SIZE)
    return context[len(prompt) :]


def told(answer):
    """How a local request of these tokens is told."""
    first, *rest = answer
    return [("first_token", first), *(("step_tokens", token) for token in rest)]
