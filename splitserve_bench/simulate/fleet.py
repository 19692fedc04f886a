"""A whole simulated fleet under a load."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.control.loans import AUTO as LEND_AUTO
from coordinator.control.placement.policies import AUTO
from coordinator.control.roles import FIXED
from coordinator.settings import ADMIT_ALL, CoordinatorSettings
from serving_core.errors import SettingsError
from serving_core.shapes import BOTH, DECODE, PREFILL
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.simulate.agenda import Agenda
from splitserve_bench.simulate.clients import LoadClients
from splitserve_bench.simulate.coordinator import Clients, SimulatedCoordinator
from splitserve_bench.simulate.corridor import Corridor
from splitserve_bench.simulate.costs import Costs, ProfileCosts
from splitserve_bench.simulate.node import SimulatedNode
from splitserve_bench.simulate.profile import NodeSizes, Profile
from splitserve_bench.simulate.toy_model import ToyModel

MOST_NODES: Final = 1024


@dataclass(frozen=True, slots=True)
class FleetSize:
    """How many nodes begin in each role, whether the coordinator changes that, how it places requests, and when nodes
    lend each other blocks."""

    prefill: int
    decode: int
    both: int = 0
    roles: str = FIXED
    policy: str = AUTO
    admission: str = ADMIT_ALL
    kv_lending: str = LEND_AUTO

    def __str__(self) -> str:
        counts = {"P": self.prefill, "D": self.decode, "B": self.both}
        name = "+".join(f"{count}{letter}" for letter, count in counts.items() if count)
        others = ((self.roles, FIXED), (self.policy, AUTO), (self.admission, ADMIT_ALL))
        lending = [] if self.kv_lending == LEND_AUTO else [f"lending_{self.kv_lending}"]
        return "-".join([name, *(value for value, usual in others if value != usual), *lending])

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
        if not (self.prefill + self.both and self.decode + self.both):
            raise SettingsError(f"{self} cannot answer: some node has to read prompts and some to write answers")

    def nodes(self) -> list[tuple[str, str]]:
        """The name of each node, and the role that it begins in."""
        counts = {PREFILL: self.prefill, DECODE: self.decode, BOTH: self.both}
        return [(f"{role}-{index}", role) for role, count in counts.items() for index in range(count)]


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

    def start(self, name: str, role: str, costs: Costs, sizes: NodeSizes | None = None) -> SimulatedNode:
        """One more node, or one in the place of a lost one; of the fleet's sizes unless it has others."""
        node = SimulatedNode(
            name,
            role,
            sizes or self._sizes,
            self._model,
            costs,
            self._agenda,
            self.corridor,
            takes_streaks=self._takes_streaks,
        )
        self.nodes[name] = node
        self.coordinator.attach(node)
        return node

    def lose(self, name: str) -> None:
        """The node's process is gone."""
        node = self.nodes.pop(name)
        node.is_lost = True
        self.corridor.lose(node)
        self.coordinator.lose(node)


def simulate(
    profile: Profile,
    size: FleetSize,
    planned: Sequence[PlannedRequest],
    *,
    max_concurrency: int | None,
    request_timeout_s: float,
) -> list[Outcome]:
    """What becomes of a load on such a fleet. The same arguments give the same outcomes."""
    agenda, model = Agenda(), ToyModel(profile.node.vocab_size)
    clients = LoadClients(
        agenda,
        planned,
        model=model,
        door_s=profile.control.door_s,
        max_concurrency=max_concurrency,
        request_timeout_s=request_timeout_s,
    )
    fleet = Fleet(agenda, clients, profile.node, model, size.settings)
    costs = ProfileCosts(profile)
    for name, role in size.nodes():
        fleet.start(name, role, costs)
    clients.start(fleet.coordinator)
    agenda.run(lambda: clients.is_over)
    return clients.outcomes
