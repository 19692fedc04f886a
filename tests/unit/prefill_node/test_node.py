"""A prefill node with the fake engine: what its heartbeats tell of its rate."""

import asyncio

from engine.engine import Engine
from kv_transfer.ends.sender import KVSender
from kv_transfer.transports.loopback import LoopbackNetwork
from prefill_node.node import PrefillNode
from prefill_node.settings import PrefillSettings
from protos import convert, fleet_pb2
from protos.ranks import Followers
from serving_core.rates import StepRates
from serving_core.requests import Request, SamplingParams
from serving_core.settings import EngineSettings
from tests.tiny_models import write_fake_model


class Rates(StepRates):
    """Notes what each step computed."""

    def __init__(self):
        super().__init__(start_tokens_per_s=1000.0)
        self.steps = []

    def add(self, num_prompt_tokens, num_decoding, step_s):
        self.steps.append((num_prompt_tokens, num_decoding))
        super().add(num_prompt_tokens, num_decoding, step_s)


class Link:
    """What the node calls to tell its coordinator something."""

    def __init__(self):
        self.kinds = []

    def send(self, **event):
        self.kinds += event


async def test_every_step_is_one_of_prompts(tmp_path):
    settings = EngineSettings(model=str(write_fake_model(tmp_path)), block_size=4, num_kv_blocks=64)
    engine, link, rates = Engine(settings), Link(), Rates()
    sender = KVSender(LoopbackNetwork().dialer(), engine.pool, deadline_s=5.0)
    settings = PrefillSettings(engine=settings, max_num_batched_tokens=64)
    node = PrefillNode(settings, "p0", engine, sender, Followers(0), link, rates)
    assert node.heartbeat().load.prefill_tokens_per_s == 1000.0
    running = asyncio.create_task(node.run())
    for prompt in (list(range(129)), [1]):
        request = Request("r", 1, prompt, len(prompt), SamplingParams(max_tokens=1, temperature=0))
        prefill = fleet_pb2.Prefill(job=convert.job_to_wire(request))
        node.handle(fleet_pb2.NodeCommand(prefill=prefill))
        async with asyncio.timeout(20):
            await node.idle()
    assert rates.steps == [(64, 0), (64, 0), (1, 0), (1, 0)]
    assert node.heartbeat().load.prefill_tokens_per_s == rates.prefill_tokens_per_s > 0
    assert link.kinds.count("first_token") == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await sender.close()
