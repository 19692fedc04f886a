"""Attach a node to the coordinator (Fleet.Attach): dial, send hello, then events up and commands down.

The link attaches again when the stream breaks or a command was lost, and retries while another process has the node's
name. Without the stream the coordinator gives up every attempt on this node, so the link calls `detached`, which ends
its requests before the next hello. A node with a stuck step detaches, so that its requests continue elsewhere, and
attaches again once the step has ended. If the step never ends, the process exits.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc

from protos import fleet_pb2, fleet_pb2_grpc
from serving_core.errors import SettingsError
from serving_core.flags import flag
from serving_core.net.backoff import Reminder
from serving_core.net.channels import FLEET_CHANNEL_OPTIONS, channel_credentials, why_no_handshake
from serving_core.net.descriptors import Spares
from serving_core.net.failure_detector import AwakeClock, FailureDetector
from serving_core.net.numbering import MessageLost, Numbering
from serving_core.net.tls import TlsError, TlsSettings
from serving_core.process import failpoints
from serving_core.process.telemetry import LogSettings, about
from serving_core.reasons import NAME_TAKEN
from serving_core.tasks import first_to_end
from serving_node.watchdog import Starvation

logger = logging.getLogger(__name__)

WELCOME_DEADLINE_S: Final = 10.0
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 2.0
MAX_UNSENT_EVENTS: Final = 10_000
MAX_JOINED_BYTES: Final = 256 * 1024  # of queued steps that are joined in one message
LOOK: Final = 1 / 16  # of the coordinator's timeout, between two checks of its acknowledgements
MAX_CHECKS: Final = 20  # of the secret before the start
TAKEN_S: Final = 0.1  # longest wait for the report that a possible poison request is here
_NOT_ATTACHED: Final = (
    grpc.aio.AioRpcError,
    asyncio.InvalidStateError,
    ConnectionError,
    TimeoutError,
    TlsError,
    MessageLost,
)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The settings of a node's connection to its coordinator."""

    coordinator: str = flag("127.0.0.1:50052", "Connect to the coordinator's fleet port at this address, HOST:PORT.")
    name: str = flag("", "Give the node this name, unique in the fleet; default: made of role, host and process.")
    fleet_secret: str = flag("", "Show this secret to the coordinator.", secret=True)
    tls: TlsSettings = field(default_factory=TlsSettings)
    drain_s: float = flag(30.0, "Wait this many seconds for requests to finish when the node stops.", minimum=0.0)
    log: LogSettings = field(default_factory=LogSettings)

    def name_for(self, role: str) -> str:
        """Return the node's name: the configured one, or one made from role, host and process."""
        return self.name or f"{role}-{socket.gethostname()}-{os.getpid()}"


class Node(Protocol):
    """What the link needs of a node. Methods are called on the event loop and do not block.

    `stuck` returns the reason in words when the running step is stuck. `recovered` returns when the node can take
    requests: no abandoned step runs, and a node that was stuck has stayed detached for a while. It raises StuckForGood
    if the step is not waited for any longer.
    """

    @property
    def num_blocks_free(self) -> int: ...

    def hello(self) -> fleet_pb2.Hello: ...
    def heartbeat(self) -> fleet_pb2.Heartbeat: ...
    def handle(self, command: fleet_pb2.NodeCommand) -> None: ...
    def detached(self) -> None: ...
    async def stuck(self) -> str: ...
    async def recovered(self) -> None: ...


