"""A small world of nodes that follow the protocol, whose messages arrive in any order that ordered streams allow.

Every node goes its own pace: commands wait in one queue, events in another. A node that is told to Keep an answer makes
sure that no other one is writing it.
"""

from collections import Counter, deque
from dataclasses import dataclass
from random import Random

from coordinator.control.instructions import RESEND_S, Emit, End, MigrationEnded, Send
from coordinator.control.load import Ledger, Prompt
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Registry, has_path
from coordinator.control.scheduler import Scheduler
from coordinator.control.slo import Slo
from protos import fleet_pb2, inference_pb2
from protos.convert import shape_to_wire
from serving_core.errors import RequestError
from serving_core.requests import SamplingParams
from serving_core.shapes import ROLES, preset
from tests import fleet_events as events

FLEETS = (("p0", "p1", "d0", "d1"), ("p0", "p1", "b0", "b1"), ("p0", "b0", "d0"), ("b0", "b1", "b2"))
FAILURES = ("TRANSFER_FAILED", "KV_CHECKSUM_MISMATCH", "QUEUE_FULL", "ENGINE_ERROR", "STEP_FAILED")
PROMPT = [1, 2]
DEADLINE_S = 60
NODE_WAIT_S = 20.0  # longer than a world without trouble has no ready nodes
STEP_WEIGHTS = [0.010, 0.005, 0.0, 0.0, 0.001, 0.0, 0.0]  # a step takes 10 ms and 5 ms for each answer
TPOTS_S = (None, 0.017, 0.022, 0.2)  # which one answer keeps, or two
TTFTS_S = (None, 0.5, 5.0, 50.0)


def token_of(request_id: str, index: int) -> int:
    """The one right token, on whatever node and attempt."""
    return (int(request_id.split("/")[0]) * 31 + index * 7) % 50


@dataclass
class Held:
    """What a node has of one attempt."""

    job: fleet_pb2.Job
    stage: str  # queued, read, awaiting, granted, writing, stopped
    num_tokens_ahead: int = 0
    is_own: bool = False  # whether the node that reads the prompt writes the answer too
    position: int = 0  # of the last token that it has told
    descriptor: tuple | None = None  # node, epoch, number of the grant and most tokens, to send by
    grant: int = 0  # the number of the one that it has given

    @property
    def first_index(self):
        return len(self.job.token_ids) - self.job.num_prompt_tokens


