"""A fleet under virtual time: the real tracker and nodes whose steps take as long as a formula says.

A prefill node computes one prompt after the other. A decode node takes one step after the other; each gives a token to
every running request and computes up to CHUNK_TOKENS of the prompts that are its own to compute. KV travels for
MOVE_S. Nodes report once a second.
"""

import heapq
import itertools
from collections import deque
from statistics import median

from coordinator.control.instructions import End, Send
from coordinator.control.ledger import Ledger
from coordinator.control.metrics import Metrics
from coordinator.control.prompts import Prompt
from coordinator.control.registry import Registry
from coordinator.control.tracker import Tracker
from serving_core.requests import SamplingParams
from tests import fleet_events as events

CHUNK_TOKENS = 512
MOVE_S = 0.03
STEP_S, STEP_PER_REQUEST_S = 0.02, 0.001
NEVER_S = 1e9


class Fleet:
    """`rates` are prompt tokens a second by node; p0 is a prefill node, d0 a decode node."""

    def __init__(self, policy, rates, max_num_seqs=64):
        self.now = 0.0
        self.registry = Registry({}, node_timeout_s=NEVER_S, step_timeout_s=NEVER_S)
        limits = {"max_live": 10_000, "max_restarts": 0, "keep_after_s": NEVER_S}
        self.tracker = Tracker(self.registry, Ledger(), Metrics(), first_epoch=0, local_prefill=policy, **limits)
        kinds = {"p": PrefillNode, "d": DecodeNode}
        self.nodes = {name: kinds[name[0]](self, name, rate, max_num_seqs) for name, rate in rates.items()}
        self.ended_s = {}
        self._agenda, self._order = [], itertools.count()

    def after(self, seconds, action):
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), action))

    def mean_request_s(self, requests):
        """Serves (arrival, prompt tokens, answer tokens) and returns the mean time from arrival to end."""
        self._beat()
        for number, (arrived_s, *lengths) in enumerate(requests):
            self.after(arrived_s, lambda number=number, lengths=lengths: self._submit(f"{number}/0", *lengths))
        while len(self.ended_s) < len(requests):
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        assert self.tracker.num_open == 0
        return sum(self.ended_s[f"{i}/0"] - arrived_s for i, (arrived_s, *_) in enumerate(requests)) / len(requests)

    def tell(self, name, event):
        self._carry_out(self.tracker.handle(self.registry.find(name), event, self.now))

    def _submit(self, request_id, num_prompt_tokens, num_answer_tokens):
        prompt, sampling = Prompt([1] * num_prompt_tokens), SamplingParams(max_tokens=num_answer_tokens)
        times = {"arrived_s": self.now, "deadline_s": NEVER_S}
        self._carry_out(self.tracker.submit(request_id, prompt, sampling, **times))

    def _carry_out(self, instructions):
        for instruction in instructions:
            match instruction:
                case Send(node, command):
                    kind = command.WhichOneof("command")
                    getattr(self.nodes[node.name], kind)(getattr(command, kind))
                case End(request_id, _):
                    self.ended_s[request_id] = self.now

    def _beat(self):
        for node in self.nodes.values():
            beat = events.heartbeat(prefill_tokens_per_s=node.rate, step_s=node.step_s)
            self.registry.heartbeat(self.registry.find(node.name), beat.heartbeat, self.now)
        self.after(1.0, self._beat)


class SimulatedNode:
    step_s = 0.0

    def __init__(self, fleet, name, rate, max_num_seqs):
        self.fleet, self.name, self.rate, self.max_num_seqs = fleet, name, rate, max_num_seqs
        self.is_busy = False
        hello = {"num_blocks": 100_000, "max_model_len": 100_000, "max_num_seqs": max_num_seqs}
        role = {"p": "prefill", "d": "decode"}[name[0]]
        fleet.registry.admit(events.hello(name, role, **hello).hello, 0.0)

    def first_token(self, job, seconds):
        is_last = job.sampling_params.max_tokens == 1
        token = events.sampled(job.attempt, 0, 7, events.LENGTH if is_last else 0)
        self.fleet.tell(self.name, events.first_token(token, prefill_s=seconds))