class Unsent:
    """The queue of events for the coordinator, in order.

    A step is merged into a step queued right before it, which costs a lagging coordinator less.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[fleet_pb2.NodeEvent | None] = asyncio.Queue(MAX_UNSENT_EVENTS)
        self._last_step: fleet_pb2.StepTokens | None = None  # the last queued event, if that is a step
        self._last_step_bytes = 0  # size of `_last_step`

    def put(self, **event: Any) -> None:
        """Queue one event, named by its oneof field. Raises asyncio.QueueFull if MAX_UNSENT_EVENTS are queued."""
        if self._join(event.get("step_tokens")):
            return
        queued = fleet_pb2.NodeEvent(**event)
        self._queue.put_nowait(queued)
        self._last_step = queued.step_tokens if queued.HasField("step_tokens") else None

    def end(self) -> None:
        """Queue the end of the events, for which `get` returns None."""
        self._last_step = None
        if not self._queue.full():
            self._queue.put_nowait(None)

    async def get(self) -> fleet_pb2.NodeEvent | None:
        """Wait for the next event and return it; None after the last one. The caller must call `written` afterwards."""
        event = await self._queue.get()
        if self._queue.empty():
            self._last_step = None  # it is being written
        return event

    def written(self) -> None:
        self._queue.task_done()

    async def all_written(self) -> None:
        """Wait until no event is queued or being written."""
        await self._queue.join()

    def _join(self, step: fleet_pb2.StepTokens | None) -> bool:
        if step is None:
            return False
        num_bytes, last = step.ByteSize(), self._last_step
        if last is None or self._last_step_bytes + num_bytes > MAX_JOINED_BYTES:
            self._last_step_bytes = num_bytes  # further steps are merged into this one
            return False
        last.MergeFrom(step)
        self._last_step_bytes += num_bytes
        return True


class FleetLink:
    """Keeps one node attached to the coordinator over a stream: events up, commands down."""

    def __init__(self, settings: LinkSettings, spares: Spares | None = None) -> None:
        """Create a link, which attaches when `run` is called.

        `spares` are file descriptors reserved for dialing when the process has none left.
        """
        self._settings = settings
        self._spares = spares
        self._unsent = Unsent()
        self._attached = False
        self._stopping = asyncio.Event()
        self._retry_s = RETRY_MIN_S
        self._reminder = Reminder()
        self._starvation = Starvation()
        self._session = 0  # of the last attachment; shows the coordinator that this is the same, healthy process

    @property
    def is_attached(self) -> bool:
        """Return whether the node is attached: the coordinator has welcomed it, and the stream stands."""
        return self._attached

    def send(self, **event: Any) -> None:
        """Queue one event for the coordinator, named by its oneof field.

        Without an attachment the event is dropped: the coordinator has already given up all attempts of this node.
        """
        if not self._attached:
            return
        for kind, body in event.items():
            _note("attempt failed" if kind == "failed" else f"event: {kind}", body)
        try:
            self._unsent.put(**event)
        except asyncio.QueueFull:
            logger.error("%d events unsent: the stream to the coordinator is given up", MAX_UNSENT_EVENTS)
            self._attached = False

    def stop(self) -> None:
        """Make `run` return once all queued events are written."""
        self._stopping.set()
        if self._attached:
            self._unsent.end()

    async def run(self, node: Node) -> None:
        """Attach the node, again after each loss of the stream, until `stop`.

        Raises SettingsError if the coordinator refuses this node, and StuckForGood if the engine does not end a step.
        """
        while not self._stopping.is_set():
            if self._spares is not None:
                self._spares.release()
            try:
                async with self._channel() as channel:
                    await self._attach(fleet_pb2_grpc.FleetStub(channel), node)
            except _NOT_ATTACHED as error:
                self._check_secret(error)
                why = why_not_attached(error, self._settings.coordinator, over_tls=bool(self._settings.tls.tls_ca))
                if self._reminder.is_due(why, time.monotonic()):
                    logger.warning("not attached: %s", why)
                self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
            self._attached = False
            self._unsent = Unsent()
            node.detached()
            await _wait(self._stopping, self._retry_s)
            await first_to_end(self._stopping.wait(), node.recovered())

    async def check(self) -> None:
        """Show the coordinator the secret, for nodes whose start takes long. Raises SettingsError if it is another one.

        A coordinator that does not answer is logged, and may come later.
        """
        for _ in range(MAX_CHECKS):
            try:
                async with asyncio.timeout(WELCOME_DEADLINE_S), self._channel() as channel:
                    stream = _Stream(fleet_pb2_grpc.FleetStub(channel).Attach(metadata=self._metadata))
                    await stream.write(fleet_pb2.NodeEvent())
                    await stream.read()
            except _NOT_ATTACHED as error:
                self._check_secret(error)
                if isinstance(error, grpc.aio.AioRpcError):
                    if error.details() == LOST_STATUS:  # it may have been the refusal
                        continue
                    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:  # for the empty event, with the right secret
                        return
                why = why_not_attached(error, self._settings.coordinator, over_tls=bool(self._settings.tls.tls_ca))
                logger.warning("the coordinator does not answer yet: %s", why)
                return

    @property
    def _metadata(self) -> tuple[tuple[str, str]]:
        return (("authorization", f"Bearer {self._settings.fleet_secret}"),)

    async def _attach(self, stub: fleet_pb2_grpc.FleetStub, node: Node) -> None:
        hello = node.hello()
        hello.session, hello.starved_share = self._session, self._starvation.look()
        call = stub.Attach(metadata=self._metadata)
        stream = _Stream(call)
        try:
            async with asyncio.timeout(WELCOME_DEADLINE_S):
                await stream.write(fleet_pb2.NodeEvent(hello=hello))
                reply = await stream.read()
            welcome = _welcome(reply)
            self._session = welcome.session
            self._attached = True
            self._retry_s = RETRY_MIN_S
            self._reminder.forget()
            if self._stopping.is_set():
                self._unsent.end()
            logger.info("attached to the coordinator, session %d", self._session)
            acks = _Acks(welcome.timeout_s)
            await first_to_end(
                self._send_heartbeats(node, welcome.heartbeat_s),
                self._write(stream, node),
                self._read(stream, node, acks),
                self._leave_when_stuck(node),
                acks.miss(),
            )
        finally:
            call.cancel()

    def _channel(self) -> grpc.aio.Channel:
        """Return a channel with the current certificate files. Raises TlsError."""
        address, tls = self._settings.coordinator, self._settings.tls
        if not tls.tls_ca:
            return grpc.aio.insecure_channel(address, options=FLEET_CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, channel_credentials(tls.files), options=FLEET_CHANNEL_OPTIONS)

    def _check_secret(self, error: Exception) -> None:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
            given = "is another one here" if self._settings.fleet_secret else "is not set here"
            raise SettingsError(f"SPLITSERVE_FLEET_SECRET {given}: it must be the coordinator's") from error

    async def _send_heartbeats(self, node: Node, heartbeat_s: float) -> None:
        while self._attached:
            self.send(heartbeat=node.heartbeat())
            self._starvation.look()
            await asyncio.sleep(heartbeat_s)

    async def _write(self, stream: "_Stream", node: Node) -> None:
        while (event := await self._unsent.get()) is not None:
            event.num_blocks_free = node.num_blocks_free
            if failpoints.is_armed:
                failpoints.reach("before", event)
            await stream.write(event)
            self._unsent.written()
            if failpoints.is_armed:
                failpoints.reach("after", event)
        await stream.all_read()

    async def _read(self, stream: "_Stream", node: Node, acks: "_Acks") -> None:
        while (command := await stream.read()) is not grpc.aio.EOF:
            failpoints.reach("on", command)
            if command.HasField("heartbeat_ack"):
                acks.heard()
                continue
            _note(f"command: {command.WhichOneof('command')}", command)
            if (attempt := _suspected(command)) is not None:
                await self._say_taken(attempt)
            node.handle(command)

    async def _leave_when_stuck(self, node: Node) -> None:
        """Raise ConnectionError when the node is stuck.

        The session is reset, so that the coordinator treats the requests of the stuck step as if the process had died
        of them.
        """
        why = await node.stuck()
        self._session = 0
        raise ConnectionError(f"{why}: the node stays away until that step has ended")

    async def _say_taken(self, attempt: fleet_pb2.Attempt) -> None:
        """Report that a possible poison request is here; return when the report is written.

        The report then survives the death of this process.
        """
        self.send(taken=fleet_pb2.Taken(attempt=attempt))
        with contextlib.suppress(TimeoutError):  # a death may then go uncounted, which risks one more node
            await asyncio.wait_for(self._unsent.all_written(), TAKEN_S)


class _Acks:
    """Detect a stalled coordinator by missing acknowledgements of heartbeats."""

    def __init__(self, timeout_s: float) -> None:
        self._look_s = timeout_s * LOOK
        self._clock = AwakeClock(2 * self._look_s)
        self._detector = FailureDetector(timeout_s, time.monotonic())

    def heard(self) -> None:
        self._detector.heard(self._now())

    async def miss(self) -> None:
        """Raise ConnectionError when acknowledgements fail to arrive."""
        while True:
            if (why := self._detector.why_suspected(self._now())) is not None:
                raise ConnectionError(f"the coordinator has acknowledged {why}")
            await asyncio.sleep(self._look_s)

    def _now(self) -> float:
        now = time.monotonic()
        self._clock.note(now)
        return self._clock.read(now)


class _Stream:
    """Number the messages of a node's stream in both directions."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._numbering = Numbering()

    async def write(self, event: fleet_pb2.NodeEvent) -> None:
        self._numbering.stamp(event)
        await self._call.write(event)

    async def read(self) -> Any:
        """Return the next command, or grpc.aio.EOF. Raises MessageLost if a command was lost."""
        command = await self._call.read()
        if command is not grpc.aio.EOF:
            self._numbering.check(command)
        return command

    async def all_read(self) -> None:
        """Write nothing more, and return when the coordinator has read everything."""
        await self._call.done_writing()
        await self._call.code()


