"""A small world for tests of the scheduler: four nodes, and instructions in short."""

import dataclasses

from coordinator.control.instructions import Emit, End, MigrationEnded, Send
from coordinator.control.load import Ledger, Prompt
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Registry
from coordinator.control.placement.policy import POLICIES
from coordinator.control.request import NOTHING
from coordinator.control.scheduler import Scheduler
from serving_core.errors import RequestError
from serving_core.requests import MEAN, Pooling, SamplingParams
from tests import fleet_events as events

PROMPT = [7, 8, 9]
MAX_TOKENS = 200  # of answers that move


class Noting:
    """The usual policy, which writes down what it is told of requests to come."""

    def __init__(self):
        self.told = []

    def place(self, nodes, ledger, wanted, transfers, now):
        self.told.append(wanted.arrivals)
        self.transfers = transfers
        return POLICIES["auto"].place(nodes, ledger, wanted, transfers, now)


class World:
    """A scheduler with nodes p0, p1, d0 and d1. Every call returns its instructions in short: see `short`."""

    def __init__(self, nodes=("p0", "p1", "d0", "d1"), *, embeds=False, **settings):
        self.registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9, embeds=embeds)
        for name in nodes:
            self.attach(name)
        defaults = {"first_epoch": 0, "max_live": 10, "max_restarts": 1, "keep_after_s": 1e9}
        self.metrics = Metrics()
        self.ledger = Ledger()
        self.scheduler = Scheduler(self.registry, self.ledger, self.metrics, **{**defaults, **settings})
        self.outcome = self.end_of_answer = None
        self.migrations = []
        self.jobs = []
        self.prefill_tp_size = None
        self.is_local = None

    def attach(self, name, **hello):
        return self.registry.admit(events.hello(name, **hello).hello, 0.0)

    def holds(self, name, hints):
        """The node reports these blocks."""
        assert self.registry.cache_changed(self.registry.find(name), events.cache_changed(hints).cache_changed) == 0

    def account(self, name):
        """What is assigned to the node: tokens to compute and held, answers, and those of them still to come."""
        return dataclasses.astuple(self.ledger.of(self.registry.find(name)))[:4]

    def outgoing(self, name):
        """Tokens of what the node has read for other nodes and has to hold still."""
        return self.ledger.of(self.registry.find(name)).tokens_outgoing

    def embed(self, request_id="r/0", token_ids=PROMPT, kind=MEAN, now=0.0):
        times = {"arrived_s": now, "deadline_s": now + 100.0, "now": now}
        sampling, pooling = SamplingParams(max_tokens=0), Pooling(kind)
        return self.short(self.scheduler.submit(request_id, Prompt(token_ids), sampling, **times, pooling=pooling))

    def submit(
        self,
        request_id="r/0",
        token_ids=PROMPT,
        cache_salt="",
        now=0.0,
        max_tokens=5,
        slo=None,
        adapter="",
        preparing_s=0.0,
        asker="",
        so_far=NOTHING,
    ):
        prompt, sampling = Prompt(token_ids, cache_salt, adapter), SamplingParams(max_tokens=max_tokens)
        told = {"arrived_s": now - preparing_s, "deadline_s": now + 100.0, "now": now}
        told |= {"slo": slo, "asker": asker, "so_far": so_far}
        return self.short(self.scheduler.submit(request_id, prompt, sampling, **told))

    def tell(self, name, event, now=0.0):
        return self.short(self.scheduler.handle(self.registry.find(name), event, now))

    def lose(self, name, now=0.0, *, has_died=False):
        node = self.registry.find(name)
        self.registry.lose(node)
        return self.short(self.scheduler.lose(node, now, has_died=has_died))

    def tick(self, now):
        return self.short(self.scheduler.tick(now))

    def drain(self, name, now, state="draining"):
        """The node says that it drains."""
        self.registry.heartbeat(self.registry.find(name), events.heartbeat(state).heartbeat, now)
        return self.tick(now)

    def short(self, instructions):
        return [self._short(instruction) for instruction in instructions]

    def _short(self, instruction):
        match instruction:
            case Send(node, command):
                kind = command.WhichOneof("command")
                body = getattr(command, kind)
                self.jobs += [body.job] if kind in ("reserve", "prefill") else []
                if kind == "prefill":
                    self.prefill_node = node.name
                if kind in ("migrate", "deliver"):
                    self.descriptor = body.descriptor
                if kind == "reserve":
                    self.reserve = body
                    self.prefill_tp_size, self.is_local = body.prefill_tp_size, body.local_prefill
                self.attempt = body.job.attempt if kind in ("reserve", "prefill") else body.attempt
                return f"{kind} {node.name}"
            case Emit(_, chunk):
                numbered = enumerate(chunk.token_ids, start=chunk.first_token_index)
                return "emit " + " ".join(f"{index}:{token_id}" for index, token_id in numbered)
            case MigrationEnded():
                self.migrations.append(instruction)
                return instruction.outcome.value
            case End(_, outcome):
                self.outcome, self.end_of_answer = outcome, instruction
                return f"end {outcome.reason}" if isinstance(outcome, RequestError) else "end complete"

    def first(self, attempt, index=0, finish_reason=0, now=0.0, **fields):
        token = events.sampled(attempt, index, 100 + index, finish_reason)
        return self.tell("p0", events.first_token(token, **fields), now)

    def step(self, attempt, index, finish_reason=0, now=0.0, node="d0", step_s=0.0):
        token = events.sampled(attempt, index, 100 + index, finish_reason)
        return self.tell(node, events.step_tokens(token, step_s=step_s), now)


class MigratingWorld(World):
    """A World with one answer that d0 writes."""

    def __init__(self, nodes=("p0", "p1", "d0", "d1"), source=None, **settings):
        super().__init__(nodes, **settings)
        if source:
            self.attach("d0", **source)
        self.write("r/0")

    def write(self, request_id, now=0.0):
        """An answer gets its first two tokens; its attempt is then `source`."""
        self.submit(request_id, max_tokens=MAX_TOKENS)
        self.source = self.attempt
        self.first(self.source, now=now)
        self.tell("d0", events.reserved(self.source), now)
        self.tell("d0", events.committed(self.source, num_bytes=100), now)
        self.tell("p0", events.transferred(self.source), now)
        assert self.step(self.source, 1, now=now) == ["emit 1:101"]

    def begin(self, now=1.0):
        """d0 drains; the attempt on d1 is then `target`."""
        assert self.drain("d0", now) == ["reserve d1"]
        self.target = self.attempt

    def migrate(self, now=2.0):
        self.begin()
        assert self.tell("d1", events.reserved(self.target, b"t"), now) == ["migrate d0"]

    def commit(self, next_index=3, now=4.0, **num_bytes):
        return self.tell("d1", events.committed(self.target, next_index=next_index, **num_bytes), now)

    def migration(self):
        self.migrate()
        assert self.step(self.source, 2, now=3.0) == ["emit 2:102"]
        assert self.commit() == ["cancel d0", "migrated"]

    def end(self, index=3, node="d1"):
        """The last token comes from this node, and nothing is left anywhere once d0 and d1 have answered."""
        attempt = {"d0": self.source, "d1": self.target}[node]
        said = self.step(attempt, index, events.LENGTH, node=node, now=9.0)
        assert said[-1] == "end complete"
        self.tell("d0", events.cancelled(self.source), 9.0)
        self.tell("d1", events.cancelled(self.target), 9.0)
        assert self.scheduler.num_open == 0
        self.ledger.check_integrity()
        assert [self.account(name) for name in ("d0", "d1")] == [(0, 0, 0, 0)] * 2
        return said
