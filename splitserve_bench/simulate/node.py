"""One node of a simulation: the real logic of a node, with steps, blocks and messages that only take time.

It does with the logic's decisions what serving_node/runner.py does, and tells the logic no less.
"""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from coordinator.control.nodes import VERSION_KEY
from coordinator.control.prefix_fetch import MIN_PATIENCE_S
from kv_transfer.results import Received, Sent, TransferFailed
from protos import fleet_pb2, inference_pb2
from protos.convert import PROTOCOL_VERSION, shape_to_wire
from serving_core.node.blocks import BlockAllocator
from serving_core.node.costs import NUM_RECENT, StepCosts, StepRates
from serving_core.node.prefix import numerics_of
from serving_core.node.requests import NodeRequest
from serving_core.requests import Work
from serving_core.shapes import preset, role_of
from serving_node.decisions import (
    Beat,
    CancelLoad,
    CancelTransfer,
    Decision,
    FetchPrefix,
    FinishSend,
    Load,
    Receive,
    Send,
    SendMore,
    Spill,
    Tell,
)
from serving_node.kv_offload import OffloadPlan
from serving_node.logic import Limits, NodeLogic
from serving_node.settings import NodeSettings
from splitserve_bench.simulate.costs import NO_NOISE, Costs, Machine, Noise, Progress, StepLoad, load_of
from splitserve_bench.simulate.events import Agenda, Line, ToyModel
from splitserve_bench.simulate.profile import NodeSizes
from splitserve_bench.simulate.transfer import Transfers

TIMES: Final = NodeSettings()
LEAST_TIMEOUT_S: Final = min(TIMES.credit_timeout_s, TIMES.descriptor_timeout_s, MIN_PATIENCE_S)
FINGERPRINT: Final = {"model": "toy"}  # names of blocks are rooted in it


