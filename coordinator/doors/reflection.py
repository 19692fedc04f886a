"""What stock tools ask before they call: which services there are, and their messages."""

from collections.abc import AsyncIterable, AsyncIterator, Collection
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from coordinator.doors.exchange import write
from coordinator.doors.statuses import failures_as_statuses, parse

V1: Final = "grpc.reflection.v1.ServerReflection"


def add_reflection(services: Collection[str], server: grpc.aio.Server) -> None:
    """Answers for these services by their full names, in both versions of gRPC's protocol: they differ in its name."""
    servicer = reflection.aio.ReflectionServicer((*services, reflection.SERVICE_NAME))

    async def info(messages: AsyncIterable[bytes], context: Any) -> None:
        async with failures_as_statuses(context):
            async for response in servicer.ServerReflectionInfo(_parsed(messages), context):
                await write(context, response)

    method: Any = grpc.stream_stream_rpc_method_handler(
        info, response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString
    )
    for version in (reflection.SERVICE_NAME, V1):
        handler = grpc.method_handlers_generic_handler(version, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))


async def _parsed(messages: AsyncIterable[bytes]) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    """The requests. Raises RequestError for what is none, of which gRPC would tell the exception's text."""
    async for message in messages:
        yield parse(reflection_pb2.ServerReflectionRequest.FromString, message)
