"""Small simulated fleets of any make, where everything takes as long as it likes, and what may befall them."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from random import Random

from coordinator.control.migration import check_target
from coordinator.control.slo import Slo
from coordinator.settings import CoordinatorSettings
from protos import inference_pb2
from serving_core.errors import RequestError
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.costs import Machine, Noise
from splitserve_bench.simulate.events import Agenda, ToyModel
from splitserve_bench.simulate.fleet import Fleet, LoadClients
from splitserve_bench.simulate.profile import Spread
from tests.unit.splitserve_bench.simulate_kit import SIZES, abort

BLOCK_SIZE = 4
VOCAB_SIZE = 97
TIMEOUT_S = 200.0
SETTLE_S = 60.0
SPREADS = (Spread((0.1, 0.9), (0.5, 2.0)), Spread((0.0, 0.9, 1.0), (0.9, 1.0, 4.0)), Spread((0.0, 1.0), (0.0, 1.0)))
ROLES = ("prefill", "decode", "mixed")
FLEETS = (
    ("prefill", "decode"), ("mixed",), ("mixed", "mixed"), ("prefill", "mixed"), ("decode", "mixed"),
    ("prefill", "decode", "decode"), ("prefill", "decode", "mixed", "mixed"),
)  # fmt: skip


class WildCosts:
    """Everything takes any time, also none: the same whenever it is asked. Noise comes on top of that."""

    prefill_tokens_per_s = 0.0

    def __init__(self, random):
        self._salt = random.random()
        self.most_message_s = random.choice([0.0, 0.002, 0.02])
        self._most_latency_s = random.choice([0.0, 0.005, 0.05])
        self._random = Random(self._salt)

    def _drawn(self, *of):
        return Random(f"{self._salt} {of}").random()

    def step_s(self, load):
        tokens = load.num_sequences + load.num_prompt_tokens
        figures = load.num_sequences, load.num_cached, load.num_prompt_tokens, load.num_before
        return 5e-4 * tokens + self._drawn(figures) * 0.01 + 1e-6

    def message_s(self, sent_s):
        return self._drawn(sent_s) * self.most_message_s

    def latency_s(self):
        return self._random.random() * self._most_latency_s

    def bytes_s(self, num_bytes):
        return num_bytes * 1e-7


class AloneCosts(WildCosts):
    """Of a node whose neighbours rest: so many times as long."""

    def __init__(self, beside, factor):
        self._beside, self._factor = beside, factor

    def step_s(self, load):
        return self._beside.step_s(load) * self._factor


class World:
    """One fleet under one load. `troubles` are names of methods, each of which befalls it a few times; with
    `has_limits` most requests have some. Their priorities are any of these, and the first one's is the last. With an
    `alone_factor` all nodes share a machine."""

    def __init__(
        self,
        seed,
        *,
        troubles=(),
        num_requests=20,
        fleet=None,
        num_blocks=None,
        has_limits=False,
        priorities=(0,),
        alone_factor=None,
    ):
        self.random = Random(seed)
        self.seen = Counter()
        self.num_blocks = num_blocks or self.random.choice([8, 12, 30, 150])
        self.span_s = self.random.choice([0.02, 0.5])  # in which all requests come
        self.sizes = replace(
            SIZES,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            max_num_batched_tokens=self.random.randint(6, 40),
            max_num_seqs=self.random.randint(1, 9),
        )
        self.planned = [self._request(index) for index in range(num_requests)]
        self.agenda, model = Agenda(), ToyModel(VOCAB_SIZE)
        limits = {"max_concurrency": None, "request_timeout_s": TIMEOUT_S, "api_server_s": 0.001}
        self.clients = LoadClients(self.agenda, self.planned, model=model, **limits)
        settings = CoordinatorSettings(
            max_restarts=self.random.choice([0, 2, 20]),
            keep_after_s=self.random.choice([0.1, 2.0]),
            roles=self.random.choice(["fixed", "auto"]),
        )
        self.fleet = Fleet(self.agenda, self.clients, self.sizes, model, settings)
        if has_limits or len(priorities) > 1:
            self._ask_for_more(self.fleet.coordinator.scheduler, has_limits, priorities)
        self.costs = WildCosts(self.random)
        self.roles = {f"{role}{index}": role for index, role in enumerate(fleet or self.random.choice(FLEETS))}
        self.machine = None if alone_factor is None else Machine(AloneCosts(self.costs, alone_factor))
        for name, role in self.roles.items():
            self._start(name, role)
        for trouble in troubles:
            for _ in range(self.random.randint(1, 4)):
                self.agenda.at(self.random.random() * 1.2, getattr(self, trouble))

    def _start(self, name, role):
        self.fleet.start(name, role, self.costs, machine=self.machine, noise=Noise(*SPREADS, seed=name))

    def _request(self, index):
        """Of any size that fits; many begin alike."""
        room = self.num_blocks * BLOCK_SIZE
        turn = [self.random.randrange(2) for _ in range(self.random.choice([1, 9]))] * 40
        num_common = self.random.randint(0, min(20, room - 10))
        prompt = turn[:num_common] + [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 6))]
        num_output_tokens = self.random.randint(1, min(room - len(prompt), self.random.choice([3, 30, 150])))
        return PlannedRequest(index, self.random.random() * self.span_s, tuple(prompt), num_output_tokens)

    def _ask_for_more(self, scheduler, has_limits, priorities):
        submit, random = scheduler.submit, Random(f"{self.random.random()} limits")

        def submit_with_more(request_id, *arguments, **options):
            spans = ((0.01, 1.0), (0.002, 0.03)) if has_limits else ()
            limits = [random.choice([None, random.uniform(*span)]) for span in spans] or [None, None]
            priority = priorities[-1] if request_id == "0/0" else random.choice(priorities)
            return submit(request_id, *arguments, **{**options, "slo": Slo("", *limits, priority)})

        scheduler.submit = submit_with_more

    def run(self):
        """What becomes of the load, when nothing of it is left in the fleet."""
        self.clients.start(self.fleet.coordinator)
        self.agenda.run(lambda: self.clients.is_over)
        last_s = self.agenda.now + SETTLE_S
        self.agenda.run(lambda: self.is_quiet or self.agenda.now > last_s)
        self._check_end()
        return self.clients.outcomes

    def watch(self, look, every_s=0.003):
        """Looks again and again, while the load runs."""
        look()
        if not (self.clients.is_over and self.is_quiet):
            self.agenda.after(every_s, lambda: self.watch(look, every_s))

    @property
    def tracked(self):
        """The live answers that nodes have, as the coordinator has them."""
        scheduler = self.fleet.coordinator.scheduler
        return [request for request in scheduler.newest(scheduler.num_open) if request.is_on_nodes]

    @property
    def is_quiet(self):
        nodes = self.fleet.nodes.values()
        return self.fleet.coordinator.scheduler.num_open == 0 and all(node.scheduler.is_idle for node in nodes)

    def _check_end(self):
        assert self.is_quiet, "something is held that nobody needs"
        for node in self.fleet.nodes.values():
            node.allocator.check_integrity()
            node.scheduler.node_requests.check_integrity()
            assert node.allocator.num_free == self.num_blocks, "a block is not back"
            assert node.scheduler.wake_at_s is None
        metrics = self.fleet.coordinator.metrics
        self.seen["kept"] += metrics.num_kept
        self.seen["restarted"] += metrics.num_restarts
        for node in self.fleet.nodes.values():
            load = inference_pb2.NodeLoad()
            node.scheduler.describe(load)
            self.seen["preempted"] += load.num_preemptions
            self.seen["handed over"] += load.num_kv_bytes > 0
        for outcome, planned in zip(self.clients.outcomes, self.planned, strict=True):
            if not outcome.error:
                is_whole = outcome.num_output_tokens == planned.output_tokens
                self.seen["whole" if is_whole else "cut"] += 1
            self.seen["failed"] += bool(outcome.error)
        self.seen["migrated"] += metrics.migrations["migrated"]

    # ---- troubles ----

    def cancel(self):
        index = self.random.randrange(len(self.planned))
        abort(self.fleet.coordinator, f"{index}/0", self.agenda.now)

    def lose(self):
        """A node is gone, and comes back later with nothing."""
        name = self.random.choice(sorted(self.roles))
        if name in self.fleet.nodes:
            self.fleet.lose(name)
            self.seen["lost"] += 1
            self.agenda.after(self.random.random() * 0.5, lambda: self._start(name, self.roles[name]))

    def flip(self):
        with suppress(RequestError):  # the last reader and the last writer stay
            coordinator, now = self.fleet.coordinator, self.agenda.now
            name, role = self.random.choice(sorted(self.roles)), self.random.choice(ROLES)
            _, _, instructions = coordinator.roles.set_shape(name, role, now)
            coordinator.apply(instructions, now)
            self.seen["flipped"] += 1

    def drain(self):
        """A node is drained, and begins anew when it is idle."""
        name = self.random.choice(sorted(self.roles))
        with suppress(RequestError):
            coordinator = self.fleet.coordinator
            node = coordinator.registry.named(name)
            check_target(node, coordinator.registry.nodes)
            coordinator.registry.drain(node)
            coordinator.apply(coordinator.scheduler.tick(self.agenda.now), self.agenda.now)
            self.seen["drained"] += 1
            self._restart_when_idle(self.fleet.nodes[name])

    def _restart_when_idle(self, node):
        if self.fleet.nodes.get(node.name) is not node:
            return
        coordinator = self.fleet.coordinator
        if node.scheduler.is_idle and not coordinator.scheduler.num_left(coordinator.registry.named(node.name)):
            self.fleet.lose(node.name)
            self._start(node.name, self.roles[node.name])
        else:
            self.agenda.after(0.05, lambda: self._restart_when_idle(node))