class SimulatedNode:
    """A node process, from its start until it is lost."""

    def __init__(
        self,
        name: str,
        role: str,
        sizes: NodeSizes,
        model: ToyModel,
        costs: Costs,
        agenda: Agenda,
        transfers: Transfers,
        *,
        machine: Machine | None = None,
        noise: Noise = NO_NOISE,
    ) -> None:
        """`machine`: that it shares with nodes whose steps bear on its own."""
        self.name, self.costs, self.noise = name, costs, noise
        self.line: Line[fleet_pb2.NodeEvent]  # to the coordinator, once it is attached
        self.is_lost = False
        self._sizes, self._model, self._agenda, self._transfers = sizes, model, agenda, transfers
        self._machine = machine
        self._pace = costs  # of the running step, as the other nodes of its machine are
        self.allocator = BlockAllocator(sizes.num_blocks)
        self.logic = _logic(self.allocator, sizes, role, costs)
        self._is_carrying_out = self._is_to_plan = False
        self._works: Sequence[Work] = ()  # of the running step
        self._load = StepLoad()  # of the running step
        self._started_s = 0.0  # the running step
        self._progress: Progress | None = None  # of the running step
        self._tier_free_s = 0.0  # when all that is to be read back is
        self._alarm_s: float | None = None  # when the logic's next tick is planned
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT)
        self.num_steps = 0

    # ---- what the coordinator asks and hears ----

    def hello(self) -> fleet_pb2.Hello:
        """What the node says of itself first."""
        self.logic.attached()
        sizes, shape = self._sizes, self.logic.shape
        return fleet_pb2.Hello(
            node=inference_pb2.NodeInfo(
                name=self.name, role=role_of(shape), fingerprint={**FINGERPRINT, VERSION_KEY: PROTOCOL_VERSION}
            ),
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_answers,
            max_num_queued=sizes.max_num_queued,
            tp_size=1,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            num_tier_blocks=sizes.tier.num_blocks,
            shape=shape_to_wire(shape),
            home=shape_to_wire(self.logic.home),
        )

    def beat(self) -> None:
        """Tells how it does."""
        if self.is_lost:
            return
        step_s = statistics.median(self._recent_s) if self._recent_s else 0.0
        load = inference_pb2.NodeLoad(name=self.name, num_steps=self.num_steps, step_s=step_s)
        self.logic.describe(load)
        self._carry_out()
        step_age_s = self._agenda.now - self._started_s if self._works else 0.0
        self.line.send(fleet_pb2.NodeEvent(heartbeat=fleet_pb2.Heartbeat(load=load, step_age_s=step_age_s)))

    def handle(self, command: fleet_pb2.NodeCommand) -> None:
        """A command has come."""
        self._happens(lambda: self.logic.handle(command, self._agenda.now))

    @property
    def tier_load(self) -> inference_pb2.TierLoad:
        """What its second tier has done."""
        load = inference_pb2.NodeLoad()
        self.logic.fill(load)
        return load.tier

    @property
    def is_in_step(self) -> bool:
        """Whether a step runs."""
        return bool(self._works)

    def lost(self) -> None:
        """Its process is gone."""
        self.is_lost = True
        if self._machine is not None:
            self._machine.rests(self)

    def detached(self) -> None:
        """The coordinator has given the node up, which attaches again."""
        self._happens(self.logic.detached)

    # ---- steps ----

    def _wake(self) -> None:
        """Plans a step after all that happens at this moment, unless one is running."""
        if not self._works and not self._is_to_plan:
            self._is_to_plan = True
            self._agenda.after(0.0, partial(self._plan, is_first=True))

    def _plan(self, *, is_first: bool = False) -> None:
        """`is_first`: unlike a step that follows another one at once."""
        self._is_to_plan = False
        if self.is_lost or self._works:
            return
        self._works = self.logic.plan(self._agenda.now)
        self._carry_out(wakes=False)
        if self._works:
            self._load = load_of(self._works)
            self._load.is_first = is_first
            self._start_step()
        elif self._machine is not None:
            self._machine.rests(self)

    def _start_step(self) -> None:
        self._started_s = self._agenda.now
        if self._machine is not None:
            self._machine.works(self)
            self._pace = self._machine.costs(self)
        self._progress = Progress(self._started_s, self._step_s())
        self._end_at(self._progress.ends_s)

    def _step_s(self) -> float:
        """What the running step takes, as the node's neighbours are now."""
        return self._pace.step_s(self._load) * self.noise.step(self.num_steps, self._load)

    def _end_at(self, end_s: float) -> None:
        self._agenda.at(end_s, partial(self._stepped, end_s))

    def pace_changed(self) -> None:
        """Another node of the machine has begun to work, or rests: what is left of the running step goes on at the rate
        of now."""
        assert self._machine is not None
        pace = self._machine.costs(self)
        if pace is self._pace:
            return
        self._pace = pace
        assert self._progress is not None, "who rests is told nothing"
        planned_s = self._progress.ends_s
        self._progress.go_on(self._agenda.now, self._step_s())
        if self._progress.ends_s != planned_s:
            self._end_at(self._progress.ends_s)

    def _stepped(self, end_s: float) -> None:
        """An end that has been put off, or brought forward, does nothing."""
        if self.is_lost or self._progress is None or self._progress.ends_s != end_s:
            return
        self._progress = None
        ended_s = self._agenda.now
        step_s = ended_s - self._started_s
        self._recent_s.append(step_s)
        self.num_steps += 1
        works, self._works = self._works, ()
        self._send_layers(works)
        tokens = self._model.next_tokens([work.request for work in works if work.samples])
        self.logic.step_done(works, tokens, step_s, ended_s)
        self._do_all()
        self._plan()

    def _send_layers(self, works: Sequence[Work]) -> None:
        """Blocks of the step that has just ended left while it ran, unless it was all of a short prompt."""
        for work in self.logic.sends_while(works):
            end, block_size = work.start + work.num_tokens, self._sizes.block_size
            is_short = work.num_tokens == 1 or (work.samples and end < self._sizes.overlap_min_tokens)
            if not is_short:
                num_blocks = -(-end // block_size) if work.samples else end // block_size
                self._transfers.ready(self, work.request.epoch, num_blocks, since_s=self._started_s)

    # ---- transfers ----

    def coming(self, epoch: int) -> None:
        """The first blocks are on their way."""
        self.logic.coming(epoch)

    def received(self, epoch: int, result: Received | TransferFailed) -> None:
        """Blocks have come, or will not."""
        self._happens(lambda: self.logic.received(epoch, result, self._agenda.now))

    def caught_up(self, epoch: int) -> None:
        """All blocks that were ready have left."""
        self._happens(lambda: self.logic.caught_up(epoch))

    def sent(self, epoch: int, result: Sent | TransferFailed) -> None:
        """Blocks have arrived, or will not."""
        self._happens(lambda: self.logic.sent(epoch, result, self._agenda.now))

    # ---- decisions ----

    def _happens(self, what: Callable[[], object]) -> None:
        """Lets something happen to the logic of a node that is not lost, and does what is decided."""
        if not self.is_lost:
            what()
            self._carry_out()

    def _carry_out(self, *, wakes: bool = True) -> None:
        """Does what has been decided, and what that leads to, in order."""
        if self._is_carrying_out:
            return
        self._do_all()
        if wakes:
            self._wake()
        self._set_alarm()

    def _do_all(self) -> None:
        self._is_carrying_out = True
        while decisions := self.logic.take_decisions():
            for decision in decisions:
                self._do(decision)
        self._is_carrying_out = False

    def _do(self, decision: Decision) -> None:
        match decision:
            case Tell(event=event):
                self.line.send(fleet_pb2.NodeEvent(**event))
            case Beat():
                self.beat()
            case Load(load_id=load_id, slots=slots):
                self._read_back(load_id, slots)
            case Spill() | CancelLoad():
                pass  # writing takes no step's time, and who gave a load up does not mind its end
            case _:
                self._transfer(decision)

    def _transfer(self, decision: Decision) -> None:
        match decision:
            case Receive(node_request=node_request, num_blocks=num_blocks):
                self._receive(node_request, num_blocks)
            case Send(epoch=epoch, descriptor=descriptor, block_ids=block_ids):
                self._transfers.send(self, epoch, descriptor, len(block_ids))
            case SendMore(epoch=epoch, block_ids=block_ids):
                self._transfers.ready(self, epoch, len(block_ids), since_s=self._agenda.now)
            case FinishSend(epoch=epoch, block_ids=block_ids, tail=tail):
                self._transfers.finish(self, epoch, len(block_ids), tail)
            case FetchPrefix(offer=offer, block_ids=block_ids, num_cached=num_cached):
                self._open(offer.epoch, len(block_ids), num_cached, offer.num_tokens)
            case CancelTransfer(epoch=epoch):
                self._transfers.cancel(self, epoch)

    def _receive(self, node_request: NodeRequest, num_blocks: int) -> None:
        num_tokens = len(node_request.request.token_ids)
        self._open(
            node_request.request.epoch, num_blocks, node_request.num_cached_blocks, num_tokens, node_request.behind
        )

    def _open(self, epoch: int, num_blocks: int, num_cached: int, num_tokens: int, behind: bytes = b"") -> None:
        sizes = {"num_blocks": num_blocks, "num_cached": num_cached, "num_tokens": num_tokens}
        descriptor = self._transfers.open(self, epoch, **sizes, behind=behind)
        self.logic.granted(epoch, descriptor)

    def _read_back(self, load_id: int, slots: Sequence[int]) -> None:
        """One load after the other."""
        tier = self._sizes.tier
        num_disk = sum(slot >= tier.num_host_blocks for slot in slots)
        seconds = (len(slots) - num_disk) * tier.host_block_s + num_disk * tier.disk_block_s
        self._tier_free_s = max(self._agenda.now, self._tier_free_s) + seconds
        num_blocks = len(slots)
        self._agenda.at(
            self._tier_free_s,
            lambda: self._happens(lambda: self.logic.loaded(load_id, num_blocks, self._agenda.now)),
        )

    def _set_alarm(self) -> None:
        if self._alarm_s is not None and self._alarm_s <= self._agenda.now + LEAST_TIMEOUT_S:
            return  # nobody can have come since who is to wake it before
        wake_at_s = self.logic.wake_at_s
        if wake_at_s is not None and (self._alarm_s is None or wake_at_s < self._alarm_s):
            self._alarm_s = wake_at_s
            self._agenda.at(wake_at_s, lambda: self._tick(wake_at_s))

    def _tick(self, alarm_s: float) -> None:
        """An alarm that another one came before does nothing."""
        if self._alarm_s == alarm_s:
            self._alarm_s = None
            self._happens(lambda: self.logic.tick(self._agenda.now))


def _logic(allocator: BlockAllocator, sizes: NodeSizes, role: str, costs: Costs) -> NodeLogic:
    tier = sizes.tier
    limits = Limits(
        sizes.max_num_batched_tokens,
        sizes.max_answers,
        sizes.max_num_queued,
        TIMES.credit_timeout_s,
        TIMES.descriptor_timeout_s,
    )
    return NodeLogic(
        allocator,
        sizes.layout,
        limits,
        preset(role, max_num_batched_tokens=sizes.max_num_batched_tokens, max_num_seqs=sizes.max_answers),
        block_bytes=sizes.block_bytes,
        fingerprint=FINGERPRINT,
        numerics=numerics_of(FINGERPRINT),
        is_batch_invariant=True,
        eos_token_ids=(),
        rates=StepRates(costs.prefill_tokens_per_s),
        costs=StepCosts(costs.prefill_tokens_per_s),
        tier=OffloadPlan(tier.num_host_blocks, tier.num_disk_blocks, tier.host_block_s, tier.disk_block_s),
    )
