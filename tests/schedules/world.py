"""A whole fleet in simulated time: the real code of coordinator and nodes over a simulated network, under one schedule.

What runs is what a deployment runs, but for the clock, gRPC, ZeroMQ and the engine: dispatcher, scheduler, placement,
roles and fleet service, and on the nodes link, runner, scheduler, allocator and both ends of KV transfers. One seed
gives one history."""

import logging
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from random import Random

from serving_core.errors import RequestError
from tests.schedules.clients import Client
from tests.schedules.coordinator import SimulatedCoordinator
from tests.schedules.history import LIVE_S, Asked, Calm, Crashed, Left, Note, Stood
from tests.schedules.network import COORDINATOR, GIVES_UP_S, Network, Noise
from tests.schedules.node import InjectedError, SimulatedNode
from tests.schedules.plan import FAULTS, plan_of
from tests.schedules.processes import Process, SimulatedLoop

LOOK_S = 0.2  # between two looks at whether all is over
MOST_FAST, MOST_AHEAD_S = 0.01, 1e6  # of a process's clock


class World:
    """One run of one schedule."""

    def __init__(self, seed, *, kinds=FAULTS, traces=False):
        self.plan = plan_of(seed, kinds)
        self.history = []
        self.loop = SimulatedLoop()
        self._random = Random(f"{seed} world")
        self.loop.on_error = self._unexpected
        self.loop.network = self.network = Network(self.loop, Random(f"{seed} network"), self._note)
        self.network.traces = traces
        self.nodes = {}
        self.seen = Counter()  # what has happened, for who wants to know whether anything does
        self._clients = {}
        self._processes = []
        self._is_over = False

    def run(self):
        """The history of the schedule, to its end."""
        loop, plan = self.loop, self.plan
        with self._watching_logs():
            self._start_coordinator()
            for name in plan.roles:
                self._start_node(name)
            for ask in plan.asks:
                loop.plan(loop.outside, ask.at_s, self._ask, ask)
            for fault in plan.faults:
                loop.plan(loop.outside, fault.at_s, self._befall, fault)
            loop.plan(loop.outside, plan.calm_s + LOOK_S, self._calm)
            loop.plan(loop.outside, plan.calm_s + LOOK_S, self._look)
            loop.run(lambda: self._is_over)
            self._count_rests()
            self.seen["attached again"] += self.network.num_streams - self.seen["lives"]
            loop.end(self._processes)
        return self.history

    # ---- processes ----

    def _process(self, name):
        random = self._random
        ahead_s, pace = random.random() * MOST_AHEAD_S, 1 + (2 * random.random() - 1) * MOST_FAST
        self._processes.append(Process(name, ahead_s, pace))
        return self._processes[-1]

    def _start_coordinator(self):
        process = self._process(COORDINATOR)

        def begin():
            arguments = self.network, process, self._failed, self._random
            self.coordinator = SimulatedCoordinator(self.plan.settings, *arguments)
            self._watch(process, self.coordinator.start(self.loop))

        self.loop.plan(process, self.loop.now, begin)

    def _start_node(self, name):
        process, plan, seed = self._process(name), self.plan, self._random.getrandbits(32)

        def begin():
            arguments = (self.network, process, self.history.append, Random(seed))
            node = self.nodes[name] = SimulatedNode(name, plan.roles[name], plan.sizes, *arguments)
            self._watch(process, node.start(self.loop))

        self.loop.plan(process, self.loop.now, begin)

    def _watch(self, process, tasks):
        """None of these is to end."""
        for task in tasks:
            task.add_done_callback(lambda task: self._ended(process, task))

    def _ended(self, process, task):
        if not task.cancelled() and not self._is_over:
            self._unexpected(process, f"{task.get_coro().__qualname__} has ended", task.exception())

    def _kill(self, life):
        self.seen += life.seen
        process = life.process
        process.is_dead = True
        self.network.lose(process)

    # ---- clients ----

    def _ask(self, ask):
        now = self.loop.now
        asked = Asked(now, ask.name, ask.prompt, ask.max_tokens, ask.salt, now + ask.timeout_s)
        self.history.append(asked)
        self._clients[ask.name] = client = Client(asked, ask.slo, self.history.append, resumes=ask.resumes)
        self._send(client)

    def _send(self, client):
        """A call, the first one or a later one."""
        if not client.listens:
            return
        coordinator = self.coordinator
        if coordinator.process.is_dead:
            self._failed(client, None)
        else:
            coordinator.expect(client)
            self.loop.plan(coordinator.process, self.loop.now + self.network.delay_s(), coordinator.ask, client)

    def _failed(self, client, error):
        """A call, with this error; None: it has lost its coordinator."""
        if (pause_s := client.fails(error, self.loop.now)) is not None:
            self.seen["went on"] += 1
            self._after(pause_s, self._send, client)

    # ---- faults ----

    def _befall(self, fault):
        self._note(f"-- {fault}")
        getattr(self, f"_{fault.name}_it")(*fault.arguments, fault.seconds)

    def _kill_it(self, name, seconds):
        """A node's process, which is started again."""
        if not self.nodes[name].process.is_dead:
            self._kill(self.nodes[name])
            self._after(seconds, self._start_node, name)

    def _pause_it(self, name, seconds):
        self._stand_still(self.nodes[name].process, seconds)
        if seconds > GIVES_UP_S:
            self._after(GIVES_UP_S, self.network.reset, name, COORDINATOR)

    def _pause_coordinator_it(self, seconds):
        self._stand_still(self.coordinator.process, seconds)
        self.history.append(Stood(self.loop.now, seconds))
        if seconds > GIVES_UP_S:
            for name in self.nodes:
                self._after(GIVES_UP_S, self.network.reset, name, COORDINATOR)

    def _stand_still(self, process, seconds):
        process.resumes_s = max(process.resumes_s, self.loop.now + seconds)

    def _restart_coordinator_it(self, seconds):
        if not self.coordinator.process.is_dead:
            self._kill(self.coordinator)
            self.coordinator.died()
            self._after(seconds, self._start_coordinator)
            self.history.append(Stood(self.loop.now, seconds))

    def _block_it(self, name, direction, seconds):
        """Between a node and the coordinator."""
        if direction != "down":
            self.network.block(name, COORDINATOR, seconds)
        if direction != "up":
            self.network.block(COORDINATOR, name, seconds)

    def _block_data_it(self, name, other, direction, seconds):
        self.network.block(name, other, seconds)
        if direction == "both":
            self.network.block(other, name, seconds)

    def _spoil_it(self, name, direction, how, seconds):
        """One message between a node and the coordinator, whose connection lives."""
        ends = (name, COORDINATOR) if direction == "up" else (COORDINATOR, name)
        self.network.spoil(*ends, how)

    def _reset_it(self, name, seconds):
        self.network.reset(name, COORDINATOR)

    def _reset_data_it(self, name, other, seconds):
        self.network.reset(name, other)

    def _noise_it(self, dropped, doubled, overtaken, changed, seconds):
        self.network.noise = noise = Noise(dropped, doubled, overtaken, changed)

        def quiet():
            if self.network.noise is noise:
                self.network.noise = Noise()

        self._after(seconds, quiet)

    def _leave_it(self, request, seconds):
        client = self._clients.get(request)
        if client is not None and client.listens:
            client.listens = False
            self.history.append(Left(self.loop.now, request))
            self._at_coordinator(lambda: self.coordinator.leave(client))

    def _break_off_it(self, request, seconds):
        """The connection of a client, which the coordinator notices after so long."""
        client = self._clients.get(request)
        if client is not None and client.listens and client.call is not None:
            self._after(seconds, self._at_coordinator, client.call.task.cancel)
            self.coordinator.forget(client)
            self._failed(client, None)

    def _abort_it(self, request, seconds):
        self._at_coordinator(lambda: self.coordinator.dispatcher.abort(request))

    def _reshape_it(self, name, role, seconds):
        self._at_coordinator(lambda: self.coordinator.dispatcher.set_shape(name, role))

    def _migration_it(self, seconds):
        self._again_and_again(lambda: self.coordinator.move_some(), seconds)

    def _begin_again_it(self, seconds):
        self._again_and_again(lambda: self.coordinator.begin_some_again(), seconds)

    def _again_and_again(self, action, seconds):
        """At the coordinator, for so long."""
        for index in range(1 + int(4 * seconds / LOOK_S)):
            self._after(index * LOOK_S / 4, self._at_coordinator, action)

    def _drain_it(self, name, seconds):
        self._at_coordinator(lambda: self.coordinator.dispatcher.drain_node(name))
        self._after(seconds, self._reshape_it, name, self.plan.roles[name], 0.0)

    def _fail_step_it(self, name, seconds):
        self.nodes[name].engine.fails = True

    def _stall_step_it(self, name, seconds):
        self.nodes[name].engine.stalls_s = seconds

    def _at_coordinator(self, action):
        """Somebody asks it for something, which it may refuse."""

        def ask():
            with suppress(RequestError):
                action()

        self.loop.plan(self.coordinator.process, self.loop.now + self.network.delay_s(), ask)

    def _after(self, seconds, action, *arguments):
        self.loop.plan(self.loop.outside, self.loop.now + seconds, action, *arguments)

    # ---- the end ----

    def _calm(self):
        """No fault is left; who writes and who reads is as it was."""
        for node in self.nodes.values():
            node.engine.fails, node.engine.stalls_s = False, 0.0
            self._reshape_it(node.name, node.role, 0.0)
        self.history.append(Calm(self.loop.now))

    def _look(self):
        hears = any(client.listens for client in self._clients.values())
        have_ended = not (hears or self.coordinator.process.is_dead) and self.coordinator.is_quiet
        is_late = self.loop.now > max(self.plan.calm_s, *(ask.at_s for ask in self.plan.asks)) + LIVE_S
        is_quiet = have_ended and all(node.is_quiet for node in self.nodes.values())
        self._is_over = (is_quiet and len(self._clients) == len(self.plan.asks)) or is_late
        self._after(LOOK_S, self._look)

    def _count_rests(self):
        for part in (self.coordinator, *self.nodes.values()):
            self.seen += part.seen
            try:
                self.history += part.rests()
            except AssertionError as error:
                self._unexpected(part.process, "miscounted", error)

    # ---- what is noted ----

    def _note(self, text):
        self.history.append(Note(self.loop.now, text))

    def _unexpected(self, process, message, error):
        if process is self.loop.outside and error is not None:
            raise error
        where = traceback.extract_tb(error.__traceback__)[-1] if error is not None else "nowhere"
        self.history.append(Crashed(self.loop.now, process.name, f"{message}: {error!r:.200} at {where}"))
        self._is_over = True

    @contextmanager
    def _watching_logs(self):
        """Errors that the code catches and logs are as unexpected as those that it raises."""
        loop, unexpected = self.loop, self._unexpected

        class Watch(logging.Handler):
            def emit(self, record):
                error = record.exc_info[1] if record.exc_info else None
                if not isinstance(error, InjectedError):
                    unexpected(loop.current, record.getMessage(), error)

        root = logging.getLogger()
        handlers, disabled = root.handlers, root.manager.disable
        root.handlers = [Watch(logging.ERROR)]  # alone: who else keeps records keeps all that their tracebacks hold
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
            root.handlers = handlers
