"""A whole simulated fleet under a load."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.control.placement.policies import AUTO
from coordinator.control.roles import FIXED
from coordinator.control.transfer_costs import AUTO as LEND_AUTO
from coordinator.settings import ADMIT_ALL, CoordinatorSettings
from serving_core.errors import SettingsError
from serving_core.shapes import BOTH, DECODE, PREFILL
from splitserve_bench.serve.records import Outcome, PlannedRequest, TierUse
from splitserve_bench.simulate.agenda import Agenda
from splitserve_bench.simulate.clients import LoadClients
from splitserve_bench.simulate.coordinator import Clients, SimulatedCoordinator
from splitserve_bench.simulate.corridor import Corridor
from splitserve_bench.simulate.costs import Costs, ProfileCosts
from splitserve_bench.simulate.machine import Machine
from splitserve_bench.simulate.node import SimulatedNode
from splitserve_bench.simulate.noise import NO_NOISE, Draws, Noise
from splitserve_bench.simulate.profile import NodeSizes, Profile
from splitserve_bench.simulate.toy_model import ToyModel

MOST_NODES: Final = 1024
NODES_PER_MACHINE: Final = 2  # as doctor measures them


@dataclass(frozen=True, slots=True)
class FleetSize:
    """How many nodes begin in each role, whether the coordinator changes that, how it places requests, when nodes lend
    each other blocks, and how many of them share a machine."""

    prefill: int
    decode: int
    both: int = 0
    roles: str = FIXED
    policy: str = AUTO
    admission: str = ADMIT_ALL
    kv_lending: str = LEND_AUTO
    nodes_per_machine: int = NODES_PER_MACHINE

    def __str__(self) -> str:
        counts = {"P": self.prefill, "D": self.decode, "B": self.both}
        name = "+".join(f"{count}{letter}" for letter, count in counts.items() if count)
        others = ((self.roles, FIXED), (self.policy, AUTO), (self.admission, ADMIT_ALL))
        lending = [] if self.kv_lending == LEND_AUTO else [f"lending_{self.kv_lending}"]
        shared = [] if self.nodes_per_machine == NODES_PER_MACHINE else [f"{self.nodes_per_machine}_a_machine"]
        return "-".join([name, *(value for value, usual in others if value != usual), *lending, *shared])

    @property
    def settings(self) -> CoordinatorSettings:
        """Of the fleet's coordinator."""
        return CoordinatorSettings(
            roles=self.roles, policy=self.policy, admission=self.admission, kv_lending=self.kv_lending
        )

    def check(self) -> None:
        """Raises SettingsError for a fleet that could not answer."""
        if not 0 < self.prefill + self.decode + self.both <= MOST_NODES:
            raise SettingsError(f"a fleet has 1 to {MOST_NODES} nodes, not {self.prefill + self.decode + self.both}")
        if self.nodes_per_machine < 1:
            raise SettingsError(f"a machine has 1 node or more, not {self.nodes_per_machine}")
        if not (self.prefill + self.both and self.decode + self.both):
            raise SettingsError(f"{self} cannot answer: some node has to read prompts and some to write answers")

    def nodes(self) -> list[tuple[str, str]]:
        """The name of each node, and the role that it begins in."""
        counts = {PREFILL: self.prefill, DECODE: self.decode, BOTH: self.both}
        return [(f"{role}-{index}", role) for role, count in counts.items() for index in range(count)]


@dataclass(frozen=True, slots=True)
class Played:
    """What became of a load; and what the second tiers of the nodes did, None where they have none."""

    outcomes: list[Outcome]
    tier: TierUse | None


class Fleet:
    """Nodes, the corridor between them, and their coordinator."""

    def __init__(
        self,
        agenda: Agenda,
        clients: Clients,
        sizes: NodeSizes,
        model: ToyModel,
        settings: CoordinatorSettings | None = None,
        *,
        corridor: Corridor | None = None,
        takes_streaks: bool = True,
    ) -> None:
        self._agenda, self._sizes, self._model, self._takes_streaks = agenda, sizes, model, takes_streaks
        self.corridor = corridor or Corridor(agenda, sizes.layout, block_bytes=sizes.block_bytes)
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
        """One more node, or one in the place of a lost one; of the fleet's sizes unless it has others."""
        node = SimulatedNode(
            name,
            role,
            sizes or self._sizes,
            self._model,
            costs,
            self._agenda,
            self.corridor,
            machine=machine,
            noise=noise,
            takes_streaks=self._takes_streaks,
        )
        self.nodes[name] = node
        self.coordinator.attach(node)
        return node

    def lose(self, name: str) -> None:
        """The node's process is gone."""
        node = self.nodes.pop(name)
        node.lost()
        self.corridor.lose(node)
        self.coordinator.lose(node)


def simulate(
    profile: Profile,
    size: FleetSize,
    planned: Sequence[PlannedRequest],
    *,
    max_concurrency: int | None,
    request_timeout_s: float,
    seed: int = 0,
) -> list[Outcome]:
    """What becomes of a load on such a fleet. The same arguments give the same outcomes; `seed` draws the noise of the
    profile's spread."""
    played = play(
        profile, size, planned, max_concurrency=max_concurrency, request_timeout_s=request_timeout_s, seed=seed
    )
    return played.outcomes


def play(
    profile: Profile,
    size: FleetSize,
    planned: Sequence[PlannedRequest],
    *,
    max_concurrency: int | None,
    request_timeout_s: float,
    obey_retry_after: int = 0,
    seed: int = 0,
) -> Played:
    """As simulate, and what else there is to tell. Requests are sent again after a refusal as `run_load` does."""
    agenda, model = Agenda(), ToyModel(profile.node.vocab_size)
    clients = LoadClients(
        agenda,
        planned,
        model=model,
        door_s=profile.control.door_s,
        noise=Draws(profile.control.spread, f"{seed} clients"),
        max_concurrency=max_concurrency,
        request_timeout_s=request_timeout_s,
        obey_retry_after=obey_retry_after,
    )
    fleet = Fleet(agenda, clients, profile.node, model, size.settings)
    start_nodes(fleet, profile, size, seed)
    clients.start(fleet.coordinator)
    agenda.run(lambda: clients.is_over)
    return Played(clients.outcomes, _tier_use(fleet, profile.node))


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


def start_nodes(fleet: Fleet, profile: Profile, size: FleetSize, seed: int = 0) -> None:
    """Those that share a machine follow each other. Who shares none, or where that makes no difference, needs none."""
    steps, messages = profile.steps, profile.control.spread
    beside, alone = ProfileCosts(profile), ProfileCosts(profile, is_alone=True)
    nodes = size.nodes()
    for first in range(0, len(nodes), size.nodes_per_machine):
        on_machine = nodes[first : first + size.nodes_per_machine]
        has_company = len(on_machine) > 1
        machine = Machine(alone) if has_company and steps.knows_neighbours else None
        for name, role in on_machine:
            noise = Noise(steps.answers_spread, steps.prompts_spread, messages, f"{seed} {name}")
            fleet.start(name, role, beside if has_company else alone, machine=machine, noise=noise)
