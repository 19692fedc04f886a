"""Open a port for a gRPC server: directly where no call needs a key, else behind a guard.

Behind a guard the server listens at an abstract socket, which does not depend on the folder for temporary files.
Abstract sockets and therefore guards exist on Linux only.
"""

import secrets
import ssl
import sys
from collections.abc import AsyncIterable, AsyncIterator, Collection
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

from coordinator.api.authentication import BearerSecrets
from coordinator.api.connections import Sheds
from coordinator.api.exchange import write
from coordinator.api.guard import Guard
from coordinator.api.statuses import failures_as_statuses, parse
from coordinator.api.tls import ServerTls
from serving_core.net.channels import listen

CLOSE_GRACE_S: Final = 1.0


class GrpcPort:
    """One port of a gRPC server. Call `listen`, then `start`; call `stop` in any case."""

    def __init__(
        self,
        name: str,
        server: grpc.aio.Server,
        keys: BearerSecrets | None,
        sheds: Sheds,
        *,
        max_connections: int,
        max_per_peer: int,
    ) -> None:
        """Create the port of a gRPC server. With `keys`, a guard limits connections that have brought no key.

        The guard allows `max_connections` in all and `max_per_peer` for one address, and counts those it closes in
        `sheds`. The server still has to check the keys of each call. `name` is the port's in logs and metrics.
        """
        self._name = name
        self._server = server
        self._keys = keys
        self._sheds = sheds
        self._max_connections = max_connections
        self._max_per_peer = max_per_peer
        self._guard: Guard | None = None

    def listen(
        self, host: str, port: int, tls: ServerTls | None, *, verifies: bool = False, shares_port: bool = False
    ) -> int:
        """Listen and return the port number; port 0 chooses a free one. With `tls` None the port is plain text.

        With `verifies`, TLS asks every client for a certificate. `shares_port`: several processes listen at the same
        port (SO_REUSEPORT), which only a guard supports. Raises SettingsError when the address cannot be used.
        """
        if self._keys is None or sys.platform != "linux":
            return listen(self._server, host, port, tls.grpc_credentials(verifies=verifies) if tls else None)
        name = f"splitserve-{secrets.token_hex(16)}"
        self._guard = self._made_guard(f"\0{name}", self._keys, tls.http2_context(verifies=verifies) if tls else None)
        number = self._guard.listen(host, port, shares_port=shares_port)
        self._server.add_insecure_port(f"unix-abstract:{name}")
        return number

    async def start(self) -> None:
        """Start the gRPC server and its guard, if there is one."""
        await self._server.start()
        if self._guard is not None:
            self._guard.start()

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, and end the calls that still run after `grace_s`."""
        if self._guard is not None:
            self._guard.close()
        await self._server.stop(grace_s)
        if self._guard is not None:
            await self._guard.wait_closed(CLOSE_GRACE_S)

    def _made_guard(self, path: str, keys: BearerSecrets, context: ssl.SSLContext | None) -> Guard:
        return Guard(
            self._name,
            path,
            keys,
            self._sheds,
            max_connections=self._max_connections,
            max_per_peer=self._max_per_peer,
            tls=context,
        )


# ---- gRPC reflection: services and their messages, which stock tools ask for before they call ----

V1: Final = "grpc.reflection.v1.ServerReflection"
VERSIONS: Final = (V1, reflection.SERVICE_NAME)


def add_reflection(services: Collection[str], server: grpc.aio.Server) -> None:
    """Register gRPC reflection for these full service names and for reflection itself.

    Both versions of the protocol are served; they differ only in their name.
    """
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
    """Register the descriptor of protocol v1, which grpcio-reflection does not include."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        older = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(older)
        newer = text_format.MessageToString(older).replace("v1alpha", "v1")
        pool.Add(text_format.Parse(newer, descriptor_pb2.FileDescriptorProto()))


async def _parsed(messages: AsyncIterable[bytes]) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    """Yield the parsed requests. Raises RequestError for malformed bytes; gRPC would send the exception's text."""
    async for message in messages:
        yield parse(reflection_pb2.ServerReflectionRequest.FromString, message)