class SimulatedNode:
    def __init__(self, world, name):
        self.world = world
        self.name = name
        self.node = world.registry.admit(events.hello(name).hello, world.now)
        self.commands = deque()
        self.events = deque()
        self.held = {}  # (request id, epoch) to Held
        self.revoked = set()  # credits that were taken back, as the senders were told: epoch and number

    # ---- commands ----

    def obey(self, command):
        kind = command.WhichOneof("command")
        body = getattr(command, kind)
        attempt = body.job.attempt if kind in ("reserve", "prefill") else body.attempt
        getattr(self, f"obey_{kind}")(attempt, body, self.held.get(key_of(attempt)))

    def obey_reserve(self, attempt, body, held):
        assert held is None, "an attempt was announced twice"
        stage = "queued" if body.local_prefill else "awaiting"
        self.held[key_of(attempt)] = Held(body.job, stage, body.num_tokens_ahead, is_own=body.local_prefill)

    def obey_prefill(self, attempt, body, held):
        assert held is None, "an attempt was announced twice"
        self.held[key_of(attempt)] = Held(body.job, "queued")

    def obey_deliver(self, attempt, body, held):
        if held is not None and not held.is_own:
            held.descriptor = descriptor_of(body.descriptor)

    def obey_migrate(self, attempt, body, held):
        if held is None:
            self.events.append(events.failed(attempt, "TRANSFER_FAILED"))
        else:
            held.descriptor = descriptor_of(body.descriptor)

    def obey_keep(self, attempt, body, held):
        if held is None:
            self.events.append(events.failed(attempt, "TRANSFER_FAILED"))
            return
        decode_nodes = [node for node in self.world.nodes if node is not self and node.writes(attempt)]
        assert not decode_nodes, "two nodes write the same answer"
        if held.stage in ("read", "stopped"):
            held.position = max(held.position, held.first_index)
            held.stage = "writing"
        held.is_own, held.descriptor = True, None

    def obey_begun(self, attempt, body, held):
        """Nothing depends on it here: who is read sooner gets blocks sooner."""

    def obey_cancel(self, attempt, body, held):
        self.held.pop(key_of(attempt), None)
        self.events.append(events.cancelled(attempt))

    def writes(self, attempt):
        """This attempt or a later one: an earlier one's Cancel may still be on its way, and nobody listens to it."""
        return any(
            key[0] == attempt.request_id and (key[1] - attempt.epoch) % 2**32 < 2**31 and held.stage == "writing"
            for key, held in self.held.items()
        )

    # ---- work ----

    def work(self, key):
        """One step of one attempt."""
        held = self.held[key]
        match held.stage:
            case "queued":
                self.read(key, held)
            case "awaiting":
                self.grant(held)
            case "read" if held.descriptor:
                self.transfer(key, held)
            case "writing" if held.descriptor and self.must_stop(held):
                held.stage = "stopped"
            case "writing":
                self.write(key, held)
            case "stopped" if held.descriptor:
                self.finish_migration(held)

    def read(self, key, held):
        held.position = held.first_index
        held.stage = "writing" if held.is_own else "read"
        self.events.append(events.first_token(self.sample(key, held), prefill_s=self.world.random.random()))

    def write(self, key, held):
        held.position += 1
        self.events.append(events.step_tokens(self.sample(key, held), step_s=self.world.random.random()))

    def sample(self, key, held):
        """The token at the position; the last one ends the attempt here."""
        is_last = held.position + 1 == held.job.sampling_params.max_tokens
        if is_last:
            del self.held[key]
        token_id = token_of(key[0], held.position)
        return events.sampled(held.job.attempt, held.position, token_id, events.LENGTH if is_last else 0)

    def must_stop(self, held):
        num_tokens = held.job.num_prompt_tokens + held.position + 1
        return num_tokens >= held.descriptor[3] or self.world.random.random() < 0.3

    def grant(self, held):
        held.stage, held.grant = "granted", held.grant + 1
        most = len(held.job.token_ids) + held.num_tokens_ahead
        descriptor = f"{self.name} {held.job.attempt.epoch} {held.grant} {most}"
        self.events.append(events.reserved(held.job.attempt, descriptor.encode()))

    def revoke(self, held):
        held.stage = "awaiting"
        self.revoked.add((held.job.attempt.epoch, held.grant))
        self.events.append(events.revoked(held.job.attempt))

    def transfer(self, key, held):
        """The data plane: the decode node commits, then the prefill node lets go; or nobody is there to write to."""
        target, theirs = self.world.behind(held)
        if held.descriptor[1:3] in target.revoked:
            held.descriptor = None  # another one will come
        elif theirs is None:
            self.fail(key, "TRANSFER_FAILED")
        else:
            target.commit(theirs, held.first_index)
            del self.held[key]
            self.events.append(events.transferred(held.job.attempt))

    def finish_migration(self, held):
        """The last block and the tail; the acknowledgement may be lost."""
        target, theirs = self.world.behind(held)
        arrived = theirs is not None and (theirs.stage, theirs.grant) == ("granted", held.descriptor[2])
        if arrived:
            target.commit(theirs, held.position)
        if not arrived or self.world.random.random() < 0.2:
            self.events.append(events.migration_failed(held.job.attempt))
        held.descriptor = None

    def commit(self, held, position):
        assert held.job.num_prompt_tokens + position + 1 <= len(held.job.token_ids) + max(1, held.num_tokens_ahead)
        held.stage, held.position = "writing", position
        self.events.append(events.committed(held.job.attempt, 10, 1, next_index=position + 1))

    def fail(self, key, reason):
        self.events.append(events.failed(self.held.pop(key).job.attempt, reason))


