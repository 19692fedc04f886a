"""A node's scheduler under a clock that only counts: steps take what a formula says, times some noise."""

from dataclasses import dataclass, field

from protos import convert, fleet_pb2
from serving_core.node.blocks import BlockAllocator
from serving_core.node.costs import StepCosts, StepLoad, StepRates, StepWeights
from serving_core.node.requests import RequestState
from serving_core.requests import Request, SampledToken, SamplingParams
from serving_core.shapes import preset
from serving_node.scheduler import Limits, NodeScheduler
from serving_node.worker import Worker
from tests import fleet_events as events
from tests.toy_kv import FINGERPRINT, HERE
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES, LAYOUT, Ports

BUDGET = 512


class ExactCosts(StepCosts):
    """Knows what steps take before noise, and learns nothing."""

    def __init__(self, weights):
        super().__init__()
        self._weights = StepWeights(*weights)

    def add(self, load, step_s):
        pass


@dataclass
class Asked:
    """A request: read and answered by one node."""

    at_s: float
    num_prompt_tokens: int
    num_tokens: int
    tpot_s: float | None = None
    times_s: list = field(default_factory=list)  # of its tokens
    spared_s: float = 0.0  # that its steps would have been shorter without chunks, since its first token

    @property
    def spent_s(self):
        return self.times_s[-1] - self.times_s[0]

    @property
    def allowed_s(self):
        return (len(self.times_s) - 1) * self.tpot_s


@dataclass
class Step:
    """What became of a step: when it began and ended, and would have ended without chunks; for each answer with a limit
    when its token was due."""

    began_s: float
    ended_s: float
    bare_end_s: float
    num_prompt_tokens: int
    due_s: list


class Clocked(Ports):
    """One node that does both."""

    def __init__(self, true_weights, costs, *, slots=8, noise=lambda: 1.0):
        self.weights, self.noise = true_weights, noise
        self.now = 0.0
        self.asked = []
        self.scheduler = NodeScheduler(
            BlockAllocator(100_000, caching=False),
            LAYOUT,
            Limits(BUDGET, slots, 1000, 30.0, 60.0),
            preset("mixed", max_num_batched_tokens=BUDGET, max_num_seqs=slots),
            block_bytes=BLOCK_BYTES,
            fingerprint=FINGERPRINT,
            numerics=HERE,
            is_batch_invariant=True,
            eos_token_ids=(),
            rates=StepRates(),
            costs=costs,
        )
        self.worker = Worker(self.scheduler, self, self)
        self.worker.engine = self

    def ask(self, asked):
        """It comes now."""
        index = len(self.asked)
        self.asked.append(asked)
        sampling = SamplingParams(max_tokens=asked.num_tokens, ignore_eos=True)
        request = Request(
            str(index), index, [0] * asked.num_prompt_tokens, asked.num_prompt_tokens, sampling, str(index)
        )
        due = None if asked.tpot_s is None else fleet_pb2.Due(tpot_s=asked.tpot_s)
        job = convert.job_to_wire(request, index, due)
        self.worker.handle(fleet_pb2.NodeCommand(reserve=fleet_pb2.Reserve(job=job, local_prefill=True)))

    def run(self, load):
        """All of these, each when it is due, to the end of the last; yields the steps."""
        waiting = sorted(load, key=lambda asked: asked.at_s, reverse=True)
        while waiting or not self.scheduler.is_idle:
            if self.scheduler.is_idle:
                self.now = max(self.now, waiting[-1].at_s)
            while waiting and waiting[-1].at_s <= self.now:
                self.ask(waiting.pop())
            yield self.step()

    def step(self):
        works = self.worker.plan()
        assert works, "the node stands still"
        node_requests = {each.request.request_id: each for each in self.scheduler.node_requests}
        answers = [work for work in works if node_requests[work.request.request_id].state is RequestState.RUNNING]
        bare, whole = (StepLoad(len(answers), sum(work.start for work in answers)) for _ in range(2))
        for work in works[len(answers) :]:
            whole.add_chunk(work.start, work.num_tokens)
        noise, began_s = self.noise(), self.now
        due_s = [node_requests[work.request.request_id].due for work in answers]
        due_s = [due.token_s(work.request.num_output_tokens) for due, work in zip(due_s, answers, strict=True) if due]
        step_s, bare_s = noise * self._seconds(whole), noise * self._seconds(bare)
        self.now += step_s
        for work in answers:
            self.asked[int(work.request.request_id)].spared_s += step_s - bare_s
        self.worker.step_done(works, [SampledToken(0)] * sum(work.samples for work in works), step_s)
        self.worker.carry_out()
        return Step(began_s, self.now, began_s + bare_s, whole.num_prompt_tokens, due_s)

    def _seconds(self, load):
        return sum(weight * figure for weight, figure in zip(self.weights, load.figures, strict=True))

    def send(self, **event):
        """Note when tokens come."""
        if first := event.get("first_token"):
            self.asked[int(first.attempt.request_id)].times_s.append(self.now)
        elif step_tokens := event.get("step_tokens"):
            for token in events.all_tokens(step_tokens).tokens:
                self.asked[token.attempt.epoch].times_s.append(self.now)
