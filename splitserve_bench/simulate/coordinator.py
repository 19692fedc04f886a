"""Simulate the coordinator: the real registry and scheduler, with messages that take time.

The scheduler's instructions are carried out as by coordinator/dispatcher.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from coordinator.control.instructions import Emit, End, Instruction, MigrationEnded, Send
from coordinator.control.load import Ledger, Prompt
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Node, Registry
from coordinator.control.placement.policy import POLICIES
from coordinator.control.roles import Roles
from coordinator.control.scheduler import Scheduler
from coordinator.control.slo import Slo
from coordinator.settings import ADMIT_ALL, CoordinatorSettings
from protos import fleet_pb2, inference_pb2
from serving_core.errors import RequestError
from serving_core.requests import SamplingParams
from splitserve_bench.simulate.events import Agenda, Event, Line
from splitserve_bench.simulate.node import SimulatedNode

TICK_S: Final = 0.25
FIRST_EPOCH: Final = 0


class Clients(Protocol):
    """The clients of a simulation, which the coordinator calls with tokens and with the ends of requests."""

    def arrived(self, request_id: str, token_ids: Sequence[int], moment_s: float) -> None: ...
    def ended(self, request_id: str, outcome: inference_pb2.Complete | RequestError) -> None: ...


@dataclass(slots=True, eq=False)
class Attachment:
    """A node that the coordinator knows, and the lines to and from it."""

    node: SimulatedNode
    commands: Line[fleet_pb2.NodeCommand]
    events: Line[Event]


class SimulatedCoordinator:
    """Schedule the clients' requests on the attached nodes, and call the clients with the results."""

    def __init__(self, agenda: Agenda, clients: Clients, settings: CoordinatorSettings) -> None:
        self._agenda, self._clients, self._settings = agenda, clients, settings
        self.registry = Registry({}, node_timeout_s=settings.node_timeout_s, step_timeout_s=settings.step_timeout_s)
        self.ledger, self.metrics = Ledger(), Metrics()
        self.scheduler = Scheduler(
            self.registry,
            self.ledger,
            self.metrics,
            first_epoch=FIRST_EPOCH,
            max_live=settings.max_num_queued_reqs,
            max_restarts=settings.max_restarts,
            keep_after_s=settings.keep_after_s,
            node_wait_s=settings.node_wait_s,
            fetches=settings.remote_prefix_fetch,
            policy=POLICIES[settings.policy],
            admits_late=settings.admission == ADMIT_ALL,
            max_queue_wait_s=settings.max_queue_wait_s,
        )
        self.roles = Roles(self.registry, self.ledger, policy=settings.roles)
        self.role_changes_s: list[float] = []  # when the role controller sent each
        self._attachments: dict[Node, Attachment] = {}
        agenda.after(TICK_S, self._tick)

    # ---- nodes ----

    def attach(self, node: SimulatedNode) -> None:
        """Attach a node: its messages are delivered from now on."""
        known = self.registry.admit(node.hello(), self._agenda.now)
        message_s, noise = node.costs.message_s, node.noise
        events = Line(self._agenda, message_s, noise.events, partial(self._receive, known))
        commands = Line(self._agenda, message_s, noise.commands, node.worker.handle)
        self._attachments[known] = Attachment(node, commands, events)
        node.line = events
        self._report_load(known)

    def lose(self, node: SimulatedNode) -> None:
        """End a node's stream, as if its process had ended.

        A node that was detached because it was stuck is ignored.
        """
        known = next((each for each, attachment in self._attachments.items() if attachment.node is node), None)
        if known is not None:  # else it was stuck, and is not back yet
            self.apply(self._lose(known), self._agenda.now)

    def _attach_again(self, node: SimulatedNode) -> None:
        """Attach a node that was stuck in a step, once that step has ended."""
        if node.is_in_step:
            self._agenda.after(TICK_S, lambda: self._attach_again(node))
        elif not node.is_lost:
            self.attach(node)

    def _report_load(self, known: Node) -> None:
        if attachment := self._attachments.get(known):
            attachment.node.report_load()
            self._agenda.after(self._settings.heartbeat_s, lambda: self._report_load(known))

    def _receive(self, known: Node, event: Event) -> None:
        now, (kind, body) = self._agenda.now, event
        if kind == "step_tokens":
            self.apply(self.scheduler.step_tokens(known, body, now), now)
        elif kind == "heartbeat":
            self.registry.heartbeat(known, body, now)
        elif kind == "cache_changed":
            self.registry.cache_changed(known, body)
        else:
            self.apply(self.scheduler.handle(known, fleet_pb2.NodeEvent(**{kind: body}), now), now)

    def _lose(self, known: Node) -> list[Instruction]:
        attachment = self._attachments.pop(known)
        attachment.commands.is_cut = attachment.events.is_cut = True
        self.registry.lose(known)
        return self.scheduler.lose(known, self._agenda.now)

    # ---- clients ----

    def submit(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, *, deadline_s: float, slo: Slo | None = None
    ) -> None:
        """Start a request; one that is refused ends at once.

        `deadline_s` is a moment of the simulation, `slo` its limits.
        """
        now = self._agenda.now
        try:
            instructions = self.scheduler.submit(
                request_id, prompt, sampling, arrived_s=now, deadline_s=deadline_s, now=now, slo=slo
            )
        except RequestError as refusal:
            self._clients.ended(request_id, refusal)
        else:
            self.apply(instructions, now)

    # ---- all ----

    def _tick(self) -> None:
        now = self._agenda.now
        for known, *_ in self.registry.expired(now):
            node = self._attachments[known].node
            self.apply(self._lose(known), now)
            node.worker.detached()
            self._attach_again(node)
        self.apply(self.scheduler.tick(now), now)
        role_changes = self.roles.tick(now)
        self.role_changes_s += [now] * len(role_changes)
        self.apply(role_changes, now)
        self._agenda.after(TICK_S, self._tick)

    def apply(self, instructions: Iterable[Instruction], now: float) -> None:
        """Carry out instructions decided at `now`: send commands to nodes, and tokens and ends to clients."""
        for instruction in instructions:
            match instruction:
                case Emit():
                    self._clients.arrived(instruction.request_id, instruction.chunk.token_ids, now)
                case Send(known, command):
                    if attachment := self._attachments.get(known):
                        attachment.commands.send(command)
                case End(request_id, outcome):
                    self._clients.ended(request_id, outcome)
                case MigrationEnded(outcome=outcome):
                    self.metrics.migrations[outcome.value] += 1
