"""Simulate a whole fleet under a load, with the clients that send it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, Protocol

from coordinator.api.statuses import retry_after_s
from coordinator.control.load import Prompt
from coordinator.control.placement.costs import FETCH_AUTO
from coordinator.control.placement.policy import AUTO
from coordinator.control.roles import FIXED
from coordinator.control.slo import MS, Slo
from coordinator.settings import ADMIT_ALL, CoordinatorSettings
from protos import inference_pb2
from serving_core.errors import RequestError, SettingsError
from serving_core.requests import SamplingParams
from serving_core.shapes import DECODE, MIXED, PREFILL
from splitserve_bench.serve.records import (
    KEPT,
    REFUSALS,
    Outcome,
    PlannedRequest,
    Reply,
    TierUse,
    returns_at_s,
    times_of,
)
from splitserve_bench.serve.turns import Ended, Turns, not_sent
from splitserve_bench.simulate.coordinator import Clients, SimulatedCoordinator
from splitserve_bench.simulate.costs import NO_DRAWS, NO_NOISE, Costs, Draws, Machine, Noise, costs_of
from splitserve_bench.simulate.events import Agenda, ToyModel
from splitserve_bench.simulate.node import SimulatedNode
from splitserve_bench.simulate.profile import NodeSizes, Profile
from splitserve_bench.simulate.transfer import Transfers


class Server(Protocol):
    """The coordinator, as clients know it."""

    def submit(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, *, deadline_s: float, slo: Slo | None = None
    ) -> None: ...


class LoadClients:
    """Send every request of a load, each from a client of its own, and collect the outcomes."""

    def __init__(
        self,
        agenda: Agenda,
        planned: Sequence[PlannedRequest],
        *,
        model: ToyModel,
        api_server_s: float,
        max_concurrency: int | None,
        request_timeout_s: float,
        obey_retry_after: int = 0,
        noise: Draws = NO_DRAWS,
    ) -> None:
        """Prepare the load `planned`, for a `model` by which every output is checked.

        `api_server_s` are the seconds from a client to the coordinator and back, times a factor of the `noise` for each
        request. At most `max_concurrency` requests run at a time (None: any number). A refused request is sent again at
        the moment that the server names, at most `obey_retry_after` times.
        """
        self._agenda, self._planned = agenda, planned
        self._model = model
        self._half_s, self._noise = api_server_s / 2, noise
        self._num_free = max_concurrency or len(planned)
        self._timeout_s, self._most_repeats = request_timeout_s, obey_retry_after
        self._waiting: deque[PlannedRequest] = deque()
        self._answers: dict[str, _Answer] = {}
        self._outcomes: dict[int, list[Outcome]] = {each.index: [] for each in planned}
        self._num_left = len(planned)

    @property
    def outcomes(self) -> list[Outcome]:
        """Return the outcomes in the order of the load; those of the sendings of a request follow each other."""
        return [outcome for each in self._outcomes.values() for outcome in each]

    @property
    def is_over(self) -> bool:
        """Return whether every request has ended and none will be sent again."""
        return not self._num_left

    def start(self, server: Server) -> None:
        """Plan the sending of each request to this coordinator, at its time."""
        self._server = server
        self._turns = Turns(self._planned)
        self._plan(self._turns.first)

    def _plan(self, requests: Sequence[PlannedRequest]) -> None:
        for planned in requests:
            self._agenda.at(planned.send_at_s, lambda planned=planned: self._due(planned))  # type: ignore[misc]

    def _due(self, planned: PlannedRequest) -> None:
        self._waiting.append(planned)
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self._num_free:
            self._num_free -= 1
            self._send(self._waiting.popleft())

    def _send(self, planned: PlannedRequest) -> None:
        request_id = f"{planned.index}/{planned.num_refusals_before}"
        half_s = self._half_s * self._noise.factor(planned.index)
        self._answers[request_id] = _Answer(planned, Reply(planned, lambda: self._agenda.now), half_s)
        sampling = SamplingParams(max_tokens=planned.output_tokens, temperature=0.0, ignore_eos=True)
        prompt, deadline_s, slo = Prompt(planned.prompt), self._agenda.now + self._timeout_s, slo_of(planned)
        self._agenda.after(
            half_s,
            lambda: self._server.submit(request_id, prompt, sampling, deadline_s=deadline_s, slo=slo),
        )

    # ---- what comes ----

    def arrived(self, request_id: str, token_ids: Sequence[int], moment_s: float) -> None:
        """Record tokens of an output, which left the coordinator at this moment."""
        answer = self._answers[request_id]
        answer.token_ids += token_ids
        answer.reply.arrived(moment_s + answer.half_s, len(token_ids))

    def ended(self, request_id: str, outcome: inference_pb2.Complete | RequestError) -> None:
        """Record the end of a request, which leaves the coordinator now: complete, or a RequestError."""
        self._agenda.after(self._answers[request_id].half_s, lambda: self._end(request_id, outcome))

    def _end(self, request_id: str, outcome: inference_pb2.Complete | RequestError) -> None:
        answer = self._answers.pop(request_id)
        self._model.check_output(answer.planned.prompt, answer.token_ids)
        if isinstance(outcome, RequestError):
            is_refused = outcome.reason in REFUSALS
            wait_s = retry_after_s(outcome) if is_refused else None
            answer.reply.timeline = times_of(outcome.metadata) or None
            result = answer.reply.outcome(str(outcome), is_refused=is_refused, retry_after_s=wait_s)
        else:
            answer.reply.num_output_tokens = outcome.completion_tokens
            answer.reply.timeline = times_of({name: getattr(outcome.timeline, name) for name in KEPT})
            answer.reply.num_cached_tokens = outcome.cached_tokens
            answer.reply.decode_node = outcome.timeline.decode_node
            result = answer.reply.outcome()
        self._outcomes[result.index].append(result)
        again_s = returns_at_s(result, self._most_repeats, self._timeout_s)
        if again_s is None:
            self._num_left -= 1
            self._plan_turns(Ended(answer.planned, None if result.error else answer.token_ids))
        else:
            num_before = result.num_refusals_before + 1
            again = replace(answer.planned, send_at_s=again_s, num_refusals_before=num_before)
            self._agenda.at(again_s, lambda: self._due(again))
        self._num_free += 1
        self._send_waiting()

    def _plan_turns(self, ended: Ended) -> None:
        """Plan the requests that waited for one that has ended, or record that they are not sent."""
        ready, dropped = self._turns.ended(ended, self._agenda.now)
        for each in dropped:
            self._outcomes[each.index].append(not_sent(each, self._agenda.now))
        self._num_left -= len(dropped)
        self._plan(ready)


@dataclass(slots=True)
class _Answer:
    """One request under way."""

    planned: PlannedRequest
    reply: Reply
    half_s: float  # from its client to the coordinator, or back
    token_ids: list[int] = field(default_factory=list)


def slo_of(planned: PlannedRequest) -> Slo | None:
    """Return the limits that the request carries to the server, or None when it has none."""
    ttft_s, tpot_s = (each_ms and each_ms / MS for each_ms in (planned.ttft_ms, planned.tpot_ms))
    slo = Slo("", ttft_s, tpot_s)
    return slo if slo.has_limits else None


MOST_NODES: Final = 1024
NODES_PER_MACHINE: Final = 2  # as doctor measures them

Node = tuple[str, str, Profile]
"""Its name, the role that it begins in, and its profile."""


@dataclass(frozen=True, slots=True)
class FleetSize:
    """How many nodes start in each role, how the coordinator is set, and how many nodes share a machine."""

    prefill: int
    decode: int
    mixed: int = 0
    roles: str = FIXED
    policy: str = AUTO
    admission: str = ADMIT_ALL
    remote_prefix_fetch: str = FETCH_AUTO
    nodes_per_machine: int = NODES_PER_MACHINE

    def __str__(self) -> str:
        counts = {"P": self.prefill, "D": self.decode, "B": self.mixed}
        name = "+".join(f"{count}{letter}" for letter, count in counts.items() if count)
        others = ((self.roles, FIXED), (self.policy, AUTO), (self.admission, ADMIT_ALL))
        prefix_sends = [] if self.remote_prefix_fetch == FETCH_AUTO else [f"lending_{self.remote_prefix_fetch}"]
        shared = [] if self.nodes_per_machine == NODES_PER_MACHINE else [f"{self.nodes_per_machine}_a_machine"]
        return "-".join([name, *(value for value, usual in others if value != usual), *prefix_sends, *shared])

    @property
    def settings(self) -> CoordinatorSettings:
        """Return the settings of the fleet's coordinator."""
        return CoordinatorSettings(
            roles=self.roles, policy=self.policy, admission=self.admission, remote_prefix_fetch=self.remote_prefix_fetch
        )

    def check(self) -> None:
        """Raise SettingsError for a fleet that cannot serve requests, or has too many nodes."""
        if not 0 < self.prefill + self.decode + self.mixed <= MOST_NODES:
            raise SettingsError(f"a fleet has 1 to {MOST_NODES} nodes, not {self.prefill + self.decode + self.mixed}")
        if self.nodes_per_machine < 1:
            raise SettingsError(f"a machine has 1 node or more, not {self.nodes_per_machine}")
        if not (self.prefill + self.mixed and self.decode + self.mixed):
            raise SettingsError(f"{self} cannot answer: some node has to prefill and some to decode")

    def nodes(self) -> list[tuple[str, str]]:
        """Return the name and the starting role of each node."""
        counts = {PREFILL: self.prefill, DECODE: self.decode, MIXED: self.mixed}
        return [(f"{role}-{index}", role) for role, count in counts.items() for index in range(count)]


