"""Carry out the instructions of the scheduler: send commands to nodes, and tokens and ends to clients.

Everything here runs on the event loop and never waits, so no two events can interleave.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from coordinator.api.generation import Generation
from coordinator.api.validation import RequestPlan
from coordinator.control.adapters import FleetAdapters
from coordinator.control.instructions import (
    MAX_MESSAGE_CHARS,
    Chunk,
    Emit,
    End,
    Instruction,
    MigrationEnded,
    Send,
    cut_short,
)
from coordinator.control.load import Prompt
from coordinator.control.migration import check_target
from coordinator.control.nodes import Capacity, Kinds, LossCause, Node, Registry
from coordinator.control.request import SoFar
from coordinator.control.request_log import CallRecord, RequestLog
from coordinator.control.roles import RecentCapacity, Roles
from coordinator.control.scheduler import Scheduler
from coordinator.control.slo import Slo
from coordinator.text.answers import Answer, AnswerText
from protos import fleet_pb2, inference_pb2
from serving_core.errors import RequestError
from serving_core.net.numbering import MessageLost
from serving_core.reasons import (
    ABORTED,
    BAD_PARAM,
    DRAIN_ENDED,
    DRAINING,
    DUPLICATE_REQUEST_ID,
    NAME_TAKEN,
    WORKER_LOST,
)
from serving_core.shapes import Shape

logger = logging.getLogger(__name__)

MAX_UNSENT_COMMANDS: Final = 10_000


class NodeLink:
    """Queue the commands for one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.has_namesake = False  # whether another process claims the node's name
        self._unsent: asyncio.Queue[fleet_pb2.NodeCommand | RequestError] = asyncio.Queue()

    def send(self, command: fleet_pb2.NodeCommand) -> bool:
        """Queue a command. Returns False when MAX_UNSENT_COMMANDS commands are unsent."""
        if self._unsent.qsize() >= MAX_UNSENT_COMMANDS:
            return False
        self._unsent.put_nowait(command)
        return True

    def end(self, error: RequestError) -> None:
        """End the queue: `next` raises `error` after the commands that are queued."""
        self._unsent.put_nowait(error)

    async def next(self) -> fleet_pb2.NodeCommand:
        """Wait for the next command to the node and return it. Raises the RequestError given to `end` at the end."""
        command = await self._unsent.get()
        if isinstance(command, RequestError):
            raise command
        return command


class Recipient(Protocol):
    """Receive the tokens and the end of one sequence of a call: an Answer, or a TokenOutput for an API server."""

    generation: Generation

    def add(self, chunk: Chunk) -> bool: ...
    def end(self, complete: inference_pb2.Complete) -> None: ...


@dataclass(slots=True, eq=False)
class _OpenCall:
    call: Generation
    asker: str
    number: int  # counts the client's calls for this request
    goes_on: bool  # at the next coordinator, when this one ends
    has_answer: bool = False  # one of its sequences has ended well