class World:
    def __init__(self, random: Random, max_tokens=40):
        self.random = random
        self.now = 0.0
        self.max_tokens = max_tokens
        self.registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
        self.ledger = Ledger()
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            self.registry,
            self.ledger,
            self.metrics,
            first_epoch=2**32 - 3,
            max_live=6,
            max_restarts=random.choice([0, 1, 3]),
            keep_after_s=random.choice([0.5, 5.0, 1e9]),
            node_wait_s=random.choice([0.0, NODE_WAIT_S]),
            admits_late=random.choice([False, True]),
        )
        self.nodes = [SimulatedNode(self, name) for name in random.choice(FLEETS)]
        self.submitted = {}  # id to (max_tokens, time of arrival)
        self.tokens = {}
        self.ends = {}
        self.migrations = Counter()  # by outcome
        self.most_held = 0

    def carry_out(self, instructions):
        for instruction in instructions:
            match instruction:
                case Send(node, command):
                    for simulated in self.nodes:
                        if simulated.node is node:
                            simulated.commands.append(command)
                case Emit(request_id, chunk):
                    assert request_id not in self.ends
                    assert chunk.first_token_index == len(self.tokens[request_id])
                    self.tokens[request_id] += chunk.token_ids
                case End(request_id, outcome):
                    assert request_id not in self.ends
                    self.ends[request_id] = (outcome, self.now)
                case MigrationEnded():
                    self.migrations[instruction.outcome.value] += 1

    def behind(self, held):
        """The node that a descriptor leads to, and what it has of the attempt."""
        name, epoch, _, _ = held.descriptor
        target = next(node for node in self.nodes if node.name == name)
        return target, target.held.get((held.job.attempt.request_id, epoch))

    # ---- what can happen ----

    def submit(self):
        request_id = f"{len(self.submitted)}/0"
        max_tokens = self.random.randint(1, self.max_tokens)
        times = {"arrived_s": self.now, "deadline_s": self.now + DEADLINE_S, "now": self.now}
        try:
            instructions = self.scheduler.submit(
                request_id, Prompt(PROMPT), SamplingParams(max_tokens=max_tokens), slo=self._draw_slo(), **times
            )
        except RequestError:
            return
        self.most_held = max(self.most_held, self.scheduler.num_deferred)
        self.submitted[request_id] = (max_tokens, self.now)
        self.tokens[request_id] = []
        self.carry_out(instructions)

    def _draw_slo(self):
        draw = self.random.choice
        return Slo("", draw(TTFTS_S), draw(TPOTS_S), draw([-1, 0]))

    def deliver_command(self):
        if waiting := [node for node in self.nodes if node.commands]:
            node = self.random.choice(waiting)
            node.obey(node.commands.popleft())

    def deliver_event(self):
        if waiting := [node for node in self.nodes if node.events]:
            node = self.random.choice(waiting)
            self.carry_out(self.scheduler.handle(node.node, node.events.popleft(), self.now))

    def step(self):
        self._pick(lambda held: True, lambda node, key: node.work(key))

    def fail(self):
        self._pick(lambda held: True, lambda node, key: node.fail(key, self.random.choice(FAILURES)))

    def revoke(self):
        self._pick(lambda held: held.stage == "granted", lambda node, key: node.revoke(node.held[key]))

    def spoil(self):
        """A move goes wrong, at either end."""

        def go_wrong(node, key):
            held = node.held[key]
            if held.descriptor is None:
                node.fail(key, self.random.choice(FAILURES))
            else:
                held.descriptor = None
                node.events.append(events.migration_failed(held.job.attempt))

        def is_migrating(held):
            is_target = held.num_tokens_ahead and held.stage in ("awaiting", "granted")
            return is_target or (held.descriptor and held.stage in ("writing", "stopped"))

        self._pick(is_migrating, go_wrong)

    def lose(self):
        index = self.random.randrange(len(self.nodes))
        lost = self.nodes[index]
        self.registry.lose(lost.node)
        self.carry_out(self.scheduler.lose(lost.node, self.now))
        self.nodes[index] = SimulatedNode(self, lost.name)  # a new incarnation

    def abort(self):
        if self.submitted:
            request_id = self.random.choice(list(self.submitted))
            self.carry_out(self.scheduler.finish(request_id, inference_pb2.FINISH_REASON_ABORT, self.now))

    def wait(self):
        self._beat("ready")

    def drain(self):
        """A node says that it drains, until it says otherwise."""
        self._beat("draining")

    def flip(self):
        """A node confirms another shape, if requests can be served all the same."""
        node = self.random.choice(self.nodes).node
        before = node.shape
        for shape in (preset(self.random.choice(ROLES), max_num_batched_tokens=512, max_num_seqs=64), before):
            beat = events.heartbeat(shape=shape_to_wire(shape))
            self.registry.heartbeat(node, beat.heartbeat, self.now)
            if has_path(self.registry.nodes):
                return

    def _beat(self, state):
        self.now += self.random.random()
        node = self.random.choice(self.nodes)
        load = {"step_s": 0.1, "step_weights": self.random.choice([[], STEP_WEIGHTS])}
        beat = events.heartbeat(state, prefill_tokens_per_s=self.random.choice([0.0, 1.0, 10.0]), **load)
        self.registry.heartbeat(node.node, beat.heartbeat, self.now)
        self.carry_out(self.scheduler.tick(self.now))

    def _pick(self, condition, action):
        if found := [(node, key) for node in self.nodes for key, held in node.held.items() if condition(held)]:
            action(*self.random.choice(found))

    def run(self, actions, num_actions):
        for _ in range(num_actions):
            getattr(self, self.random.choice(actions))()

    def settle(self):
        """Lets everything that is under way come to its end; no node drains any more."""
        for node in self.nodes:
            self.registry.heartbeat(node.node, events.heartbeat().heartbeat, self.now)
        for _ in range(3):
            for _ in range(4000):
                if not any(node.commands or node.events or node.held for node in self.nodes):
                    break
                self.run(("deliver_command", "deliver_event", "step"), 1)
            self.now += max(RESEND_S, NODE_WAIT_S / 2)
            self.carry_out(self.scheduler.tick(self.now))


def key_of(attempt):
    return attempt.request_id, attempt.epoch


def descriptor_of(text):
    name, *numbers = text.decode().split()
    return (name, *map(int, numbers))