@dataclass(frozen=True, slots=True)
class Simulated:
    """The outcomes in the order of the load, what the nodes' KV offload did (None where they have none), and the times
    of the role changes that the load caused.
    """

    outcomes: list[Outcome]
    tier: TierUse | None
    role_changes_s: list[float]


class Fleet:
    """Nodes, the transfers between them, and their coordinator."""

    def __init__(
        self,
        agenda: Agenda,
        clients: Clients,
        sizes: NodeSizes,
        model: ToyModel,
        settings: CoordinatorSettings | None = None,
        *,
        transfers: Transfers | None = None,
    ) -> None:
        self._agenda, self._sizes, self._model = agenda, sizes, model
        self.transfers = transfers or Transfers(agenda, sizes)
        self.coordinator = SimulatedCoordinator(agenda, clients, settings or CoordinatorSettings())
        self.nodes: dict[str, SimulatedNode] = {}

    def start(
        self,
        name: str,
        role: str,
        costs: Costs,
        sizes: NodeSizes | None = None,
        machine: Machine | None = None,
        noise: Noise = NO_NOISE,
    ) -> SimulatedNode:
        """Add a node, or one in the place of a lost one, and attach it to the coordinator; return it.

        Its `sizes` are the fleet's unless given; `machine` is shared with other nodes, None when nothing depends on
        them.
        """
        node = SimulatedNode(
            name,
            role,
            sizes or self._sizes,
            self._model,
            costs,
            self._agenda,
            self.transfers,
            machine=machine,
            noise=noise,
        )
        self.nodes[name] = node
        self.coordinator.attach(node)
        return node

    def lose(self, name: str) -> None:
        """End the node's process: its transfers and its stream end too."""
        node = self.nodes.pop(name)
        node.lost()
        self.transfers.lose(node)
        self.coordinator.lose(node)