def _note(event: str, body: Any) -> None:
    """Log an event or a command of one attempt: failures as warnings, others for debugging."""
    level = logging.WARNING if isinstance(body, fleet_pb2.Failed) else logging.DEBUG
    attempt = getattr(body, "attempt", None)
    if attempt is None or not attempt.request_id or not logger.isEnabledFor(level):
        return
    why = {"reason": body.reason, "message": body.message} if level == logging.WARNING else {}
    logger.log(level, event, extra=about(attempt.request_id, epoch=attempt.epoch, **why))


def _suspected(command: fleet_pb2.NodeCommand) -> fleet_pb2.Attempt | None:
    """Return the attempt if this node is to prefill a possible poison request."""
    is_read_here = command.HasField("prefill") or command.reserve.local_prefill
    job = command.prefill.job if command.HasField("prefill") else command.reserve.job
    return job.attempt if is_read_here and job.is_suspect else None


def _welcome(reply: Any) -> fleet_pb2.Welcome:
    """Return the coordinator's welcome.

    Raises SettingsError if a retry cannot help, otherwise ConnectionError.
    """
    if reply is grpc.aio.EOF:
        raise ConnectionError("the coordinator ended the stream")
    kind = reply.WhichOneof("command")
    if kind == "refusal" and reply.refusal.reason == NAME_TAKEN:
        raise ConnectionError(f"{reply.refusal.message}: give this one another --name, or it waits for that one to go")
    if kind == "refusal":
        raise SettingsError(f"the coordinator refuses this node: {reply.refusal.message}")
    if kind != "welcome":
        raise SettingsError(f"the coordinator answered hello with {kind}, not with welcome: is it another version?")
    welcome: fleet_pb2.Welcome = reply.welcome
    return welcome


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


