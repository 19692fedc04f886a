"""Drive the scheduler of one node: commands, ends of steps and transfers, and the time go in; decisions go out over
ports.

The only interpreter of decisions. A node process, a simulated node and the tests give it other ports, and the scheduler
cannot tell them apart. Synchronous: a port may call the worker back while it carries a decision out.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from kv_transfer.distributed_kv.wire import TileRequest
from kv_transfer.results import Received, Sent, TransferFailed
from protos import fleet_pb2, inference_pb2
from serving_core.errors import RequestError
from serving_core.node.requests import NodeRequest
from serving_core.requests import Guide, Request, SampledToken, Work
from serving_node.decisions import (
    CancelLoad,
    CloseRemoteKV,
    CompileGrammar,
    Decision,
    Load,
    LoadAdapter,
    Offload,
    OpenRemoteKV,
    Report,
    RevokeRemoteKV,
    SendHeartbeat,
    UnloadAdapter,
)
from serving_node.distributed_kv.source import Opened
from serving_node.scheduler import NodeScheduler


class Link(Protocol):
    """The way to the coordinator."""

    def send(self, **event: Any) -> None:
        """Send one event, named by its field in fleet_pb2.NodeEvent."""


class Engine(Protocol):
    """Runs the steps: plans one by `Worker.plan`, and reports its end by `step_done` or `step_failed`."""

    @property
    def step_age_s(self) -> float:
        """Return for how many seconds the running step has run; 0 when idle."""
        ...

    def measured_load(self) -> inference_pb2.NodeLoad:
        """Return the part of the node's load that the scheduler does not know."""
        ...

    def wake(self) -> None:
        """Plan a step soon, unless one runs: there may be more to compute."""


class Port(Protocol):
    """Carries out decisions of some kinds, and reports their ends as each decision says."""

    def carry_out(self, decision: Any) -> None: ...


class Clock(Protocol):
    """The time, and an alarm."""

    def time(self) -> float:
        """Return the seconds since some fixed moment."""
        ...

    def wake_at(self, moment_s: float | None) -> None:
        """Call `Worker.tick` at this time, and not at one that was given before; None: not at all."""


