"""A plan under a load: the simulator's fleet, with nodes that differ, hosts, and links within and between them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.settings import CoordinatorSettings
from serving_core.shapes import BOTH, DECODE, PREFILL
from splitserve_bench.compare.search import MOST_SEEDS
from splitserve_bench.plan.clients import JudgingClients
from splitserve_bench.plan.nodes import NodeKind
from splitserve_bench.plan.plans import Plan
from splitserve_bench.serve.metrics import Limits, effective_size
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.agenda import Agenda
from splitserve_bench.simulate.corridor import Corridor, End
from splitserve_bench.simulate.costs import LEAST_STEP_S, START_TOKENS, StepLoad, seconds_of
from splitserve_bench.simulate.fleet import Fleet, FleetSize, start_nodes
from splitserve_bench.simulate.toy_model import ToyModel

MOST_IN_FLIGHT: Final = 65_536  # answers at once, as far as the coordinator goes
ENOUGH_TOKENS: Final = 64  # of an answer, which tell its pace
PERCENTILE: Final = 0.9
DIGITS: Final = 6  # of seconds


@dataclass(frozen=True, slots=True)
class Played:
    """What became of the requests that count. num_good are the most that can be, when the simulation ended early:
    is_early. Times are those of each, infinite where it had none by the end."""

    rate: float
    num_good: int
    num_counted: int
    num_effective: float
    ttfts_s: Sequence[float]
    tpots_s: Sequence[float]  # of answers of more than one token
    missed: dict[str, int]  # by limit
    is_early: bool


class PlannedCosts:
    """What one node of a plan costs, on its host."""

    def __init__(self, kind: NodeKind, host: int) -> None:
        self.kind, self.host = kind, host
        self.prefill_tokens_per_s = START_TOKENS / max(LEAST_STEP_S, kind.steps.chunk_s(START_TOKENS, 0))

    def step_s(self, load: StepLoad) -> float:
        return max(LEAST_STEP_S, seconds_of(self.kind.steps, load))

    def message_s(self, sent_s: float) -> float:
        return self.kind.message_s

    def latency_s(self) -> float:
        return self.kind.transfer_s

    def bytes_s(self, num_bytes: int) -> float:
        return num_bytes / (self.kind.bytes_per_s * self.kind.num_sending)


class LinkedCorridor(Corridor):
    """Whose bytes go by the link between two nodes: each rank sends its part, as many at once as both ends have."""

    def bytes_s(self, sender: End, receiver: End, num_bytes: int) -> float:
        ends = [end.costs for end in (sender, receiver) if isinstance(end.costs, PlannedCosts)]
        is_near = len({end.host for end in ends}) == 1
        rank_bytes_per_s = min(end.kind.bytes_per_s if is_near else end.kind.host_bytes_per_s for end in ends)
        return num_bytes / (rank_bytes_per_s * min(end.kind.num_sending for end in ends))


def play(
    plan: Plan,
    planned: Sequence[PlannedRequest],
    limits: Limits,
    *,
    rate: float,
    num_before: int,
    num_counted: int,
    door_s: float,
    attainment: float,
) -> Played:
    """The same arguments give the same figures. It ends early when so many have missed that all seeds of this rate
    together do not have that attainment, whatever the others find."""
    most_missed = round(MOST_SEEDS * (1 - attainment) * num_counted)
    clients = JudgingClients(Agenda(), planned, limits, door_s, num_before, num_counted, most_missed, ENOUGH_TOKENS)
    run_clients(plan, clients)
    if not clients.is_early:
        clients.close()
    return _played(clients, rate)


def run_clients(plan: Plan, clients: JudgingClients) -> None:
    """Until they have what they want."""
    agenda, kind = clients.agenda, plan.pools[0].kind
    sizes, settings = kind.sizes, CoordinatorSettings(max_num_queued_reqs=MOST_IN_FLIGHT)
    corridor = LinkedCorridor(agenda, sizes.layout, block_bytes=sizes.block_bytes) if kind.profile is None else None
    fleet = Fleet(agenda, clients, sizes, ToyModel(sizes.vocab_size), settings, corridor=corridor)
    if kind.profile is not None:  # all nodes are of one profile
        start_nodes(fleet, kind.profile, FleetSize(plan.count_of(PREFILL), plan.count_of(DECODE), plan.count_of(BOTH)))
    else:
        for placed in plan.placed():
            fleet.start(placed.name, placed.role, PlannedCosts(placed.kind, placed.host), sizes=placed.kind.sizes)
    clients.start(fleet.coordinator)
    agenda.run(lambda: clients.is_over)
    fleet.coordinator.catch_up()


def _played(clients: JudgingClients, rate: float) -> Played:
    are_good = [judged.is_good is not False for judged in clients.judged]
    tpots_s = [tpot_s for judged in clients.judged if (tpot_s := judged.tpot_s) is not None]
    return Played(
        rate=rate,
        num_good=sum(are_good),
        num_counted=len(are_good),
        num_effective=effective_size(are_good),
        ttfts_s=[round(judged.ttft_s, DIGITS) for judged in clients.judged],
        tpots_s=[round(tpot_s, DIGITS) for tpot_s in tpots_s],
        missed=dict(Counter(judged.missed for judged in clients.judged if judged.missed)),
        is_early=clients.is_early,
    )


def percentile(values: Sequence[float]) -> float:
    """The least value that nine in ten do not exceed: infinite where less than nine in ten are finite."""
    return sorted(values)[math.ceil(PERCENTILE * len(values)) - 1] if values else 0.0