LOST_STATUS: Final = "Internal error from Core"  # gRPC's text if it writes while the other end closes

SILENCE: Final = "nothing answers there"
# Parts of gRPC's texts for failed connections and their meanings; the first match counts.
_MEANINGS: Final = (
    ("Too many open files", "this process has no descriptor left (ulimit -n)"),
    ("errors resolving", "that is not an address that can be resolved"),
    ("Connection refused", "nothing listens there"),
    ("http1.x server", "an HTTP port answers there, not a gRPC one"),
    ("Failed parsing HTTP/2", "what listens there does not speak gRPC"),
    ("timeout", SILENCE),
)


def why_not_attached(error: Exception, address: str, *, over_tls: bool) -> str:
    """Return in words why a node is not attached to the coordinator at `address`, given the exception.

    `over_tls` says whether the node dials with TLS.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return _not_there(address, "a gRPC port answers that is not the fleet's, such as the public one")
        if details.startswith(("failed to connect", "errors resolving")):
            what = next((what for words, what in _MEANINGS if words in details), None)
            if what is None and (what := why_no_handshake(details, over_tls=over_tls)) and over_tls:
                return f"no TLS with a coordinator at {address}: {what}"
            return _not_there(address, what or details)
        if details == LOST_STATUS:
            return "the coordinator ended the stream"
        return f"no stream to the coordinator: {code.name}: {details}"
    if isinstance(error, TimeoutError):
        return _not_there(address, SILENCE)
    return str(error) or type(error).__name__


def _not_there(address: str, what: str) -> str:
    return f"no coordinator at {address}: {what}; --coordinator must name its fleet port, by default 50052"
