"""Serve nodes: each node connects and holds one stream, events to the coordinator and commands to the node."""

import asyncio
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from coordinator.api.statuses import failures_as_statuses
from coordinator.dispatcher import Dispatcher, NodeLink
from protos import fleet_pb2
from serving_core.errors import RequestError
from serving_core.net.numbering import MessageLost, Numbering
from serving_core.process import failpoints
from serving_core.reasons import DEADLINE_EXCEEDED, MALFORMED_REQUEST, WORKER_LOST
from serving_core.tasks import first_to_end

HELLO_DEADLINE_S: Final = 10.0


class FleetService:
    """Serve Fleet.Attach. The end of the stream, by either side, is the loss of the node."""

    def __init__(self, dispatcher: Dispatcher, *, heartbeat_s: float, node_timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._heartbeat_s, self._node_timeout_s = heartbeat_s, node_timeout_s

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handler of the service Fleet, to register with a server.

        Events stay bytes until they are read, so that bytes that are no message get the status of a RequestError.
        """
        attach: Any = grpc.stream_stream_rpc_method_handler(
            self._attach, response_serializer=fleet_pb2.NodeCommand.SerializeToString
        )
        service = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name
        return grpc.method_handlers_generic_handler(service, {"Attach": attach})

    async def _attach(self, _: Any, context: Any) -> None:
        stream = NumberedStream(context, fleet_pb2.NodeEvent)
        async with failures_as_statuses(context):
            hello = await read_hello(stream)
            try:
                link = self._dispatcher.attach(hello)
            except RequestError as error:
                refusal = fleet_pb2.Refusal(reason=error.reason, message=str(error))
                await stream.write(fleet_pb2.NodeCommand(refusal=refusal))
                return
            try:
                welcome = fleet_pb2.Welcome(
                    heartbeat_s=self._heartbeat_s, session=link.node.session, timeout_s=self._node_timeout_s
                )
                await stream.write(fleet_pb2.NodeCommand(welcome=welcome))
                await first_to_end(self._read_events(link, stream), self._write_commands(link, stream))
            except MessageLost as error:
                self._dispatcher.message_lost(link, error)
                raise RequestError(WORKER_LOST, str(error)) from error
            finally:
                self._dispatcher.detach(link)

    async def _read_events(self, link: NodeLink, stream: "NumberedStream") -> None:
        while (event := await stream.read()) is not None:
            if event.HasField("hello"):
                raise RequestError(MALFORMED_REQUEST, "hello came twice")
            if failpoints.is_armed:
                failpoints.reach("on", event)
            self._dispatcher.receive(link, event)

    async def _write_commands(self, link: NodeLink, stream: "NumberedStream") -> None:
        while True:
            command = await link.next()
            failpoints.reach("before", command)
            await stream.write(command)
            failpoints.reach("after", command)


class NumberedStream:
    """Number the messages of a stream in both directions, and check them."""

    def __init__(self, context: Any, event_type: Any) -> None:
        self._context = context
        self._event_type = event_type
        self._numbering = Numbering()

    async def read(self) -> Any:
        """Wait for the next event and return it, or return None at the end of the stream.

        Raises MessageLost when its number does not follow the last one, and RequestError when it is no valid event.
        """
        message = await self._context.read()
        if message is grpc.aio.EOF:
            return None
        try:
            event = self._event_type.FromString(message)
        except DecodeError as error:
            raise RequestError(MALFORMED_REQUEST, f"an event is not a {self._event_type.__name__} message") from error
        if event.WhichOneof("event") is None:
            raise RequestError(MALFORMED_REQUEST, "an event is empty or of an unknown kind")
        self._numbering.check(event)
        return event

    async def write(self, message: Any) -> None:
        self._numbering.stamp(message)
        await self._context.write(message)


async def read_hello(stream: NumberedStream) -> Any:
    """Wait for the first event of a stream, and return the hello in it.

    Raises RequestError when no event comes within HELLO_DEADLINE_S or the first event is no valid hello.
    """
    try:
        async with asyncio.timeout(HELLO_DEADLINE_S):
            event = await stream.read()
    except TimeoutError as error:
        raise RequestError(DEADLINE_EXCEEDED, f"no hello within {HELLO_DEADLINE_S:g} s") from error
    except MessageLost as error:
        raise RequestError(MALFORMED_REQUEST, str(error)) from error
    if event is None or not event.HasField("hello"):
        raise RequestError(MALFORMED_REQUEST, "the first event must be hello")
    return event.hello