def simulate(
    profile: Profile,
    size: FleetSize,
    planned: Sequence[PlannedRequest],
    *,
    max_concurrency: int | None,
    request_timeout_s: float,
    obey_retry_after: int = 0,
    seed: int = 0,
) -> Simulated:
    """Simulate a fleet of nodes with this profile under the load `planned`, and return what became of each request.

    The same arguments give the same result. At most `max_concurrency` requests run at a time (None: any number); a
    request that takes longer than `request_timeout_s` fails. A refused request is sent again at the moment that the
    server names, at most `obey_retry_after` times. `seed` draws how step and message times vary around the profile.
    Raises BenchError when nothing can happen any more before all requests have ended.
    """
    agenda, model = Agenda(), ToyModel(profile.node.vocab_size)
    clients = LoadClients(
        agenda,
        planned,
        model=model,
        api_server_s=profile.control.api_server_s,
        noise=Draws(profile.control.spread, f"{seed} clients"),
        max_concurrency=max_concurrency,
        request_timeout_s=request_timeout_s,
        obey_retry_after=obey_retry_after,
    )
    fleet = Fleet(agenda, clients, profile.node, model, size.settings)
    start_nodes(fleet, [(*node, profile) for node in size.nodes()], size.nodes_per_machine, seed)
    clients.start(fleet.coordinator)
    agenda.run(lambda: clients.is_over)
    return Simulated(clients.outcomes, _tier_use(fleet, profile.node), fleet.coordinator.role_changes_s)


def _tier_use(fleet: Fleet, sizes: NodeSizes) -> TierUse | None:
    if not sizes.tier.num_blocks:
        return None
    loads = [node.tier_load for node in fleet.nodes.values()]
    return TierUse(
        block_tokens=sizes.block_size,
        num_hits=sum(load.num_hits for load in loads),
        num_misses=sum(load.num_misses for load in loads),
        read_s=sum(load.read_s for load in loads),
        saved_s=sum(load.saved_s for load in loads),
    )


def start_nodes(fleet: Fleet, nodes: Sequence[Node], nodes_per_machine: int = NODES_PER_MACHINE, seed: int = 0) -> None:
    """Start nodes. Each `nodes_per_machine` consecutive ones of one profile share a machine.

    A node that shares none, or whose profile is the same alone as beside others, needs no machine. `seed` draws the
    variation of each node.
    """
    for profile, alike in groupby(nodes, key=lambda node: node[2]):
        named, steps = [(name, role) for name, role, _ in alike], profile.steps
        for first in range(0, len(named), nodes_per_machine):
            on_machine = named[first : first + nodes_per_machine]
            has_company = len(on_machine) > 1
            costs, alone = costs_of(profile, is_alone=not has_company), costs_of(profile, is_alone=True)
            machine = Machine(alone) if has_company and steps.knows_neighbours else None
            for name, role in on_machine:
                noise = Noise(steps.answers_spread, steps.prompts_spread, profile.control.spread, f"{seed} {name}")
                fleet.start(name, role, costs, profile.node, machine, noise)
