"""Several nodes, the data plane between them and a coordinator of few words, in memory and in a seeded order of events.

Everything that can be late is: commands, events, the ends of steps and of transfers. Ages need not follow arrival. What
the nodes hold is counted from scratch after everything that happens, and every block's content is known.
"""

from dataclasses import dataclass, field
from random import Random

from protos import convert, fleet_pb2
from serving_core import reasons
from serving_core.requests import Request, SamplingParams
from tests.toy_kv import NUMERICS, answer_of
from tests.unit.serving_node.fleet_node import FleetNode
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES

MOST_ROUNDS = 6000


@dataclass(eq=False)
class Migrating:
    """An answer's way from its writer to another node."""

    epoch: int  # of the attempt there
    target: FleetNode
    is_off: bool = False  # what the target says counts for nothing but that it has let go


@dataclass(eq=False)
class Ask:
    """One request as its user sees it."""

    name: str
    age: int
    prompt: list[int]
    salt: str
    max_tokens: int
    priority: int = 0
    output: list[int] = field(default_factory=list)
    epoch: int = 0  # of the attempt that counts; 0: none
    reader: FleetNode | None = None
    writer: FleetNode | None = None
    tokens: dict[int, int] = field(default_factory=dict)  # of the attempt, by their place
    first_index: int = 0  # of the attempt
    is_reserved: bool = False
    is_committed: bool = False
    is_to_be_kept: bool = False  # where it is read, once the writer has let go
    migrating: Migrating | None = None
    num_migrations: int = 0
    migrations_whole: bool = False  # as a target held other blocks than its writer
    is_cancelled: bool = False

    @property
    def is_written(self):
        return self.is_committed or (self.reader is self.writer and bool(self.tokens))

    @property
    def is_over(self):
        return self.is_cancelled or len(self.output) == self.max_tokens


