"""The node's end of Fleet.Attach: dial the coordinator, say hello, then events up and commands down.

The link re-attaches by itself when the stream breaks, and asks again while another process has the node's name. A
broken stream means that the coordinator has given up every attempt on this node, so the node is told (`detached`) and
gives up what it holds before the next hello.
"""

import asyncio
import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc

from engine.errors import SettingsError
from engine.flags import flag
from protos import fleet_pb2, fleet_pb2_grpc
from protos.channels import CHANNEL_OPTIONS
from protos.outage import Reminder, why_not_attached
from protos.reasons import NAME_TAKEN
from protos.waiting import first_to_end

logger = logging.getLogger(__name__)

WELCOME_DEADLINE_S: Final = 10.0
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 2.0
MAX_UNSENT_EVENTS: Final = 10_000

Unsent = asyncio.Queue["fleet_pb2.NodeEvent | None"]  # None: nothing more will come


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How a node finds its coordinator."""

    coordinator: str = flag("127.0.0.1:50052", "Fleet address of the coordinator, HOST:PORT.")
    name: str = flag("", "Name of this node, unique in the fleet; empty makes one from role, host and process.")
    fleet_secret: str = flag("", "Secret shared by the fleet.", secret=True)
    drain_s: float = flag(30.0, "Seconds a stopping node waits for its requests to finish.", minimum=0.0)
    log_level: str = flag("info", "Least severe log line to write.", choices=("debug", "info", "warning", "error"))

    def name_for(self, role: str) -> str:
        """The node's name: as given, or made up."""
        return self.name or f"{role}-{socket.gethostname()}-{os.getpid()}"


class Node(Protocol):
    """What the link asks of a node. Called on the event loop; none of these blocks."""

    def hello(self) -> fleet_pb2.Hello: ...
    def heartbeat(self) -> fleet_pb2.Heartbeat: ...
    def handle(self, command: fleet_pb2.NodeCommand) -> None: ...
    def detached(self) -> None: ...


class FleetLink:
    """One node's stream to the coordinator."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._unsent: Unsent = asyncio.Queue(MAX_UNSENT_EVENTS)
        self._attached = False
        self._stopping = asyncio.Event()
        self._retry_s = RETRY_MIN_S
        self._reminder = Reminder()
        self._session = 0  # of the last attachment; shows the coordinator that this is the same process

    def send(self, **event: Any) -> None:
        """Queues one event, named by its oneof field. Without an attachment it is dropped: the coordinator has
        given up all attempts of this node already."""
        if not self._attached:
            return
        try:
            self._unsent.put_nowait(fleet_pb2.NodeEvent(**event))
        except asyncio.QueueFull:
            logger.error("%d events unsent: the stream to the coordinator is given up", MAX_UNSENT_EVENTS)
            self._attached = False

    def stop(self) -> None:
        """Lets `run` return after what is queued has gone out."""
        self._stopping.set()
        if self._attached and not self._unsent.full():
            self._unsent.put_nowait(None)

    async def run(self, node: Node) -> None:
        """Stays attached until `stop`. Raises SettingsError when the coordinator refuses this node."""
        while not self._stopping.is_set():
            try:
                async with grpc.aio.insecure_channel(self._settings.coordinator, options=CHANNEL_OPTIONS) as channel:
                    await self._attach(fleet_pb2_grpc.FleetStub(channel), node)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, ConnectionError, TimeoutError) as error:
                self._check_secret(error)
                why = why_not_attached(error, self._settings.coordinator)
                if self._reminder.is_due(why, time.monotonic()):
                    logger.warning("not attached: %s", why)
                self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
            self._attached = False
            self._unsent = asyncio.Queue(MAX_UNSENT_EVENTS)
            node.detached()
            await _wait(self._stopping, self._retry_s)

    async def _attach(self, stub: fleet_pb2_grpc.FleetStub, node: Node) -> None:
        metadata = (("authorization", f"Bearer {self._settings.fleet_secret}"),)
        hello = node.hello()
        hello.session = self._session
        call = stub.Attach(metadata=metadata)
        try:
            async with asyncio.timeout(WELCOME_DEADLINE_S):
                await call.write(fleet_pb2.NodeEvent(hello=hello))
                answer = await call.read()
            welcome = _welcome(answer)
            self._session = welcome.session
            self._attached = True
            self._retry_s = RETRY_MIN_S
            self._reminder.forget()
            if self._stopping.is_set():
                self._unsent.put_nowait(None)
            logger.info("attached to the coordinator, session %d", self._session)
            await first_to_end(self._beat(node, welcome.heartbeat_s), self._write(call), self._read(call, node))
        finally:
            call.cancel()

    def _check_secret(self, error: Exception) -> None:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
            given = "is another one here" if self._settings.fleet_secret else "is not set here"
            raise SettingsError(f"SPLITSERVE_FLEET_SECRET {given}: it must be the coordinator's") from error

    async def _beat(self, node: Node, heartbeat_s: float) -> None:
        while self._attached:
            self.send(heartbeat=node.heartbeat())
            await asyncio.sleep(heartbeat_s)

    async def _write(self, call: Any) -> None:
        while (event := await self._unsent.get()) is not None:
            await call.write(event)
        await call.done_writing()
        await call.code()  # to leave at once would throw away what the coordinator has not read yet

    async def _read(self, call: Any, node: Node) -> None:
        while (command := await call.read()) is not grpc.aio.EOF:
            node.handle(command)


def _welcome(answer: Any) -> fleet_pb2.Welcome:
    """Raises SettingsError where trying again cannot help, otherwise ConnectionError."""
    if answer is grpc.aio.EOF:
        raise ConnectionError("the coordinator ended the stream")
    kind = answer.WhichOneof("command")
    if kind == "refusal" and answer.refusal.reason == NAME_TAKEN:
        raise ConnectionError(f"{answer.refusal.message}: give this one another --name, or it waits for that one to go")
    if kind == "refusal":
        raise SettingsError(f"the coordinator refuses this node: {answer.refusal.message}")
    if kind != "welcome":
        raise SettingsError(f"the coordinator answered hello with {kind}, not with welcome: is it another version?")
    welcome: fleet_pb2.Welcome = answer.welcome
    return welcome


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
