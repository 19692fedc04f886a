"""Simulate one node: a real Worker whose steps, blocks and messages only take time."""

import statistics
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from coordinator.control.nodes import VERSION_KEY
from protos import fleet_pb2, inference_pb2
from protos.convert import PROTOCOL_VERSION, shape_to_wire
from serving_core.node.blocks import BlockAllocator
from serving_core.node.costs import NUM_RECENT, StepCosts, StepRates
from serving_core.node.prefix import numerics_of
from serving_core.requests import Work
from serving_core.shapes import preset, role_of
from serving_core.version import VERSION
from serving_node.decisions import CancelLoad, Load, Offload
from serving_node.kv_offload import OffloadPlan
from serving_node.scheduler import Limits, NodeScheduler
from serving_node.settings import NodeSettings
from serving_node.worker import Worker
from splitserve_bench.simulate.costs import NO_NOISE, Costs, Machine, Noise, Progress, StepLoad, load_of
from splitserve_bench.simulate.events import Agenda, Event, Line, ToyModel
from splitserve_bench.simulate.profile import NodeSizes
from splitserve_bench.simulate.transfer import Transfers

TIMES: Final = NodeSettings()
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
        """`machine` is one that it shares with nodes that slow down its steps, None without such."""
        self.name, self.costs, self.noise = name, costs, noise
        self.line: Line[Event]  # to the coordinator, once it is attached
        self.is_lost = False
        self._sizes, self._model, self._agenda, self._transfers = sizes, model, agenda, transfers
        self._machine = machine
        self._pace = costs  # of the running step, as the other nodes of its machine are
        self.allocator = BlockAllocator(sizes.num_blocks)
        self.scheduler = _scheduler(self.allocator, sizes, role, costs)
        self.worker = worker = Worker(self.scheduler, self, self)
        worker.engine = worker.transfers = worker.offload = self
        self._is_to_plan = False
        self._works: Sequence[Work] = ()  # of the running step
        self._load = StepLoad()  # of the running step
        self._started_s = 0.0  # the running step
        self._progress: Progress | None = None  # of the running step
        self._tier_free_s = 0.0  # when all that is to be read back is
        self._alarm_s: float | None = None  # when the scheduler's next tick is planned
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT)
        self.num_steps = 0

    # ---- the coordinator ----

    def hello(self) -> fleet_pb2.Hello:
        """Return the message with the node's identity and sizes, and begin as an attached node."""
        self.scheduler.attached()
        sizes, shape = self._sizes, self.scheduler.shape
        return fleet_pb2.Hello(
            node=inference_pb2.NodeInfo(
                name=self.name,
                role=role_of(shape),
                version=VERSION,
                fingerprint={**FINGERPRINT, VERSION_KEY: PROTOCOL_VERSION},
            ),
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_sequences,
            max_num_queued=sizes.max_num_queued,
            tp_size=1,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            num_tier_blocks=sizes.tier.num_blocks,
            shape=shape_to_wire(shape),
            home=shape_to_wire(self.scheduler.home),
        )

    def report_load(self) -> None:
        """Send a heartbeat with the node's load."""
        self.send(heartbeat=self.worker.heartbeat())

    def send(self, **event: Any) -> None:
        """Send an event to the coordinator: its kind as the keyword, its message as the value."""
        for kind, body in event.items():
            self.line.send((kind, body))

    def lost(self) -> None:
        """Note that the process has ended."""
        self.is_lost = True
        if self._machine is not None:
            self._machine.rests(self)

    @property
    def tier_load(self) -> inference_pb2.TierLoad:
        """Return the counters of KV offload."""
        load = inference_pb2.NodeLoad()
        self.scheduler.fill(load)
        return load.tier

    # ---- engine ----

    @property
    def is_in_step(self) -> bool:
        """Return whether a step runs."""
        return bool(self._works)

    @property
    def step_age_s(self) -> float:
        """Return the seconds since the running step began; 0 when none runs."""
        return self._agenda.now - self._started_s if self._works else 0.0

    def measured_load(self) -> inference_pb2.NodeLoad:
        """Return the number of steps so far, and the median seconds of recent ones."""
        step_s = statistics.median(self._recent_s) if self._recent_s else 0.0
        return inference_pb2.NodeLoad(name=self.name, num_steps=self.num_steps, step_s=step_s)

    def wake(self) -> None:
        """Plan a step after all that happens at this moment, unless one is running."""
        if not self._works and not self._is_to_plan:
            self._is_to_plan = True
            self._agenda.after(0.0, partial(self._plan, is_first=True))

    def _plan(self, *, is_first: bool = False) -> None:
        """Plan a step and start it. `is_first`: it does not follow another one at once."""
        self._is_to_plan = False
        if self.is_lost or self._works:
            return
        self._works = self.worker.plan()
        self.worker.carry_out(wakes=False)
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
        """Return the seconds of the running step, while the neighbors are as they are now."""
        return self._pace.step_s(self._load) * self.noise.step(self.num_steps, self._load)

    def _end_at(self, end_s: float) -> None:
        self._agenda.at(end_s, partial(self._stepped, end_s))

    def pace_changed(self) -> None:
        """Move the end of the running step: another node of the machine has begun to work, or has become idle."""
        assert self._machine is not None
        pace = self._machine.costs(self)
        if pace is self._pace:
            return
        self._pace = pace
        assert self._progress is not None, "an idle node is not notified"
        planned_s = self._progress.ends_s
        self._progress.go_on(self._agenda.now, self._step_s())
        if self._progress.ends_s != planned_s:
            self._end_at(self._progress.ends_s)

    def _stepped(self, end_s: float) -> None:
        """End the running step, unless its end has moved to another moment."""
        if self.is_lost or self._progress is None or self._progress.ends_s != end_s:
            return
        self._progress = None
        step_s = self._agenda.now - self._started_s
        self._recent_s.append(step_s)
        self.num_steps += 1
        works, self._works = self._works, ()
        self._send_layers(works)
        self.worker.step_done(works, self._model.next_tokens(works), step_s)
        self._plan()

    def _send_layers(self, works: Sequence[Work]) -> None:
        """Send blocks of the step that has just ended as if they had left while it ran, but for a short prompt's."""
        for work in self.scheduler.sends_while(works):
            end, block_size = work.start + work.num_tokens, self._sizes.block_size
            is_short = work.num_tokens == 1 or (work.samples and end < self._sizes.overlap_min_tokens)
            if not is_short:
                num_blocks = -(-end // block_size) if work.samples else end // block_size
                self._transfers.ready(self, work.request.epoch, num_blocks, since_s=self._started_s)

    # ---- transfers and KV offload ----

    def carry_out(self, decision: Any) -> None:
        """Carry out a decision about a KV transfer or KV offload."""
        match decision:
            case Load(load_id=load_id, slots=slots):
                self._read_back(load_id, slots)
            case Offload() | CancelLoad():
                pass  # writing takes no step's time, and who gave a load up does not mind its end
            case _:
                self._transfers.carry_out(self, decision)

    def _read_back(self, load_id: int, slots: Sequence[int]) -> None:
        """Load blocks from the KV offload, one load after the other."""
        tier = self._sizes.tier
        num_disk = sum(slot >= tier.num_host_blocks for slot in slots)
        seconds = (len(slots) - num_disk) * tier.host_block_s + num_disk * tier.disk_block_s
        self._tier_free_s = max(self._agenda.now, self._tier_free_s) + seconds
        self._agenda.at(self._tier_free_s, partial(self._loaded, load_id, len(slots)))

    def _loaded(self, load_id: int, num_blocks: int) -> None:
        if not self.is_lost:
            self.worker.loaded(load_id, num_blocks)

    # ---- clock ----

    def time(self) -> float:
        """Return the moment of the simulation in seconds."""
        return self._agenda.now

    def wake_at(self, moment_s: float | None) -> None:
        """Plan a tick of the scheduler for this moment, unless an earlier one is planned; None plans none."""
        if moment_s is not None and (self._alarm_s is None or moment_s < self._alarm_s):
            self._alarm_s = moment_s
            self._agenda.at(moment_s, partial(self._tick, moment_s))

    def _tick(self, alarm_s: float) -> None:
        """Run a tick of the scheduler, unless another one was planned before this one came."""
        if self._alarm_s == alarm_s and not self.is_lost:
            self._alarm_s = None
            self.worker.tick()


def _scheduler(allocator: BlockAllocator, sizes: NodeSizes, role: str, costs: Costs) -> NodeScheduler:
    tier = sizes.tier
    limits = Limits(
        sizes.max_num_batched_tokens,
        sizes.max_sequences,
        sizes.max_num_queued,
        TIMES.credit_timeout_s,
        TIMES.descriptor_timeout_s,
    )
    return NodeScheduler(
        allocator,
        sizes.layout,
        limits,
        preset(role, max_num_batched_tokens=sizes.max_num_batched_tokens, max_num_seqs=sizes.max_sequences),
        block_bytes=sizes.block_bytes,
        fingerprint=FINGERPRINT,
        numerics=numerics_of(FINGERPRINT),
        is_batch_invariant=True,
        eos_token_ids=(),
        rates=StepRates(costs.prefill_tokens_per_s),
        costs=StepCosts(costs.prefill_tokens_per_s),
        tier=OffloadPlan(tier.num_host_blocks, tier.num_disk_blocks, tier.host_block_s, tier.disk_block_s),
    )
