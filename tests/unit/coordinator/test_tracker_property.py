"""The tracker in a small world of nodes whose messages arrive in any order that ordered streams allow.

Whatever is cancelled, lost, late or failing: every request ends exactly once, its tokens are those it must have, in
order, its phases add up, and in the end no node holds anything.
"""

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.control.instructions import Emit, End, Send
from coordinator.control.ledger import Account, Ledger
from coordinator.control.metrics import Metrics
from coordinator.control.prompts import Prompt
from coordinator.control.registry import Registry
from coordinator.control.releases import RESEND_S
from coordinator.control.router import has_path
from coordinator.control.tracker import Tracker
from protos import inference_pb2
from protos.convert import shape_to_wire
from serving_core.errors import RequestError
from serving_core.requests import SamplingParams
from serving_core.shapes import ROLES, preset
from tests import fleet_events as events

FLEETS = (("p0", "p1", "d0", "d1"), ("p0", "p1", "b0", "b1"), ("p0", "b0", "d0"), ("b0", "b1", "b2"))
FAILURES = ("TRANSFER_FAILED", "KV_CHECKSUM_MISMATCH", "QUEUE_FULL", "ENGINE_ERROR")


def token_of(request_id: str, index: int) -> int:
    """The one right token, on whatever node and attempt."""
    return (int(request_id.split("/")[0]) * 31 + index * 7) % 50


class SimulatedNode:
    """Follows the protocol, at its own pace: commands wait in one queue, events in another."""

    def __init__(self, world, name):
        self.world = world
        self.name = name
        self.node = world.registry.admit(events.hello(name).hello, world.now)
        self.commands = deque()
        self.events = deque()
        self.held = {}  # (request id, epoch) to its job; a node holds exactly what is in here
        self.stage = {}  # queued, reserved, prefilled, delivered, local or decoding
        self.position = {}

    def obey(self, command):
        kind = command.WhichOneof("command")
        body = getattr(command, kind)
        attempt = body.job.attempt if kind in ("reserve", "prefill") else body.attempt
        key = (attempt.request_id, attempt.epoch)
        if kind == "cancel":
            self.drop(key)
            self.events.append(events.cancelled(attempt))
        elif kind == "deliver":
            if key in self.held:
                self.stage[key] = {"queued": "delivered early", "prefilled": "delivered"}[self.stage[key]]
        else:
            assert key not in self.held, "an attempt was announced twice"
            self.held[key] = body.job
            self.stage[key] = "queued"
            if kind == "reserve" and body.local_prefill:
                self.stage[key] = "local"
            elif kind == "reserve":
                self.stage[key] = "reserved"
                self.events.append(events.reserved(attempt, ticket=f"{self.name}".encode()))

    def drop(self, key):
        for state in (self.held, self.stage, self.position):
            state.pop(key, None)

    def fail(self, key, reason):
        attempt = self.held[key].attempt
        self.drop(key)
        self.events.append(events.failed(attempt, reason))

    def work(self, key):
        """One step of one attempt."""
        job, stage = self.held[key], self.stage[key]
        index = len(job.token_ids) - job.num_prompt_tokens
        if stage in ("queued", "delivered early"):
            token = self.sample(job, index)
            self.events.append(events.first_token(token, prefill_s=self.world.random.random()))
            self.stage[key] = "delivered" if stage == "delivered early" else "prefilled"
            if token.finish_reason:
                self.drop(key)
        elif stage == "local":
            token = self.sample(job, index)
            self.events.append(events.first_token(token, prefill_s=self.world.random.random()))
            self.stage[key], self.position[key] = "decoding", index
            if token.finish_reason:
                self.drop(key)
        elif stage == "delivered":
            self.world.transfer(self, key)
        elif stage == "decoding":
            self.position[key] += 1
            token = self.sample(job, self.position[key])
            self.events.append(events.step_tokens(token, step_s=self.world.random.random()))
            if token.finish_reason:
                self.drop(key)

    def sample(self, job, index):
        last = index + 1 == job.sampling_params.max_tokens
        token_id = token_of(job.attempt.request_id, index)
        return events.sampled(job.attempt, index, token_id, events.LENGTH if last else 0)

    def commit(self, key):
        job = self.held[key]
        self.stage[key] = "decoding"
        self.position[key] = len(job.token_ids) - job.num_prompt_tokens
        self.events.append(events.committed(job.attempt))


