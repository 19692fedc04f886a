"""What stock tools ask before they call: which services there are, and their messages."""

from collections.abc import Collection
from typing import Final

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1: Final = "grpc.reflection.v1.ServerReflection"


def add_reflection(services: Collection[str], server: grpc.aio.Server) -> None:
    """Answers for these services by their full names, in both versions of gRPC's protocol: they differ in its name."""
    servicer = reflection.aio.ReflectionServicer((*services, reflection.SERVICE_NAME))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for version in (reflection.SERVICE_NAME, V1):
        handler = grpc.method_handlers_generic_handler(version, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))