class Fleet:
    """Nodes, channels, and what the coordinator knows."""

    def __init__(self, seed, num_nodes=2, *, num_blocks=9, faults=0.0, migrations=0.0, keeps=0.0, **limits):
        self.random = Random(seed)
        self.channels = {}  # by descriptor
        limits = {"credit_timeout_s": 1e9, "descriptor_timeout_s": 1e9} | limits
        numerics = NUMERICS[: 1 + seed % 2] * num_nodes
        self.nodes = [
            FleetNode(self, f"n{index}-", num_blocks, numerics=numerics[index], **limits) for index in range(num_nodes)
        ]
        self.faults, self.migrations, self.keeps = faults, migrations, keeps  # how likely in a round
        self.to_come = []
        self.asks = {}  # live ones, by the epoch of their attempt
        self.all = []
        self.migrating = {}  # asks on their way, by the epoch of the attempt there
        self.migrated = {}  # by the epoch that they had before: their tokens, and how many of them were the old node's
        self.held = set()  # (node, epoch): the coordinator believes that the node has something of the attempt
        self.cancels = []  # (node, epoch) that have not been answered
        self.lost = set()  # (node, epoch) of before a broken stream: what is still said of them is of no interest
        self.failed = set()  # (node, epoch): a failure may be the answer to a cancel too
        self.asked_in_vain = set()  # (node, epoch): what was there may have ended before the command came
        self.num_failures = 0
        self.num_revoked = 0
        self.num_kept = 0
        self.num_shared = 0  # credits behind another one, whose blocks were found
        self.num_migrations_off = 0
        self.num_unlike = 0  # moves to nodes that held other blocks of the same tokens
        self.num_held_there = 0  # blocks of answers that moved which the node had that they came to
        self._num_epochs = 0
        self._pace = {action: self.random.choice([0.1, 0.5, 1.0]) for action in range(8)}

    # ---- what the user does ----

    def ask(self, prompt, max_tokens, age, salt="", priority=0):
        ask = Ask(f"r{len(self.all)}", age, list(prompt), salt, max_tokens, priority)
        self.all.append(ask)
        self.to_come.append(ask)
        return ask

    def choose(self, ask):
        """Who reads and who writes."""
        return self.random.choice(self.nodes), self.random.choice(self.nodes)

    def run(self, until=None):
        """Until everything is over, or `until` says so."""
        num_still = 0
        for number in range(MOST_ROUNDS):
            if number and (self.is_done if until is None else until()):
                return number
            num_still = 0 if self._round(hurries=num_still > 2) else num_still + 1
            assert num_still < 8, f"nothing moves any more:\n{self.describe()}"
        raise AssertionError(f"no end after {MOST_ROUNDS} rounds:\n{self.describe()}")

    @property
    def is_done(self):
        return (
            not self.to_come
            and all(ask.is_over for ask in self.all)
            and self.failed.issuperset(self.cancels)
            and all(node.scheduler.is_idle and not node.works and not node.commands for node in self.nodes)
            and all(node.num_heard == len(node.events) for node in self.nodes)
        )

    def check_end(self):
        """Everything is answered as on paper, and nothing is left."""
        for ask in self.all:
            answer = answer_of(ask.prompt, ask.max_tokens)
            assert ask.output == answer[: len(ask.output)], f"{ask.name} has other tokens"
            assert ask.is_cancelled or ask.output == answer
        assert not self.held, "a node never said that it let go"
        for node in self.nodes:
            node.check_empty()

    def describe(self):
        lines = []
        for node in self.nodes:
            lines.append(f"{node.name} {node.num_free} of {node.allocator.num_blocks} free")
            lines += [
                f"  {each.request.request_id} age {each.age} {each.state.name}"
                f" {'out' if each.only_prefills else 'in' if each.incoming else 'own'}"
                f" blocks {len(each.lease.block_ids) if each.lease else 0}"
                f" {'sending' if each.is_sending else ''}{'receiving' if each.is_receiving else ''}"
                f"{' revoked' if each.is_revoked else ''}{' ending' if each.is_ending else ''}"
                f" evictions {each.num_evictions}"
                for each in node.scheduler.node_requests
            ]
        return "\n".join(lines)

    # ---- one round: everything that can happen may happen ----

    def _round(self, hurries):
        """Whether anything has happened."""
        actions = [(0, self._start)]
        for node in self.nodes:
            actions += [(1, lambda node=node: self._command(node)), (2, lambda node=node: self._hear(node))]
            actions += [(3, lambda node=node: self._step(node))]
        for channel in list(self.channels.values()):
            actions += [
                (4, lambda channel=channel: self._grant(channel)),
                (5, lambda channel=channel: self._carry(channel)),
            ]
            actions += [
                (6, lambda channel=channel: self._end_receive(channel)),
                (7, lambda channel=channel: self._end_send(channel)),
            ]
        self.random.shuffle(actions)
        has_migrated = False
        for kind, action in actions:
            if hurries or self.random.random() < self._pace[kind]:
                has_migrated |= bool(action())
        if self.faults:
            self._trouble()
        if self.asks and self.random.random() < self.migrations:
            self._migration(self.random.choice(list(self.asks.values())))
        if self.asks and self.random.random() < self.keeps:
            self._keep_where_read(self.random.choice(list(self.asks.values())))
        return has_migrated

    def _fails(self, factor=1.0):
        return self.random.random() < self.faults * factor

    def _start(self):
        if not self.to_come:
            return False
        self._attempt(self.to_come.pop(0))
        return True

    def _attempt(self, ask):
        self._num_epochs += 1
        ask.epoch, ask.tokens = self._num_epochs, {}
        ask.is_reserved = ask.is_committed = ask.is_to_be_kept = False
        ask.first_index = len(ask.output)
        ask.reader, ask.writer = self.choose(ask)
        self.asks[ask.epoch] = ask
        job = self._job(ask, ask.epoch)
        is_local = ask.reader is ask.writer
        self._tell(ask.writer, ask.epoch, reserve=fleet_pb2.Reserve(job=job, local_prefill=is_local, prefill_tp_size=1))
        if not is_local:
            self._tell(ask.reader, ask.epoch, prefill=fleet_pb2.Prefill(job=job))

    def _job(self, ask, epoch):
        sampling = SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True)
        request = Request(ask.name, epoch, ask.prompt + ask.output, len(ask.prompt), sampling, ask.salt)
        return convert.job_to_wire(request, ask.age, priority=ask.priority)

    def _tell(self, node, epoch, **command):
        node.commands.append(command)
        if "cancel" in command:
            self.cancels.append((node, epoch))
        elif "migrate" in command or "keep" in command:
            self.asked_in_vain.add((node, epoch))
        elif "deliver" not in command and "begun" not in command:
            self.held.add((node, epoch))

    def _command(self, node):
        if not node.commands:
            return False
        node.handle(**node.commands.pop(0))
        return True

    def _step(self, node):
        if not node.works:
            return bool(node.begin())
        if self._fails(0.3):
            node.fail_step()
        else:
            node.end()
        return True

    def _grant(self, channel):
        if channel.is_granted or channel.receiver_has_heard:
            return False
        channel.is_granted = True
        channel.receiver.worker.credited(channel.epoch, channel.descriptor)
        channel.receiver.check()
        return True

    def _carry(self, channel):
        """The KV that is ready arrives, and after it the end."""
        if channel.state != "open" or channel.sender is None:
            return False
        if self._fails():
            channel.end("lost")
            return True
        num_before = channel.num_arrived
        if channel.carry():
            if num_before == channel.num_cached:
                channel.receiver.worker.receiving(channel.epoch)
            return True
        if channel.outgoing.is_finished:
            channel.commit()
            return True
        has_caught_up, channel.has_caught_up = channel.has_caught_up, True
        if not has_caught_up:
            channel.sender.worker.caught_up(channel.sender_epoch)
            channel.sender.check()
        return not has_caught_up

    def _end_receive(self, channel):
        if channel.state == "open" or channel.receiver_has_heard:
            return False
        channel.receiver_has_heard = True
        del channel.receiver.opened[channel.epoch]
        channel.receiver.worker.received(channel.epoch, channel.received())
        channel.receiver.check()
        self._forget(channel)
        return True

    def _end_send(self, channel):
        if channel.state == "open" or channel.sender is None:
            return False
        sender, channel.sender = channel.sender, None
        del sender.sending[channel.sender_epoch]
        sender.worker.sent(channel.sender_epoch, channel.sent())
        sender.check()
        self._forget(channel)
        return True

    def _forget(self, channel):
        """Of channels that are over for good a few are kept, for descriptors that are still under way."""
        if len(self.channels) > 200 and channel.receiver_has_heard and channel.sender is None:
            self.channels.pop(next(iter(self.channels)))

    # ---- trouble ----

    def _trouble(self):
        if self._fails() and self.asks:
            ask = self.random.choice(list(self.asks.values()))
            ask.is_cancelled = True
            self._give_up(ask)
        if self._fails(0.2):
            self._detach(self.random.choice(self.nodes))
        for channel in list(self.channels.values()):
            if channel.state == "open" and channel.sender is not None and self._fails(0.3):
                channel.end("lost")

    def _detach(self, node):
        """The stream to a node breaks, and what was on it is lost; it comes back at once."""
        node.commands.clear()
        node.detached()
        node.scheduler.attached()
        node.num_heard = len(node.events)
        node.hints.clear()
        self.lost |= {each for each in [*self.cancels, *self.held] if each[0] is node}
        self.cancels = [each for each in self.cancels if each[0] is not node]
        self.held = {each for each in self.held if each[0] is not node}
        for ask in list(self.asks.values()):
            if node in (ask.reader, ask.writer) or self._lacks_tokens_of(node, ask):
                self._again(ask)
            elif ask.migrating is not None and node is ask.migrating.target:
                self._stays(ask)

    def _lacks_tokens_of(self, node, ask):
        """Whether tokens of a node that it has moved away from were on their way, and are lost."""
        ends = [end for old, tokens, end in self.migrated.values() if old is node and tokens is ask.tokens]
        return any(index not in ask.tokens for end in ends for index in range(ask.first_index, end))

    def _give_up(self, ask):
        del self.asks[ask.epoch]
        for node in {ask.reader: None, ask.writer: None}:
            self._cancel(node, ask, ask.epoch)
        self._forget_migration(ask)

    def _forget_migration(self, ask):
        migrating, ask.migrating = ask.migrating, None
        if migrating is not None:
            del self.migrating[migrating.epoch]
            if not migrating.is_off:
                self._cancel(migrating.target, ask, migrating.epoch)

    def _cancel(self, node, ask, epoch):
        if (node, epoch) in self.held and (node, epoch) not in self.cancels:
            attempt = fleet_pb2.Attempt(request_id=ask.name, epoch=epoch)
            self._tell(node, epoch, cancel=fleet_pb2.Cancel(attempt=attempt))

    def _again(self, ask):
        self.num_failures += 1
        self._give_up(ask)
        self._attempt(ask)

    def _wire(self, ask):
        return fleet_pb2.Attempt(request_id=ask.name, epoch=ask.epoch)

    # ---- moves, and prompts that are kept ----

    def _migration(self, ask):
        """Asks another node for room for an answer that is being written."""
        if ask.migrating is not None or not ask.is_written or ask.is_over:
            return
        self._num_epochs += 1
        target = self.random.choice([node for node in self.nodes if node is not ask.writer])
        ask.migrating = Migrating(self._num_epochs, target)
        self.migrating[self._num_epochs] = ask
        job, num_ahead = self._job(ask, self._num_epochs), self.random.choice([1, 3, 9])
        sizes = {"prefill_tp_size": 1, "num_tokens_ahead": num_ahead}
        reserve = fleet_pb2.Reserve(job=job, is_whole=ask.migrations_whole, **sizes)
        self._tell(target, self._num_epochs, reserve=reserve)

    def _migration_is_off(self, ask):
        """The target is to let go first."""
        self.num_migrations_off += not ask.migrating.is_off
        if not ask.migrating.is_off:
            ask.migrating.is_off = True
            self._cancel(ask.migrating.target, ask, ask.migrating.epoch)

    def _stays(self, ask):
        """The target has let go."""
        ask.migrating.is_off = True
        self._forget_migration(ask)
        self._tell(ask.writer, ask.epoch, keep=fleet_pb2.Keep(attempt=self._wire(ask)))

    def _keep_where_read(self, ask):
        """One that has no credit; the node without room is to let go first."""
        if ask.reader is ask.writer or ask.is_reserved or ask.is_committed or ask.is_to_be_kept:
            return
        if (ask.writer, ask.epoch) in self.held:
            ask.is_to_be_kept = True
            self._cancel(ask.writer, ask, ask.epoch)

    def _is_kept(self, ask):
        self.num_kept += 1
        ask.is_to_be_kept, ask.writer = False, ask.reader
        self._tell(ask.reader, ask.epoch, keep=fleet_pb2.Keep(attempt=self._wire(ask)))

    # ---- what the coordinator hears ----

    def _hear(self, node):
        if node.num_heard == len(node.events):
            return False
        event = node.events[node.num_heard]
        node.num_heard += 1
        kind = event.WhichOneof("event")
        if kind == "step_tokens":
            for token in event.step_tokens.tokens:
                self._token(node, token, is_first=False)
        elif kind == "first_token":
            self._token(node, event.first_token.token, is_first=True)
        elif kind not in ("cache_changed", "progress"):
            body = getattr(event, kind)
            epoch = body.attempt.epoch
            if (node, epoch) in self.lost:
                return True
            if kind == "cancelled":
                self.cancels.remove((node, epoch))  # it was asked for, and is told once
                self.held.discard((node, epoch))
                self._has_let_go(node, epoch)
            elif (node, epoch) not in self.held and (node, epoch) in self.asked_in_vain:
                assert kind in ("failed", "migration_failed")
            else:
                assert (node, epoch) in self.held, f"{kind} of what {node.name} has let go"
                getattr(self, f"_{kind}")(node, epoch, body)
        return True

    def _token(self, node, token, is_first):
        epoch = token.attempt.epoch
        assert (node, epoch) in self.held, f"a token of what {node.name} has let go"
        if token.finish_reason:
            self.held.discard((node, epoch))
        ask = self.asks.get(epoch) or self._ask_that_migrated(node, token)
        if ask is None:
            return
        assert epoch in self.migrated or node is (ask.reader if is_first else ask.writer)
        assert token.index not in ask.tokens, "a token came twice"
        assert is_first == (token.index == ask.first_index)
        ask.tokens[token.index] = token.token_id
        if is_first:
            self._tell_begun(ask)
        while len(ask.output) in ask.tokens:
            ask.output.append(ask.tokens[len(ask.output)])
        assert bool(token.finish_reason) == (token.index == ask.max_tokens - 1)
        if ask.is_over:
            self._finish(ask)

    def _tell_begun(self, ask):
        """The writer hears that the prompt is read, as long as it lacks the KV."""
        if ask.reader is not ask.writer and not ask.is_committed and not ask.is_to_be_kept:
            self._tell(ask.writer, ask.epoch, begun=fleet_pb2.Begun(attempt=self._wire(ask)))

    def _finish(self, ask):
        """A node that still has something of it lets go by itself, but for one that waits for KV that will not come."""
        del self.asks[ask.epoch]
        self._forget_migration(ask)
        if len(ask.tokens) == 1:
            self._cancel(ask.writer, ask, ask.epoch)

    def _ask_that_migrated(self, node, token):
        """Of tokens that the node had told, or was telling, when the answer went on elsewhere."""
        old, tokens, end = self.migrated.get(token.attempt.epoch, (None, None, 0))
        assert old is None or (old is node and token.index < end), "a token of a node that had stopped"
        return next((ask for ask in self.asks.values() if ask.tokens is tokens), None)

    def _has_let_go(self, node, epoch):
        """Of an attempt that was cancelled there, or has failed."""
        ask = self.asks.get(epoch)
        if ask is not None and ask.is_to_be_kept and node is ask.writer:
            self._is_kept(ask)
        elif epoch in self.migrating:
            self._stays(self.migrating[epoch])

    def _reserved(self, node, epoch, reserved):
        ask = self.asks.get(epoch)
        if epoch in self.migrating and not self.migrating[epoch].migrating.is_off:
            ask = self.migrating[epoch]
            migrate = fleet_pb2.Migrate(attempt=self._wire(ask), descriptor=reserved.descriptor)
            self._tell(ask.writer, ask.epoch, migrate=migrate)
        elif ask is not None and not ask.is_to_be_kept:
            assert node is ask.writer
            assert not ask.is_reserved, "two descriptors at a time"
            ask.is_reserved = True
            deliver = fleet_pb2.Deliver(attempt=reserved.attempt, descriptor=reserved.descriptor)
            self._tell(ask.reader, epoch, deliver=deliver)

    def _revoked(self, node, epoch, _):
        self.num_revoked += 1
        if ask := self.asks.get(epoch):
            ask.is_reserved = False
            if ask.tokens:
                self._tell_begun(ask)
        elif epoch in self.migrating:
            self._migration_is_off(self.migrating[epoch])

    def _migration_failed(self, node, epoch, failed):
        ask = self.asks.get(epoch)
        if failed.reason == reasons.PAIRING_MISMATCH:
            self.num_unlike += 1
            if ask is not None:
                ask.migrations_whole = True
        if ask is not None and ask.migrating is not None:
            self._migration_is_off(ask)

    def _committed(self, node, epoch, committed):
        if epoch in self.migrating:
            if not self.migrating[epoch].migrating.is_off:
                self.num_held_there += committed.num_bytes_saved // BLOCK_BYTES
                self._has_migrated(self.migrating.pop(epoch), committed.next_index)
        elif ask := self.asks.get(epoch):
            assert node is ask.writer
            assert ask.is_reserved
            assert committed.next_index == ask.first_index + 1
            ask.is_committed = True

    def _has_migrated(self, ask, next_index):
        """The tokens up to the next one are the old node's, and may still come; it is to let go."""
        old, epoch = ask.writer, ask.epoch
        self.migrated[epoch] = (old, ask.tokens, next_index)
        self.asks[ask.migrating.epoch] = self.asks.pop(epoch)
        ask.epoch, ask.writer, ask.migrating = ask.migrating.epoch, ask.migrating.target, None
        ask.is_committed = True
        ask.num_migrations += 1
        self._cancel(old, ask, epoch)

    def _transferred(self, node, epoch, _):
        self.held.remove((node, epoch))

    def _failed(self, node, epoch, failed):
        assert self.faults, f"{failed.reason}: {failed.message}\n{self.describe()}"
        self.held.remove((node, epoch))
        self.failed.add((node, epoch))
        ask = self.asks.get(epoch)
        if epoch in self.migrating or (ask is not None and ask.is_to_be_kept and node is ask.writer):
            self._has_let_go(node, epoch)
        elif ask is not None:
            self._again(ask)
