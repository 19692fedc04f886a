"""A simulated coordinator process: the real dispatcher, scheduler, registry, roles and fleet service; its clients."""

import asyncio
from collections import Counter
from types import SimpleNamespace

from coordinator.control.instructions import NUM_EPOCHS
from coordinator.control.load import NOTHING, Ledger
from coordinator.control.metrics import Metrics
from coordinator.control.migration import may_migrate, roomiest
from coordinator.control.nodes import Registry
from coordinator.control.request_log import RequestLog
from coordinator.control.roles import Roles
from coordinator.control.scheduler import Scheduler
from coordinator.dispatcher import Dispatcher
from coordinator.fleet_service import FleetService
from protos import inference_pb2
from serving_core.errors import RequestError
from tests.schedules.clients import Call
from tests.schedules.history import Rest
from tests.schedules.streams import METHOD

MAX_TICK_S = 0.25


class _Scheduler(Scheduler):
    """A scheduler that can be told to do what its policies decide otherwise."""

    def move_some(self, now, nodes, ledger):
        """Yields what lets each running answer that can move."""
        for request in self._on_nodes():
            if may_migrate(request, now, rest_s=0.0):
                others = [node for node in nodes if node is not request.attempt.decode]
                if (target := roomiest(request, others, ledger)) is not None:
                    yield self._migrations.begin(request, target, now)

    def begin_some_again(self, now):
        """Yields what lets each prompt without a token begin again."""
        for request in self._on_nodes():
            if request.is_on_nodes and request.may_restart_unseen:
                yield self._restart_elsewhere(request, now)


class _Dispatcher(Dispatcher):
    """A dispatcher that says what it holds."""

    def apply(self, instructions):
        self._apply(instructions)

    @property
    def num_calls(self):
        return len(self._calls)


class _Ledger(Ledger):
    """A ledger that says what it holds."""

    @property
    def num_accounts(self):
        return len(self._accounts)

    @property
    def num_requests(self):
        return len(self._requests)


class SimulatedCoordinator:
    """One life of a coordinator process. To be made within its process."""

    def __init__(self, settings, network, process, on_failed, random):
        """`on_failed` is told of a client whose call has, and of the error; None when all is lost."""
        self.process = process
        self._settings, self._on_failed, self._loop = settings, on_failed, network.loop
        self.registry = Registry(
            {},
            node_timeout_s=settings.node_timeout_s,
            step_timeout_s=settings.step_timeout_s,
            first_session=random.getrandbits(60) + 1,
        )
        self._ledger, self.metrics = _Ledger(), Metrics()
        self.scheduler = _Scheduler(
            self.registry,
            self._ledger,
            self.metrics,
            first_epoch=random.randrange(NUM_EPOCHS),
            max_live=settings.max_num_queued_reqs,
            max_restarts=settings.max_restarts,
            keep_after_s=settings.keep_after_s,
            node_wait_s=settings.node_wait_s,
            fetches=settings.remote_prefix_fetch,
        )
        roles = Roles(self.registry, self._ledger, policy=settings.roles)
        self.dispatcher = _Dispatcher(self.registry, self.scheduler, roles, RequestLog(self.metrics))
        self._clients = {}  # who waits, in a dict for its order
        service = FleetService(
            self.dispatcher, heartbeat_s=settings.heartbeat_s, node_timeout_s=settings.node_timeout_s
        )
        network.serve(process, service.handler().service(SimpleNamespace(method=METHOD)).stream_stream)

    def start(self, loop):
        """The tasks whose end is the end of the process."""
        return [loop.start(self.process, self._supervise())]

    async def _supervise(self):
        """As coordinator/server.py does."""
        changed = self.dispatcher.nodes_changed
        while True:
            try:
                async with asyncio.timeout(min(MAX_TICK_S, self._settings.node_timeout_s / 8)):
                    await changed.wait()
            except TimeoutError:
                pass
            changed.clear()
            self.dispatcher.tick()

    def move_some(self):
        """The running sequences that can are to move now, whatever the policies say."""
        for instructions in self.scheduler.move_some(self._loop.time(), self.registry.nodes, self._ledger):
            self.dispatcher.apply(instructions)

    def begin_some_again(self):
        """Prompts without a token begin again now, as those of nodes that drain do; on the same nodes perhaps."""
        for instructions in self.scheduler.begin_some_again(self._loop.time()):
            self.dispatcher.apply(instructions)

    # ---- clients ----

    def expect(self, client):
        """The request is on its way."""
        self._clients[client] = None

    def ask(self, client):
        """The request has come."""
        if client.listens:
            client.call = call = Call()
            call.task = self._loop.create_task(self._answer(client, call))

    def forget(self, client):
        """It waits for nothing any more that this coordinator has."""
        self._clients.pop(client, None)

    def leave(self, client):
        """The client has hung up."""
        self.forget(client)
        if client.call is not None:
            client.call.task.cancel()

    def died(self):
        """Everyone who waits hears so."""
        for client in list(self._clients):
            self._fail(client, client.call, None)

    def _fail(self, client, call, error):
        """Of a call that has broken off its client hears nothing."""
        if client.call is call:
            self.forget(client)
            if client.listens:
                self._on_failed(client, error)

    async def _answer(self, client, call):
        """As coordinator/api/inference_service.py does."""
        now = self._loop.time()
        plan, so_far, text = client.plan(self._loop.now)
        times = {"arrived_s": now, "deadline_s": now + client.left_s(self._loop.now)}
        try:
            generation = self.dispatcher.submit(plan, [(so_far, text)], client.slo, **times)
        except RequestError as refusal:
            self._fail(client, call, refusal)
            return
        call.is_taken = True
        try:
            while (message := await generation.next()) is not None:
                response = inference_pb2.GenerateResponse(request_id=generation.request_id, **message.fields())
                if client.listens and client.call is call:
                    client.take(response, self._loop.now)
        except RequestError as error:
            self._fail(client, call, error)
        finally:
            if client.call is call:
                self.forget(client)
            self.dispatcher.close(generation)

    # ---- the end ----

    @property
    def is_quiet(self):
        return not self.scheduler.num_open and not self._clients

    @property
    def seen(self):
        """What has happened in this life."""
        metrics = self.metrics
        counts = {"restarted": metrics.num_restarts, "kept": metrics.num_kept}
        counts |= {f"move {outcome}": count for outcome, count in metrics.migrations.items()}
        counts |= {f"loan {outcome}": count for outcome, count in metrics.prefix_fetches.items()}
        return Counter(counts | {"whole": metrics.finished["length"], "failed": metrics.failed.total()})

    def rests(self):
        """What it holds; everything is counted from scratch."""
        self._ledger.check_integrity()
        accounts = [node.name for node in self.registry.nodes if self._ledger.of(node) != NOTHING]
        held = {
            "answers, or attempts that nodes have yet to let go of": self.scheduler.num_open,
            "calls": self.dispatcher.num_calls + self.dispatcher.num_live,
            "accounts of work": self._ledger.num_accounts,
            f"accounts of attached nodes ({', '.join(accounts)})": len(accounts),
            "requests on its ledger": self._ledger.num_requests,
        }
        return [Rest(self._loop.now, self.process.name, what, count) for what, count in held.items()]
