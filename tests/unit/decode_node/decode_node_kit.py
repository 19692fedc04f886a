"""A decode node with the fake engine, and what it tells its coordinator."""

import asyncio
import threading
from contextlib import asynccontextmanager

from decode_node.node import DecodeNode
from decode_node.settings import DecodeSettings
from engine.engine import Engine
from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.transports.loopback import LoopbackNetwork
from protos import convert, fleet_pb2
from protos.ranks import Followers
from serving_core.rates import StepRates
from serving_core.requests import Request, SamplingParams
from serving_core.settings import EngineSettings
from tests.tiny_models import VOCAB_SIZE, write_fake_model

BLOCK_SIZE = 4
DEADLINE_S = 20.0


class GatedEngine:
    """The fake engine, whose steps wait for the test if it wants them to, and fail where it says so."""

    def __init__(self, engine):
        self._engine = engine
        self._gate = threading.Semaphore(0)
        self.is_open = True
        self.plans = []
        self.error = None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, works, on_layer=None):
        self.plans.append([(work.request.request_id, work.start, work.num_tokens) for work in works])
        if not self.is_open:
            assert self._gate.acquire(timeout=DEADLINE_S), "the test never let the step end"
        if self.error is not None:
            raise self.error
        return self._engine.step(works, on_layer)

    def let_one_end(self):
        self._gate.release()

    def open(self):
        self.is_open = True
        self._gate.release()


class RecordedRates(StepRates):
    """Notes the prompt tokens and the decoding requests of each step."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def add(self, num_prompt_tokens, num_decoding, step_s):
        self.steps.append((num_prompt_tokens, num_decoding))
        super().add(num_prompt_tokens, num_decoding, step_s)


class Harness:
    """The node, and everything it has told its coordinator."""

    def __init__(self, folder, followers, settings, num_blocks, caching):
        engine_settings = EngineSettings(
            model=str(folder), block_size=BLOCK_SIZE, num_kv_blocks=num_blocks, enable_prefix_caching=caching
        )
        self.engine = GatedEngine(Engine(engine_settings))
        self.network = LoopbackNetwork()
        self.receiver = KVReceiver(self.network.listener("rank-0"), self.engine.pool, tp_size=1 + len(followers))
        self.events = []
        self.rates = RecordedRates()
        self.node = DecodeNode(
            DecodeSettings(engine=engine_settings, **settings),
            "d0",
            self.engine,
            self.receiver,
            followers,
            self,
            self.rates,
        )

    def send(self, **event):
        """What the node calls its link for."""
        self.events.append(fleet_pb2.NodeEvent(**event))

    def reserve(self, name, prompt, *, local=True, epoch=1, num_prompt_tokens=None, max_tokens=4, **sampling):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, **{"ignore_eos": True, **sampling})
        request = Request(name, epoch, list(prompt), num_prompt_tokens or len(prompt), sampling)
        job = convert.job_to_wire(request)
        reserve = fleet_pb2.Reserve(job=job, local_prefill=local, prefill_tp_size=0 if local else 1)
        self.node.handle(fleet_pb2.NodeCommand(reserve=reserve))
        return request

    def cancel(self, request):
        attempt = convert.attempt_of(request)
        self.node.handle(fleet_pb2.NodeCommand(cancel=fleet_pb2.Cancel(attempt=attempt)))

    def of(self, name):
        """What was said of a request: (kind, token ids), in order, the tokens of steps joined."""
        story = []
        for event in self.events:
            kind = event.WhichOneof("event")
            if kind == "step_tokens":
                story += [(kind, token.token_id) for token in event.step_tokens.tokens if names(token, name)]
            elif kind == "first_token" and names(event.first_token, name):
                story.append((kind, event.first_token.token.token_id))
            elif kind not in ("cache_changed", "first_token") and names(getattr(event, kind), name):
                story.append((kind, None))
        return story

    def kinds(self, name):
        return [kind for kind, _ in self.of(name)]

    def first_token(self, name):
        (event,) = [each.first_token for each in self.events if names(each.first_token, name)]
        return event

    def last_token(self, name):
        tokens = [token for event in self.events for token in event.step_tokens.tokens if names(token, name)]
        return tokens[-1]

    @property
    def load(self):
        return self.node.heartbeat().load

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def until_step(self, number):
        """The step of this number, counted from 1, runs."""
        await self.until(lambda: len(self.engine.plans) == number)

    async def idle(self):
        async with asyncio.timeout(DEADLINE_S):
            await self.node.idle()


def names(message, name):
    return message.attempt.request_id == name


@asynccontextmanager
async def decode_node(tmp_path, followers=None, num_blocks=64, caching=True, gated=False, token_s=0.0, **settings):
    folder = write_fake_model(tmp_path / "fake", token_s=token_s)
    harness = Harness(folder, followers or Followers(0), settings, num_blocks, caching)
    harness.engine.is_open = not gated
    running = asyncio.create_task(harness.node.run())
    try:
        yield harness
        load = harness.load
        assert load.num_blocks_free == load.num_blocks, "a block is still held"
        assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 0, 0)
    finally:
        running.cancel()
        harness.engine.open()
        await asyncio.gather(running, return_exceptions=True)
        await harness.receiver.close()


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