class Dispatcher:
    """Connect clients, nodes and the pure parts: registry, scheduler and roles."""

    def __init__(
        self,
        registry: Registry,
        scheduler: Scheduler,
        roles: Roles,
        request_log: RequestLog,
        *,
        node_wait_s: float = 0.0,
        stream_interval: int = 1,
    ) -> None:
        self._stream_interval = stream_interval
        self._registry = registry
        self._capacity = RecentCapacity(registry, node_wait_s)
        self._scheduler = scheduler
        self._roles = roles
        self._request_log = request_log
        self._adapters = FleetAdapters(registry, scheduler.num_using)
        self._adapters_changed = asyncio.Event()
        self._kinds = Kinds()
        self._links: dict[Node, NodeLink] = {}
        self._calls: dict[str, _OpenCall] = {}  # by request id
        self._answers: dict[str, Recipient] = {}
        self.is_draining = False
        self._hands_over = False  # whether a drain still accepts calls that go on
        self._num_staying = 0  # open calls that end with this coordinator
        self._idle = asyncio.Event()
        self._idle.set()
        self._shapes_changed = asyncio.Event()
        self.nodes_changed = asyncio.Event()  # set when the ready nodes change; the waiter clears it

    # ---- nodes ----

    def attach(self, hello: fleet_pb2.Hello) -> NodeLink:
        """Admit the node of a `hello` to the fleet, and return the queue of commands to it.

        A node of the same name that is still attached is lost first, its requests continue elsewhere. Raises
        RequestError when the node does not fit the fleet (another model, for one), or its name is in use by a process
        that lives.
        """
        namesake = self._registry.find(hello.node.name)
        try:
            node = self._registry.admit(hello, time.monotonic())
        except RequestError as refusal:
            if namesake is not None and refusal.reason == NAME_TAKEN:
                self._warn_of_namesake(self._links[namesake])
            raise
        link = self._links[node] = NodeLink(node)
        logger.info("%s %s attached, session %d", node.kind, node.name, node.session)
        for sentence in self._kinds.meet(node, self._registry.nodes):
            logger.warning(sentence)
        self.nodes_changed.set()
        if namesake is not None:
            self._apply(self._lose(namesake, LossCause.CONNECTION, "its process has attached again"))
        self._scheduler.attached_again(hello.session)
        return link

    def message_lost(self, link: NodeLink, error: MessageLost) -> None:
        """Treat the node of a stream as lost, since a message is missing, and let its requests continue elsewhere.

        The caller must still call `detach`.
        """
        self._apply(self._lose(link.node, LossCause.MESSAGE, str(error)))

    def detach(self, link: NodeLink) -> None:
        """Treat the node of a stream that has ended as lost, and let its requests continue elsewhere.

        Has no effect on a node that is lost already.
        """
        node = link.node
        self._apply(self._lose(node, LossCause.CONNECTION, "the stream has ended", has_died=not node.is_stopping))

    def receive(self, link: NodeLink, event: fleet_pb2.NodeEvent) -> None:
        """Update the state of the node and of its requests by an event, and send the commands that follow from it.

        Events of a lost node are ignored.
        """
        node, now = link.node, time.monotonic()
        if node not in self._links:
            return
        if event.HasField("heartbeat"):
            self._heartbeat(node, event.heartbeat, now)
            self._apply([Send(node, fleet_pb2.NodeCommand(heartbeat_ack=fleet_pb2.HeartbeatAck()))])
            return
        if event.HasField("num_blocks_free"):
            node.load.num_blocks_free = event.num_blocks_free
        if event.HasField("cache_changed"):
            self._cache_changed(node, event.cache_changed)
            return
        if event.HasField("adapter_changed"):
            self._apply(self._adapters.changed(node, event.adapter_changed, now))
            self._note_adapters()
            return
        if event.HasField("failed"):
            if not event.failed.attempt.request_id:
                self._shape_refused(node, event.failed)
                return
            self._request_log.attempt_failed(node, event.failed)
        self._apply(self._scheduler.handle(node, event, now))

    def drain_node(self, name: str) -> Node:
        """Give the node no new requests, migrate those that it has to nodes with room for them, and return the node.

        Has no effect on a node that is draining. Raises RequestError when no node has this name, or no other node could
        serve the requests.
        """
        node = self._registry.named(name)
        if not node.is_drained:
            check_target(node, self._registry.nodes, embeds=self._registry.embeds)
            self._registry.drain(node)
            logger.info("%s %s is draining", node.kind, node.name)
            self.nodes_changed.set()
            self._apply(self._scheduler.tick(time.monotonic()))
        return node

    def num_left(self, node: Node) -> int:
        """Return the number of requests that a draining node still computes or holds blocks for.

        Raises RequestError with reason DRAIN_ENDED when the node has been given a role, or was lost without stopping.
        """
        if not node.is_drained:
            raise RequestError(DRAIN_ENDED, f"node {node.name} drains no more: it was given a role")
        if self._registry.find(node.name) is node:
            return self._scheduler.num_left(node)
        if node.is_stopping:
            return 0
        raise RequestError(
            DRAIN_ENDED, f"node {node.name} drains no more: it was lost, and takes work if it comes back"
        )

    def set_shape(self, name: str, to: str | Shape) -> tuple[Node, Shape]:
        """Send a node a request for a role or a shape, which ends its drain; return the node and the requested shape.

        The node confirms later (`settled`). Raises RequestError for an unknown node and a change that is not allowed,
        in which case nothing has changed.
        """
        was_drained = self._registry.named(name).is_drained
        node, shape, instructions = self._roles.set_shape(name, to, time.monotonic())
        if was_drained:
            logger.info("%s %s drains no more", node.kind, node.name)
            self.nodes_changed.set()
        self._reshape(instructions)
        return node, shape

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter on every node, and return when requests may name it. Raise RequestError."""
        self._apply(self._adapters.load(name, folder, time.monotonic()))
        while self._adapters.is_loading(name):
            self._adapters_changed.clear()
            await self._adapters_changed.wait()
        if (error := self._adapters.outcome(name)) is not None:
            raise error

    def unload_adapter(self, name: str) -> int:
        """Keep requests from naming a LoRA adapter, and return the number of those that still run with it. Nodes unload
        it when they have ended. Raise RequestError."""
        self._apply(self._adapters.unload(name, time.monotonic()))
        self._note_adapters()
        num_live = self._scheduler.num_using(name)
        logger.info("adapter %s is unloaded, and %d requests still run with it", name, num_live)
        return num_live

    def _note_adapters(self) -> None:
        self._adapters_changed.set()
        self.nodes_changed.set()

    async def settled(self, node: Node) -> None:
        """Wait until the node has confirmed or refused the requested shape, is lost, or is late (CONFIRM_S).

        Compare `node.shape` with the requested shape afterwards to learn whether the node has confirmed it.
        """
        while node.requested_shape is not None and node in self._registry:
            self._shapes_changed.clear()
            await self._shapes_changed.wait()

    def _reshape(self, instructions: Iterable[Send]) -> None:
        for send in instructions:
            node = send.node
            logger.info("%s %s is asked to take the shape %s", node.kind, node.name, node.requested_shape)
            self.nodes_changed.set()
            self._apply([send])

    def _heartbeat(self, node: Node, heartbeat: fleet_pb2.Heartbeat, now: float) -> None:
        before = node.is_ready, node.shape
        self._registry.heartbeat(node, heartbeat, now)
        if node.shape != before[1]:
            logger.info("%s %s has taken the shape %s", node.kind, node.name, node.shape)
        if (node.is_ready, node.shape) != before:
            self.nodes_changed.set()
        self._shapes_changed.set()

    def _shape_refused(self, node: Node, failed: fleet_pb2.Failed) -> None:
        """Note that the node refuses the requested shape: a Failed without a request id is about the shape."""
        logger.warning("%s %s refuses a shape: %s", node.kind, node.name, failed.message[:MAX_MESSAGE_CHARS])
        self._registry.request_shape(node, None)
        self._shapes_changed.set()

    def _cache_changed(self, node: Node, event: fleet_pb2.CacheChanged) -> None:
        if num_left_out := self._registry.cache_changed(node, event):
            num_blocks = node.hello.num_blocks
            message = "%s %s says that it holds %d blocks and has %d: %d are left out"
            logger.warning(message, node.kind, node.name, num_blocks + num_left_out, num_blocks, num_left_out)

    def _warn_of_namesake(self, link: NodeLink) -> None:
        """Log once per session that another process claims the node's name."""
        if not link.has_namesake:
            link.has_namesake = True
            message = "another process wants to be node %s too, and waits for the end of session %d"
            logger.warning(message, link.node.name, link.node.session)

    def _lose(self, node: Node, cause: LossCause, why: str, *, has_died: bool = False) -> list[Instruction]:
        """Lose a node, if it is not lost already. `has_died`: in the middle of its work."""
        if node not in self._links:
            return []
        if node.is_stopping:
            logger.info("%s %s has left: %s", node.kind, node.name, why)
        else:
            node.health.lost(time.monotonic())
            self._request_log.node_lost(node, cause, why)
        return self._give_up(node, RequestError(WORKER_LOST, why), has_died=has_died)

    def _give_up(self, node: Node, error: RequestError, *, has_died: bool = False) -> list[Instruction]:
        """End a node's stream with an error; its requests continue elsewhere."""
        self._links.pop(node).end(error)
        self._registry.lose(node)
        self.nodes_changed.set()
        return self._scheduler.lose(node, time.monotonic(), has_died=has_died)

    def capacity(self) -> Capacity:
        """Return the lengths and the KV cache sizes that requests may ask for at this time."""
        return self._capacity.at(time.monotonic())

    # ---- clients ----

    @property
    def num_live(self) -> int:
        """Return the number of sequences that have not ended."""
        return len(self._answers)

    def submit(
        self,
        plan: RequestPlan,
        beginnings: Sequence[tuple[SoFar, AnswerText]],
        slo: Slo | None,
        *,
        arrived_s: float,
        deadline_s: float,
        record: CallRecord | None = None,
    ) -> Generation:
        """Start or resume the sequences of one call, and return the Generation that streams them. `close` must follow.

        `beginnings` has, for each sequence, the output that the client already has and the state of its text.
        `arrived_s` and `deadline_s` are times of the monotonic clock; a call that is not over at its deadline fails.
        `record` collects the course of the call for logs and traces. An open call of the same client with the same
        request id ends first. Raises RequestError, in which case nothing has begun.
        """
        num_ended = sum(so_far.has_ended for so_far, _ in beginnings)
        generation = Generation(
            plan.request_id, len(plan.samplings), num_ended=num_ended, stream_interval=self._stream_interval
        )
        answers = [Answer(generation, index, text) for index, (_, text) in enumerate(beginnings)]
        so_fars = [so_far for so_far, _ in beginnings]
        self.begin(plan, so_fars, generation, answers, slo, arrived_s=arrived_s, deadline_s=deadline_s, record=record)
        return generation

    def begin(
        self,
        plan: RequestPlan,
        so_fars: Sequence[SoFar],
        call: Generation,
        answers: Sequence[Recipient],
        slo: Slo | None,
        *,
        arrived_s: float,
        deadline_s: float,
        record: CallRecord | None = None,
        goes_on: bool = False,
    ) -> None:
        """Start or resume the sequences of one call, as `submit` does, for a given Generation and given recipients.

        `answers` receive the tokens and the end of each sequence of `call`. `goes_on`: the caller resumes the call at
        the next coordinator. Raises RequestError, in which case nothing has begun.
        """
        if self.is_draining and not (goes_on and self._hands_over):
            raise RequestError(DRAINING, "the server is draining")
        now, record = time.monotonic(), record or CallRecord(plan.request_id)
        self._end_earlier(plan, record.asker)
        num_sequences = sum(not each.has_ended for each in so_fars) + plan.num_behind
        self._scheduler.check_room(num_sequences, now, record.asker)
        self._calls[plan.request_id] = _OpenCall(call, record.asker, plan.call_number, goes_on)
        self._request_log.begun(record)
        if plan.pooling is None:
            self._request_log.sized(len(plan.samplings), plan.samplings[0].max_tokens)
        if not goes_on:
            self._num_staying += 1
            self._idle.clear()
        # One Prompt for all sequences, so that it is hashed once.
        prompt = Prompt(plan.prompt, plan.cache_salt, plan.adapter, is_read_whole=plan.is_read_whole)
        prompts = list(map(prompt.followed_by, plan.endings)) or [prompt] * len(plan.samplings)
        try:
            for index, (sampling, so_far, answer) in enumerate(zip(plan.samplings, so_fars, answers, strict=True)):
                if so_far.has_ended:
                    continue
                sequence_id = call.sequence_ids[index]
                instructions = self._scheduler.submit(
                    sequence_id,
                    prompts[index],
                    sampling,
                    arrived_s=arrived_s,
                    deadline_s=deadline_s,
                    now=now,
                    slo=slo,
                    so_far=so_far,
                    pooling=plan.pooling,
                    asker=record.asker,
                )
                self._answers[sequence_id] = answer
                self._apply(instructions)
        except Exception:
            self.close(call)
            raise

    def _end_earlier(self, plan: RequestPlan, asker: str) -> None:
        """End an earlier open call of the same client. Raises RequestError for any other open call of this id."""
        if (known := self._calls.get(plan.request_id)) is None:
            return
        if known.asker != asker or known.number >= plan.call_number:
            raise RequestError(DUPLICATE_REQUEST_ID, f"request {plan.request_id} is live already")
        known.call.fail(RequestError(ABORTED, f"request {plan.request_id} goes on in a later call"))
        self.close(known.call)

    def stopped(self, call: Generation, index: int) -> None:
        """End one sequence of a call with finish reason STOP, since its API server has found a stop string.

        Ignored when the call is no longer open.
        """
        if self._is_open(call):
            stop = inference_pb2.FINISH_REASON_STOP
            self._apply(self._scheduler.finish(call.sequence_ids[index], stop, time.monotonic()))

    def give_up(self, call: Generation, error: RequestError) -> None:
        """End a call with an error that its API server reports. Ignored when the call is no longer open."""
        if self._is_open(call):
            self._apply(self._fail(call, error))

    def abort(self, request_id: str) -> bool:
        """End all sequences of an open call with finish reason ABORT. Returns False if no open call has this id."""
        if (known := self._calls.get(request_id)) is None:
            return False
        now = time.monotonic()
        for sequence_id in known.call.sequence_ids:
            self._apply(self._scheduler.finish(sequence_id, inference_pb2.FINISH_REASON_ABORT, now))
        return True

    def close(self, call: Generation) -> None:
        """End a call for any reason: abort the sequences that still run, and forget the call.

        A call that a later one has replaced is ignored.
        """
        if not self._is_open(call):
            return
        if not self._calls.pop(call.request_id).goes_on:
            self._num_staying -= 1
        if not self._num_staying:
            self._idle.set()
        now = time.monotonic()
        for sequence_id in self._forget(call):
            self._apply(self._scheduler.finish(sequence_id, inference_pb2.FINISH_REASON_ABORT, now))
        self._request_log.over(call.request_id)

    def _is_open(self, call: Generation) -> bool:
        known = self._calls.get(call.request_id)
        return known is not None and known.call is call

    # ---- all ----

    def tick(self) -> None:
        """Do all that is due by time: lose silent nodes, expire requests, change roles, start requests that waited.

        Call it several times per node timeout.
        """
        now = time.monotonic()
        self._capacity.note(now)
        for node, cause, why in self._registry.expired(now):
            self._apply(self._lose(node, cause, why))
        self._apply(self._scheduler.tick(now))
        self._apply(self._adapters.tick(now))
        self._adapters_changed.set()  # a load may have expired
        self._reshape(self._roles.tick(now))
        self._shapes_changed.set()  # a requested shape may have expired

    def drain(self, *, hands_over: bool = False) -> None:
        """Refuse calls that come later; those that are open continue.

        `hands_over`: calls that go on at the next coordinator are still accepted.
        """
        self.is_draining, self._hands_over = True, hands_over
        self.nodes_changed.set()

    async def idle(self) -> None:
        """Wait until no call is open but those that go on at the next coordinator."""
        await self._idle.wait()

    def stop(self) -> None:
        """End every call and every node's stream with the error DRAINING, which is status UNAVAILABLE."""
        error = RequestError(DRAINING, "the server has stopped")
        for known in self._calls.values():
            self._apply(self._fail(known.call, error))
        for node in list(self._links):
            logger.info("%s %s has left: %s", node.kind, node.name, error)
            self._apply(self._give_up(node, error))

    def _apply(self, instructions: Iterable[Instruction]) -> None:
        work = deque(instructions)
        while work:
            match work.popleft():
                case Emit(sequence_id, chunk):
                    work.extend(self._emit(sequence_id, chunk))
                case Send(node, command):
                    link = self._links.get(node)
                    if link is not None and not link.send(command):
                        unsent = f"{MAX_UNSENT_COMMANDS} commands are unsent"
                        work.extend(self._lose(node, LossCause.COMMANDS, unsent))
                case End() as end:
                    work.extend(self._end(end))
                case MigrationEnded() as migration:
                    self._request_log.migrated(migration)

    def _emit(self, sequence_id: str, chunk: Chunk) -> Sequence[Instruction]:
        answer = self._answers.get(sequence_id)
        if answer is None:
            return ()
        try:
            has_stopped = answer.add(chunk)
        except RequestError as slow_client:
            return self._fail(answer.generation, slow_client)
        if not has_stopped:
            return ()
        return self._scheduler.finish(sequence_id, inference_pb2.FINISH_REASON_STOP, time.monotonic())

    def _end(self, end: End) -> list[Instruction]:
        answer, outcome = self._answers.pop(end.request_id, None), end.outcome
        instructions: list[Instruction] = []
        if answer is not None:
            if not isinstance(outcome, RequestError):
                answer.end(outcome)  # a stop string changes the finish reason
                self._calls[answer.generation.request_id].has_answer = True
            elif self._goes_on(answer.generation, outcome):
                logger.warning("sequence %s is cut short, others of its call go on: %s", end.request_id, outcome)
                answer.end(cut_short(outcome, end.timeline, end.ended_s))
            else:
                instructions = self._fail(answer.generation, outcome)
        self._request_log.ended(end)
        return instructions

    def _goes_on(self, call: Generation, error: RequestError) -> bool:
        """Return whether the other sequences of a call continue after one has failed.

        They do where the request itself was at fault behind some tokens, as with a grammar that has no continuation.
        """
        if error.reason != BAD_PARAM or error.metadata.get("tokens_emitted", "0") == "0":
            return False
        return self._calls[call.request_id].has_answer or any(each in self._answers for each in call.sequence_ids)

    def _fail(self, generation: Generation, error: RequestError) -> list[Instruction]:
        """End a call, and so all its sequences, with an error."""
        generation.fail(error)
        now = time.monotonic()
        instructions: list[Instruction] = []
        for sequence_id in self._forget(generation):
            instructions += self._scheduler.fail(sequence_id, error, now)
        return instructions

    def _forget(self, generation: Generation) -> list[str]:
        """Drop the receivers of a call, and return the ids of its sequences that had not ended."""
        return [
            sequence_id for sequence_id in generation.sequence_ids if self._answers.pop(sequence_id, None) is not None
        ]
