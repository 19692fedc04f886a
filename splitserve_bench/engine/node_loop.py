"""What a node does between two of its steps: a real one in its real loop, whose coordinator is a message's bytes.

A batch of prompts is read in one step; the decode steps behind it count. By the clock a part takes as long as others on
the machine let it; CPU time is of all threads of the process.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import uvloop

from engine.engine import Engine
from engine.stepper import BETWEEN, COMPUTE, StepClock
from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.ends.sender import KVSender
from kv_transfer.transports.loopback import LoopbackNetwork
from protos import convert, fleet_pb2
from serving_core.costs import StepRates
from serving_core.requests import Request, SamplingParams
from serving_core.settings import EngineSettings
from serving_core.waiting import first_to_end
from serving_node.ranks.leading import Followers
from serving_node.runner import NodeRunner
from serving_node.settings import NodeSettings
from splitserve_bench.engine.figures import LoopFigures
from splitserve_bench.prompts import Prompts

NUM_LOOP_STEPS: Final = 16
NAME: Final = "bench"
DEADLINE_S: Final = 600.0


def measure_loop(engine: Engine, batch: int, context_tokens: int, repeats: int) -> LoopFigures:
    """Of an engine that nobody else uses: the repeat that is least by CPU time, and that which is by the clock."""
    cpu_s = min((_run(engine, batch, context_tokens, time.process_time) for _ in range(repeats)), key=_between)
    clock_s = min((_run(engine, batch, context_tokens, time.perf_counter) for _ in range(repeats)), key=_between)
    return LoopFigures(
        batch=batch,
        context_tokens=context_tokens,
        step_s=clock_s[COMPUTE],
        cpu_s={part: cpu_s[part] for part in BETWEEN},
        clock_s={part: clock_s[part] for part in BETWEEN},
    )


def _between(seconds: dict[str, float]) -> float:
    return sum(seconds[part] for part in BETWEEN)


def _run(engine: Engine, batch: int, context_tokens: int, now: Callable[[], float]) -> dict[str, float]:
    """Mean seconds of each part of a step."""
    before = engine.clock
    try:
        return uvloop.run(_run_node(engine, batch, context_tokens, now))
    finally:
        engine.clock = before


class _Coordinator:
    """Where the node's link is: makes messages, and counts answers that have begun and ended."""

    def __init__(self, engine: Engine, batch: int, now: Callable[[], float]) -> None:
        self._engine, self._batch, self._now = engine, batch, now
        self._num_begun = self._num_ended = 0
        self.is_attached = True
        self.has_ended = asyncio.Event()

    def send(self, **event: Any) -> None:
        fleet_pb2.NodeEvent(**event).SerializeToString()
        if "first_token" in event:
            self._num_begun += 1
            if self._num_begun == self._batch:
                self._engine.clock = StepClock(self._now)
        if "step_tokens" in event:
            self._num_ended += sum(bool(token.finish_reason) for token in event["step_tokens"].tokens)
            if self._num_ended == self._batch:
                self.has_ended.set()


async def _run_node(engine: Engine, batch: int, context_tokens: int, now: Callable[[], float]) -> dict[str, float]:
    coordinator = _Coordinator(engine, batch, now)
    network = LoopbackNetwork()
    sender = KVSender(network.dialer(), engine.pool, deadline_s=DEADLINE_S)
    receiver = KVReceiver(network.listener(NAME), engine.pool)
    settings = NodeSettings(
        engine=EngineSettings(), max_num_batched_tokens=batch * context_tokens, max_num_seqs=batch, max_num_queued=batch
    )
    ends = (sender, receiver, Followers(0))
    node = NodeRunner(settings, "both", NAME, engine, *ends, coordinator, StepRates())  # type: ignore[arg-type]
    prompts = Prompts(engine.config.vocab_size, context_tokens)
    for index in range(batch):
        sampling = SamplingParams(max_tokens=NUM_LOOP_STEPS + 1, temperature=0, ignore_eos=True)
        request = Request(f"bench-{index}", 1, prompts.draw(), context_tokens, sampling)
        job = convert.job_to_wire(request, index + 1)
        node.handle(fleet_pb2.NodeCommand(reserve=fleet_pb2.Reserve(job=job, local_prefill=True)))
    try:
        async with asyncio.timeout(DEADLINE_S):
            await first_to_end(node.run(), coordinator.has_ended.wait())
    finally:
        await sender.close()
        await receiver.close()
    return {part: seconds / NUM_LOOP_STEPS for part, seconds in engine.clock.seconds.items()}