class Worker:
    """Passes all that happens to one node to its scheduler, and carries out what the scheduler decides."""

    transfers: Port
    """For KV transfers. Set, as the other ports are, before anything happens: ports report to the worker."""
    engine: Engine
    adapters: Port | None = None
    grammars: Port | None = None
    offload: Port | None = None
    remote_kvs: Port | None = None

    def __init__(self, scheduler: NodeScheduler, link: Link, clock: Clock) -> None:
        self.scheduler = scheduler
        self._link = link
        self._clock = clock
        self._is_carrying_out = False

    # ---- the coordinator ----

    def heartbeat(self) -> fleet_pb2.Heartbeat:
        """Return the heartbeat with the node's load, and report the changes of its prefix cache."""
        load = self.engine.measured_load()
        self.scheduler.describe(load)
        self.carry_out()
        return fleet_pb2.Heartbeat(load=load, step_age_s=self.engine.step_age_s)

    def handle(self, command: fleet_pb2.NodeCommand) -> None:
        self.scheduler.handle(command, self._clock.time())
        self.carry_out()

    def detached(self) -> None:
        """End every request: the coordinator is gone."""
        self.scheduler.detached()
        self.carry_out()

    # ---- steps; the caller carries out what they decide ----

    def plan(self) -> list[Work]:
        """Return the scheduled tokens of the next step; empty if there is nothing to compute.

        The caller must call `carry_out` afterwards.
        """
        return self.scheduler.plan(self._clock.time())

    def step_done(
        self, works: Sequence[Work], tokens: Sequence[SampledToken], step_s: float, *, goes_on: bool = False
    ) -> None:
        self.scheduler.step_done(works, tokens, step_s, self._clock.time(), goes_on=goes_on)

    def step_failed(self, works: Sequence[Work], cause: str) -> None:
        """Fail the requests of a step that has failed; `cause` is the message of their error, which clients see.

        The caller must call `carry_out` afterwards.
        """
        self.scheduler.step_failed(works, cause)

    # ---- grammars ----

    def compiled(self, request: Request, result: Guide | RequestError) -> None:
        self.scheduler.compiled(request, result)
        self.carry_out()

    # ---- KV transfers ----

    def credited(self, epoch: int, descriptor: bytes) -> None:
        self.scheduler.credited(epoch, descriptor)
        self.carry_out()

    def receiving(self, epoch: int) -> None:
        self.scheduler.receiving(epoch)

    def received(self, epoch: int, result: Received | TransferFailed) -> None:
        self.scheduler.received(epoch, result, self._clock.time())
        self.carry_out()

    def caught_up(self, epoch: int) -> None:
        """Record that every rank has sent all ready blocks of the transfer with this epoch."""
        self.scheduler.caught_up(epoch)
        self.carry_out()

    def sent(self, epoch: int, result: Sent | TransferFailed) -> None:
        self.scheduler.sent(epoch, result, self._clock.time())
        self.carry_out()

    # ---- KV offload ----

    def loaded(self, load_id: int, num_good: int) -> None:
        self.scheduler.loaded(load_id, num_good, self._clock.time())
        self.carry_out()

    # ---- distributed KV ----

    def opened(self, node_request: NodeRequest, remote_kv: Opened | None) -> None:
        self.scheduler.opened(node_request, remote_kv, self._clock.time())
        self.carry_out()

    def lease_remote_kv(self, number: int, most_tiles: int, tile_request: TileRequest) -> list[int]:
        """Lease blocks for at most `most_tiles` tiles of another node's request; return them, perhaps none.

        `number` is that of the connection. Evicted contents are copied to KV offload before this returns.
        """
        block_ids = self.scheduler.lease_remote_kv(number, most_tiles, tile_request, self._clock.time())
        self.carry_out()
        return block_ids

    def release_remote_kv(self, number: int) -> None:
        self.scheduler.release_remote_kv(number)
        self.carry_out()

    # ---- time ----

    def tick(self) -> None:
        """End the waits whose deadline has passed."""
        self.scheduler.tick(self._clock.time())
        self.carry_out()

    # ---- decisions ----

    def carry_out(self, *, wakes: bool = True) -> None:
        """Carry out all decisions, and the decisions that follow from them, in order; then set the next tick.

        With `wakes` the engine is woken. A call within another one leaves the decisions to that one.
        """
        if self._is_carrying_out:
            if wakes:
                self.engine.wake()  # a decision had a result at once
            return
        self.carry_out_now()
        if wakes:
            self.engine.wake()
        self._clock.wake_at(self.scheduler.wake_at_s)

    def carry_out_now(self) -> None:
        """Carry out all decisions without setting the next tick, when no deadline has changed."""
        self._is_carrying_out = True
        try:
            while decisions := self.scheduler.decisions.take():
                for decision in decisions:
                    self._do(decision)
        finally:
            self._is_carrying_out = False

    def _do(self, decision: Decision) -> None:
        match decision:
            case Report(event=event):
                self._link.send(**event)
            case SendHeartbeat():
                self._link.send(heartbeat=self.heartbeat())
            case CompileGrammar():
                assert self.grammars is not None, "a node without grammars"
                self.grammars.carry_out(decision)
            case LoadAdapter() | UnloadAdapter():
                assert self.adapters is not None, "a node without adapters"
                self.adapters.carry_out(decision)
            case Offload() | Load() | CancelLoad():
                assert self.offload is not None, "a node without KV offload"
                self.offload.carry_out(decision)
            case OpenRemoteKV() | RevokeRemoteKV() | CloseRemoteKV():
                assert self.remote_kvs is not None, "a node without tiles"
                self.remote_kvs.carry_out(decision)
            case _:
                self.transfers.carry_out(decision)