class World:
    def __init__(self, random: Random):
        self.random = random
        self.now = 0.0
        self.registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
        self.ledger = Ledger()
        self.tracker = Tracker(
            self.registry,
            self.ledger,
            Metrics(),
            first_epoch=2**32 - 3,
            max_live=6,
            max_restarts=random.choice([0, 1, 3]),
        )
        self.nodes = [SimulatedNode(self, name) for name in random.choice(FLEETS)]
        self.submitted = {}  # id to (max_tokens, time of arrival)
        self.tokens = {}
        self.ends = {}

    def carry_out(self, instructions):
        for instruction in instructions:
            match instruction:
                case Send(node, command):
                    for simulated in self.nodes:
                        if simulated.node is node:
                            simulated.commands.append(command)
                case Emit(request_id, tokens):
                    assert request_id not in self.ends
                    for token in tokens:
                        assert token.index == len(self.tokens[request_id])
                        self.tokens[request_id].append(token.token_id)
                case End(request_id, outcome):
                    assert request_id not in self.ends
                    self.ends[request_id] = (outcome, self.now)

    def submit(self):
        request_id = f"{len(self.submitted)}/0"
        max_tokens = self.random.randint(1, 6)
        sampling = SamplingParams(max_tokens=max_tokens)
        try:
            instructions = self.tracker.submit(
                request_id, Prompt([1, 2]), sampling, arrived_s=self.now, deadline_s=self.now + 60
            )
        except RequestError:
            return
        self.submitted[request_id] = (max_tokens, self.now)
        self.tokens[request_id] = []
        self.carry_out(instructions)

    def deliver_command(self):
        if waiting := [node for node in self.nodes if node.commands]:
            node = self.random.choice(waiting)
            node.obey(node.commands.popleft())

    def deliver_event(self):
        if waiting := [node for node in self.nodes if node.events]:
            node = self.random.choice(waiting)
            self.carry_out(self.tracker.handle(node.node, node.events.popleft(), self.now))

    def step(self):
        if at_work := [(node, key) for node in self.nodes for key in node.held]:
            node, key = self.random.choice(at_work)
            node.work(key)

    def transfer(self, prefill, key):
        """The data plane: the decode node commits, then the prefill node lets go; or nobody is there to write to."""
        attempt = prefill.held[key].attempt
        decode = next((node for node in self.nodes if node.stage.get(key) == "reserved"), None)
        if decode is None:
            prefill.fail(key, "TRANSFER_FAILED")
            return
        decode.commit(key)
        prefill.drop(key)
        prefill.events.append(events.transferred(attempt))

    def fail(self):
        if held := [(node, key) for node in self.nodes for key in node.held]:
            node, key = self.random.choice(held)
            node.fail(key, self.random.choice(FAILURES))

    def lose(self):
        index = self.random.randrange(len(self.nodes))
        lost = self.nodes[index]
        self.registry.lose(lost.node)
        self.carry_out(self.tracker.lose(lost.node, self.now))
        self.nodes[index] = SimulatedNode(self, lost.name)  # a new incarnation

    def abort(self):
        if self.submitted:
            request_id = self.random.choice(list(self.submitted))
            self.carry_out(self.tracker.finish(request_id, inference_pb2.FINISH_REASON_ABORT, self.now))

    def wait(self):
        self.now += self.random.random()
        node = self.random.choice(self.nodes)
        rate = self.random.choice([0.0, 1.0, 10.0])
        beat = events.heartbeat(prefill_tokens_per_s=rate, step_s=0.1)
        self.registry.heartbeat(node.node, beat.heartbeat, self.now)
        self.carry_out(self.tracker.tick(self.now))

    def flip(self):
        """A node confirms another shape, if requests can be served all the same."""
        node = self.random.choice(self.nodes).node
        before = node.shape
        for shape in (preset(self.random.choice(ROLES), max_num_batched_tokens=512, max_num_seqs=64), before):
            beat = events.heartbeat(shape=shape_to_wire(shape))
            self.registry.heartbeat(node, beat.heartbeat, self.now)
            if has_path(self.registry.nodes):
                return

    def settle(self):
        """Lets everything that is under way come to its end."""
        for _ in range(3000):
            for action in (self.deliver_command, self.deliver_event, self.step):
                action()
        self.now += RESEND_S
        self.carry_out(self.tracker.tick(self.now))
        for _ in range(100):
            self.deliver_command()
            self.deliver_event()


RARE = ("fail", "lose", "abort", "wait")
OFTEN = ("submit", "deliver_command", "deliver_event", "step")


@pytest.mark.parametrize("trouble", [(), RARE])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_request_ends_once_with_the_right_tokens_and_nothing_is_held(trouble, seed):
    world = World(Random(seed))
    actions = [*OFTEN * 16, *trouble, "wait", "flip", "flip"]
    for _ in range(400):
        getattr(world, world.random.choice(actions))()
        world.ledger.check_integrity()
    world.settle()

    assert world.ends.keys() == world.submitted.keys()
    assert world.tracker.num_open == 0
    for node in world.nodes:
        assert node.held == {}
        assert world.ledger.of(node.node) == Account()
    for request_id, (max_tokens, arrived_s) in world.submitted.items():
        outcome, ended_s = world.ends[request_id]
        tokens = world.tokens[request_id]
        assert tokens == [token_of(request_id, index) for index in range(len(tokens))]
        if isinstance(outcome, RequestError):
            assert trouble
            continue
        check_complete(outcome, len(tokens), max_tokens, ended_s - arrived_s)


def check_complete(complete, num_tokens, max_tokens, e2e_s):
    assert complete.completion_tokens == num_tokens
    if complete.finish_reason == inference_pb2.FINISH_REASON_LENGTH:
        assert num_tokens == max_tokens
    timeline = complete.timeline
    phases = [
        timeline.prefill_queue_s, timeline.prefill_s, timeline.credit_wait_s,
        timeline.transfer_s, timeline.decode_queue_s, timeline.decode_s,
    ]  # fmt: skip
    assert min(phases) >= 0
    assert sum(phases) == timeline.e2e_s == pytest.approx(e2e_s)
    assert 0 <= timeline.ttft_s <= timeline.e2e_s + 1e-9