class PrefillNode(SimulatedNode):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.jobs = deque()
        self.tickets = {}  # epoch to decode node, from Deliver
        self.computed = set()  # epochs

    def prefill(self, body):
        self.jobs.append(body.job)
        self._work()

    def deliver(self, body):
        self.tickets[body.attempt.epoch] = self.fleet.nodes[body.ticket.decode()]
        self._send(body.attempt)

    def cancel(self, body):
        self.fleet.tell(self.name, events.cancelled(body.attempt))

    def _work(self):
        if self.is_busy or not self.jobs:
            return
        self.is_busy = True
        job = self.jobs.popleft()
        seconds = len(job.token_ids) / self.rate
        self.fleet.after(seconds, lambda: self._computed(job, seconds))

    def _computed(self, job, seconds):
        self.is_busy = False
        self.first_token(job, seconds)
        self.computed.add(job.attempt.epoch)
        self._send(job.attempt)
        self._work()

    def _send(self, attempt):
        if attempt.epoch in self.computed and attempt.epoch in self.tickets:
            decode = self.tickets.pop(attempt.epoch)
            self.fleet.after(MOVE_S, lambda: decode.commit(attempt))


class DecodeNode(SimulatedNode):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.waiting = deque()
        self.granted = {}  # epoch to job
        self.to_compute = {}  # epoch to prompt tokens that are left to compute here, and the time of the first step
        self.running = {}  # epoch to tokens answered
        self.steps_s = deque(maxlen=64)

    @property
    def step_s(self):
        return median(self.steps_s) if self.steps_s else 0.0

    def reserve(self, body):
        self.waiting.append(body)
        self._grant()

    def cancel(self, body):
        self.granted.pop(body.attempt.epoch, None)
        self.fleet.tell(self.name, events.cancelled(body.attempt))

    def commit(self, attempt):
        if attempt.epoch in self.granted:
            self.running[attempt.epoch] = 1
            self.fleet.tell(self.name, events.committed(attempt))
            self._work()

    def _grant(self):
        while self.waiting and len(self.granted) < self.max_num_seqs:
            body = self.waiting.popleft()
            epoch = body.job.attempt.epoch
            self.granted[epoch] = body.job
            if body.local_prefill:
                self.to_compute[epoch] = [len(body.job.token_ids), None]
            else:
                self.fleet.tell(self.name, events.reserved(body.job.attempt, self.name.encode()))
        self._work()

    def _work(self):
        if self.is_busy or not (self.running or self.to_compute):
            return
        self.is_busy = True
        seconds = STEP_S + STEP_PER_REQUEST_S * len(self.running) if self.running else 0.0
        budget, computed = CHUNK_TOKENS - len(self.running), []
        for epoch, progress in self.to_compute.items():
            num_tokens = min(budget, progress[0])
            progress[0] -= num_tokens
            progress[1] = self.fleet.now if progress[1] is None else progress[1]
            budget -= num_tokens
            seconds += num_tokens / self.rate
            if progress[0] == 0:
                computed.append(epoch)
        self.fleet.after(seconds, lambda: self._stepped(list(self.running), computed, seconds))

    def _stepped(self, decoded, computed, seconds):
        self.is_busy = False
        self.steps_s.append(seconds)
        tokens = []
        for epoch in [epoch for epoch in decoded if epoch in self.granted]:
            job, index = self.granted[epoch], self.running[epoch]
            self.running[epoch] += 1
            is_last = index + 1 == job.sampling_params.max_tokens
            tokens.append(events.sampled(job.attempt, index, 7, events.LENGTH if is_last else 0))
            if is_last:
                del self.running[epoch], self.granted[epoch]
        for epoch in computed:
            job, (_, since_s) = self.granted[epoch], self.to_compute.pop(epoch)
            self.running[epoch] = 1
            if job.sampling_params.max_tokens == 1:
                del self.running[epoch], self.granted[epoch]
            self.first_token(job, self.fleet.now - since_s)
        self.fleet.tell(self.name, events.step_tokens(*tokens, step_s=seconds))
        self._grant()
