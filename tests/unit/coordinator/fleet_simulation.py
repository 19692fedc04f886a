"""A fleet under virtual time: the real tracker and nodes whose steps take as long as a formula says.

A node takes one step after the other; each gives a token to every running request and computes up to CHUNK_TOKENS of
the prompts that it is to read, for itself or for others. KV travels for MOVE_S. Nodes report once a second.
"""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from coordinator.control.instructions import End, Send
from coordinator.control.ledger import Ledger
from coordinator.control.metrics import Metrics
from coordinator.control.prompts import Prompt
from coordinator.control.registry import Registry
from coordinator.control.roles import FIXED, Roles
from coordinator.control.tracker import Tracker
from protos.convert import shape_from_wire
from serving_core.requests import SamplingParams
from tests import fleet_events as events

CHUNK_TOKENS = 512
MOVE_S = 0.03
STEP_S, STEP_PER_REQUEST_S = 0.02, 0.001
NEVER_S = 1e9


class Fleet:
    """`rates` are prompt tokens a second by node; p0 begins as a prefill node, d0 as a decode node, b0 as both."""

    def __init__(self, rates, max_num_seqs=64, policy=FIXED):
        self.now = 0.0
        self.registry = Registry({}, node_timeout_s=NEVER_S, step_timeout_s=NEVER_S)
        limits = {"max_live": 10_000, "max_restarts": 0, "keep_after_s": NEVER_S}
        ledger = Ledger()
        self.tracker = Tracker(self.registry, ledger, Metrics(), first_epoch=0, **limits)
        self.roles = Roles(self.registry, ledger, policy=policy)
        self.flips = []  # (node, shape)
        self.nodes = {name: SimulatedNode(self, name, rate, max_num_seqs) for name, rate in rates.items()}
        self.ended_s = {}
        self._agenda, self._order = [], itertools.count()

    def after(self, seconds, action):
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), action))

    def mean_request_s(self, requests):
        """Serves (arrival, prompt tokens, answer tokens) and returns the mean time from arrival to end."""
        self._beat()
        self._tick()
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

    def _tick(self):
        self._carry_out(self.roles.tick(self.now))
        self.after(0.25, self._tick)


@dataclass(slots=True)
class Reading:
    """A prompt on the node that reads it."""

    job: Any
    hands_over: bool
    num_left: int
    since_s: float | None = None  # when its first step began


class SimulatedNode:
    def __init__(self, fleet, name, rate, max_num_seqs):
        self.fleet, self.name, self.rate, self.max_num_seqs = fleet, name, rate, max_num_seqs
        self.is_busy = False
        self.reading = {}  # by epoch
        self.read = set()  # epochs whose KV waits for a ticket
        self.tickets = {}  # epoch to the node that writes, from Deliver
        self.waiting = deque()  # Reserves
        self.granted = {}  # epoch to job
        self.running = {}  # epoch to tokens answered
        self.steps_s = deque(maxlen=64)
        hello = {"num_blocks": 100_000, "max_model_len": 100_000, "max_num_seqs": max_num_seqs}
        fleet.registry.admit(events.hello(name, **hello).hello, 0.0)

    @property
    def step_s(self):
        return median(self.steps_s) if self.steps_s else 0.0

    # ---- commands ----

    def reshape(self, body):
        self.fleet.flips.append((self.name, shape_from_wire(body.shape)))
        node = self.fleet.registry.find(self.name)
        beat = events.heartbeat(prefill_tokens_per_s=self.rate, step_s=self.step_s, shape=body.shape)
        self.fleet.registry.heartbeat(node, beat.heartbeat, self.fleet.now)

    def prefill(self, body):
        self._read(body.job, hands_over=True)

    def reserve(self, body):
        self.waiting.append(body)
        self._grant()

    def deliver(self, body):
        self.tickets[body.attempt.epoch] = self.fleet.nodes[body.ticket.decode()]
        self._send(body.attempt)

    def cancel(self, body):
        self.granted.pop(body.attempt.epoch, None)
        self.fleet.tell(self.name, events.cancelled(body.attempt))

    # ---- reading ----

    def _read(self, job, *, hands_over):
        self.reading[job.attempt.epoch] = Reading(job, hands_over, len(job.token_ids))
        self._work()

    def _has_read(self, reading):
        job, epoch = reading.job, reading.job.attempt.epoch
        is_last = job.sampling_params.max_tokens == 1
        if not reading.hands_over and is_last:
            del self.granted[epoch]
        elif not reading.hands_over:
            self.running[epoch] = 1
        token = events.sampled(job.attempt, 0, 7, events.LENGTH if is_last else 0)
        self.fleet.tell(self.name, events.first_token(token, prefill_s=self.fleet.now - reading.since_s))
        if reading.hands_over:
            self.read.add(epoch)
            self._send(job.attempt)

    def _send(self, attempt):
        if attempt.epoch in self.read and attempt.epoch in self.tickets:
            writer = self.tickets.pop(attempt.epoch)
            self.fleet.after(MOVE_S, lambda: writer.commit(attempt))

    # ---- writing ----

    def commit(self, attempt):
        if attempt.epoch in self.granted:
            self.running[attempt.epoch] = 1
            self.fleet.tell(self.name, events.committed(attempt))
            self._work()

    def _grant(self):
        while self.waiting and len(self.granted) < self.max_num_seqs:
            body = self.waiting.popleft()
            self.granted[body.job.attempt.epoch] = body.job
            if body.local_prefill:
                self._read(body.job, hands_over=False)
            else:
                self.fleet.tell(self.name, events.reserved(body.job.attempt, self.name.encode()))
        self._work()

    def _write(self, epochs, step_s):
        tokens = []
        for epoch in [epoch for epoch in epochs if epoch in self.granted]:
            job, index = self.granted[epoch], self.running[epoch]
            self.running[epoch] += 1
            is_last = index + 1 == job.sampling_params.max_tokens
            tokens.append(events.sampled(job.attempt, index, 7, events.LENGTH if is_last else 0))
            if is_last:
                del self.running[epoch], self.granted[epoch]
        self.fleet.tell(self.name, events.step_tokens(*tokens, step_s=step_s))

    # ---- steps ----

    def _work(self):
        if self.is_busy or not (self.running or self.reading):
            return
        self.is_busy = True
        seconds = STEP_S + STEP_PER_REQUEST_S * len(self.running) if self.running else 0.0
        budget = CHUNK_TOKENS - len(self.running)
        for reading in self.reading.values():
            num_tokens = min(budget, reading.num_left)
            reading.num_left -= num_tokens
            reading.since_s = self.fleet.now if reading.since_s is None else reading.since_s
            budget -= num_tokens
            seconds += num_tokens / self.rate
        self.fleet.after(seconds, lambda: self._stepped(list(self.running), seconds))

    def _stepped(self, written, seconds):
        self.is_busy = False
        self.steps_s.append(seconds)
        for reading in [reading for reading in self.reading.values() if reading.num_left == 0]:
            del self.reading[reading.job.attempt.epoch]
            self._has_read(reading)
        self._write(written, seconds)
        self._grant()
