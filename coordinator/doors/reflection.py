"""What stock tools ask before they call: which services there are, and their messages."""

from collections.abc import AsyncIterable, AsyncIterator, Collection
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

from coordinator.doors.exchange import write
from coordinator.doors.statuses import failures_as_statuses, parse

V1: Final = "grpc.reflection.v1.ServerReflection"
VERSIONS: Final = (V1, reflection.SERVICE_NAME)


def add_reflection(services: Collection[str], server: grpc.aio.Server) -> None:
    """Answer for these services by their full names, and for reflection itself, in both versions of gRPC's protocol:
    they differ in its name."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*services, *VERSIONS))

    async def info(messages: AsyncIterable[bytes], context: Any) -> None:
        async with failures_as_statuses(context):
            async for response in servicer.ServerReflectionInfo(_parsed(messages), context):
                await write(context, response)

    method: Any = grpc.stream_stream_rpc_method_handler(
        info, response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString
    )
    for version in VERSIONS:
        handler = grpc.method_handlers_generic_handler(version, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))


def _describe_v1() -> None:
    """Make the newer version known, of which grpcio-reflection has no description."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        older = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(older)
        newer = text_format.MessageToString(older).replace("v1alpha", "v1")
        pool.Add(text_format.Parse(newer, descriptor_pb2.FileDescriptorProto()))


async def _parsed(messages: AsyncIterable[bytes]) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    """The requests. Raises RequestError for what is none, of which gRPC would tell the exception's text."""
    async for message in messages:
        yield parse(reflection_pb2.ServerReflectionRequest.FromString, message)
