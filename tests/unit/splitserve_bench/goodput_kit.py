"""Loads with limits on simulated fleets whose costs can be added up on paper: one load for all that is compared, and
clients, settings and costs of a special make where a test asks for them."""

from dataclasses import dataclass
from itertools import accumulate
from random import Random

from coordinator.settings import CoordinatorSettings
from splitserve_bench.serve.metrics import Limits, is_good, with_limits
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.costs import ProfileCosts
from splitserve_bench.simulate.events import Agenda, ToyModel
from splitserve_bench.simulate.fleet import Fleet, FleetSize, LoadClients
from splitserve_bench.simulate.profile import NodeSizes
from tests.unit.splitserve_bench.simulate_kit import API_SERVER_S, PROFILE, SIZES, VOCAB_SIZE

LIMITS = Limits(ttft_s=1.0, tpot_s=0.05)
TIMEOUT_S = 1000.0
# Requests a second of which some nine tenths are good, as measured.
KNEES = {(1, 1, 0): 8.0, (0, 0, 2): 6.0, (1, 0, 1): 8.0, (2, 2, 0): 15.0}


def fleet_of(counts, admission):
    return FleetSize(*counts, admission=admission)


def load(rate, num_requests, seed, *, start_s=0.0, first_index=0):
    """Prompts of some 150 tokens and answers of some 40, at random moments that end after num_requests / rate. Of one
    seed every rate sends the same requests, closer together or not."""
    random = Random(f"{seed} load")
    passed = list(accumulate(random.expovariate(1.0) for _ in range(num_requests + 1)))
    planned = []
    for number in range(num_requests):
        num_prompt_tokens = min(600, 1 + int(random.lognormvariate(4.7, 0.8)))
        num_output_tokens = min(200, 2 + int(random.lognormvariate(3.4, 0.7)))
        prompt = tuple(random.choices(range(VOCAB_SIZE), k=num_prompt_tokens))
        at_s = start_s + num_requests / rate * passed[number] / passed[-1]
        planned.append(PlannedRequest(first_index + number, at_s, prompt, num_output_tokens))
    return planned


class ApiServer:
    """Between the clients and the coordinator of a fleet; changes nothing."""

    def __init__(self, agenda, clients):
        self.agenda, self.clients = agenda, clients
        self.fleet = None

    @property
    def coordinator(self):
        return self.fleet.coordinator

    def submit(self, request_id, prompt, sampling, *, deadline_s, slo=None):
        self.coordinator.submit(request_id, prompt, sampling, deadline_s=deadline_s, slo=slo)

    def arrived(self, request_id, tokens, moment_s):
        self.clients.arrived(request_id, tokens, moment_s)

    def ended(self, request_id, outcome):
        self.clients.ended(request_id, outcome)


@dataclass
class World:
    """One load on one fleet; `costs` makes those of the node of this number."""

    size: FleetSize
    planned: list
    limits: Limits = LIMITS
    sizes: NodeSizes = SIZES
    settings: CoordinatorSettings | None = None
    costs: object = lambda number: ProfileCosts(PROFILE)
    api_server: type = ApiServer
    timeout_s: float = TIMEOUT_S

    def run(self):
        """What becomes of it, and the API server."""
        agenda, model = Agenda(), ToyModel(VOCAB_SIZE)
        options = {"max_concurrency": None, "request_timeout_s": self.timeout_s, "api_server_s": API_SERVER_S}
        clients = LoadClients(agenda, with_limits(self.planned, lambda each: self.limits), model=model, **options)
        api_server = self.api_server(agenda, clients)
        fleet = Fleet(agenda, api_server, self.sizes, model, self.settings or self.size.settings)
        api_server.fleet = fleet
        for number, (name, role) in enumerate(self.size.nodes()):
            fleet.start(name, role, self.costs(number))
        clients.start(api_server)
        agenda.run(lambda: clients.is_over)
        return clients.outcomes, api_server


def num_good(outcomes, limits=LIMITS):
    return sum(is_good(each, limits) for each in outcomes)


def attainment(size, rate, seeds, *, num_requests=150, limits=LIMITS, **options):
    """Mean share of good requests over loads of these seeds."""
    found = 0
    for seed in range(seeds):
        outcomes, _ = World(size, load(rate, num_requests, seed), limits, **options).run()
        found += num_good(outcomes, limits)
    return found / (seeds * num_requests)
