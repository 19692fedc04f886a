"""Fleets under virtual time: the simulator, with nodes whose steps take as long as a formula says."""

from dataclasses import dataclass

from coordinator.control.roles import FIXED
from coordinator.settings import CoordinatorSettings
from serving_core.shapes import role_of
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.events import Agenda, ToyModel
from splitserve_bench.simulate.fleet import Fleet, LoadClients
from splitserve_bench.simulate.profile import NodeSizes

TRANSFER_S = 0.03
STEP_S, STEP_PER_REQUEST_S = 0.02, 0.001
NEVER_S = 1e6
VOCAB_SIZE = 1000
ROLES = {"p": "prefill", "d": "decode", "b": "mixed"}


@dataclass(frozen=True)
class Rated:
    """The costs of a node that computes so many prompt tokens a second."""

    prefill_tokens_per_s: float

    def step_s(self, load):
        answers_s = STEP_S + STEP_PER_REQUEST_S * load.num_sequences if load.num_sequences else 0.0
        return answers_s + load.num_prompt_tokens / self.prefill_tokens_per_s

    def message_s(self, sent_s):
        return 0.0

    def latency_s(self):
        return TRANSFER_S

    def bytes_s(self, num_bytes):
        return 0.0


class RolesSeen:
    """The changes of role in a fleet, as they are seen ten times a second: (node, role)."""

    def __init__(self, agenda, fleet):
        self._agenda, self._fleet = agenda, fleet
        self._last = self._now()
        self.changes = []
        self._look()

    def _now(self):
        return {name: role_of(node.scheduler.shape) for name, node in self._fleet.nodes.items()}

    def _look(self):
        now = self._now()
        self.changes += [(name, role) for name, role in now.items() if role != self._last[name]]
        self._last = now
        self._agenda.after(0.1, self._look)


def mean_request_s(rates, requests, max_num_seqs=64):
    """The mean time from arrival to end of requests: (arrival, prompt tokens, answer tokens)."""
    return serve(rates, requests, max_num_seqs)[0]


def serve(rates, requests, max_num_seqs=64, roles=FIXED, watch=None):
    """The mean time, and the changes of role. `rates` are prompt tokens a second by node; p0 begins as a prefill node,
    d0 as a decode node, b0 as both. `watch` is given the agenda and the fleet before it starts."""
    sizes = NodeSizes(
        num_blocks=10_000,
        block_size=16,
        block_bytes=16,
        num_layers=1,
        max_model_len=10_000,
        vocab_size=VOCAB_SIZE,
        max_num_batched_tokens=512,
        max_num_seqs=max_num_seqs,
        max_num_queued=10_000,
        overlap_min_tokens=16,
    )
    planned = [
        PlannedRequest(index, at_s, (index, *[1] * (num_prompt_tokens - 1)), num_answer_tokens)
        for index, (at_s, num_prompt_tokens, num_answer_tokens) in enumerate(requests)
    ]
    agenda, model = Agenda(), ToyModel(VOCAB_SIZE)
    limits = {"max_concurrency": None, "request_timeout_s": NEVER_S, "api_server_s": 0.0}
    clients = LoadClients(agenda, planned, model=model, **limits)
    everyone = {"max_restarts": 0, "keep_after_s": NEVER_S, "max_queue_wait_s": 0.0}  # is answered, however late
    fleet = Fleet(agenda, clients, sizes, model, CoordinatorSettings(roles=roles, **everyone))
    for name, rate in rates.items():
        fleet.start(name, ROLES[name[0]], Rated(rate))
    seen = RolesSeen(agenda, fleet)
    if watch is not None:
        watch(agenda, fleet)
    clients.start(fleet.coordinator)
    agenda.run(lambda: clients.is_over)
    assert not [outcome.error for outcome in clients.outcomes if outcome.error]
    mean_s = sum(outcome.ended_s - outcome.scheduled_s for outcome in clients.outcomes) / len(planned)
    return mean_s, seen.changes
