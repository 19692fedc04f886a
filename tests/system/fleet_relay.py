"""A relay between nodes and their coordinator that loses single messages while the connections live."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from protos import fleet_pb2
from serving_core.net.channels import FLEET_CHANNEL_OPTIONS, SERVER_OPTIONS

ATTACH = "/splitserve.v1.Fleet/Attach"
MAX_NODES = 16


class FleetRelay:
    """Passes on what nodes and coordinator say to each other, but for the messages that it is told to lose."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._attach = channel.stream_stream(ATTACH)
        self._lock = threading.Lock()
        self._to_lose: Counter[str] = Counter()

    def lose_next(self, kind: str) -> None:
        """Lose the next message of a kind: the name of its field in NodeEvent or NodeCommand."""
        with self._lock:
            self._to_lose[kind] += 1

    def has_lost_all(self) -> bool:
        """Return whether everything is lost that it was told to lose."""
        return not self._to_lose.total()

    def attach(self, events: Iterable[bytes], context: Any) -> Iterator[bytes]:
        """Serve one node."""
        secret = [pair for pair in context.invocation_metadata() if pair[0] == "authorization"]
        call = self._attach(self._kept(events, fleet_pb2.NodeEvent, "event"), metadata=secret)
        context.add_callback(call.cancel)
        try:
            yield from self._kept(call, fleet_pb2.NodeCommand, "command")
        except grpc.RpcError:
            context.abort(grpc.StatusCode.UNAVAILABLE, call.details())

    def _kept(self, messages: Iterable[bytes], parser: Any, oneof: str) -> Iterator[bytes]:
        for message in messages:
            kind = parser.FromString(message).WhichOneof(oneof)
            with self._lock:
                is_lost = self._to_lose[kind] > 0
                self._to_lose[kind] -= is_lost
            if not is_lost:
                yield message


@contextmanager
def relaying(port: int, fleet_port: int) -> Iterator[FleetRelay]:
    """Relay between nodes that dial `port` and the coordinator at `fleet_port`."""
    with grpc.insecure_channel(f"127.0.0.1:{fleet_port}", options=FLEET_CHANNEL_OPTIONS) as channel:
        relay = FleetRelay(channel)
        server = grpc.server(ThreadPoolExecutor(MAX_NODES), options=SERVER_OPTIONS)
        handler: Any = grpc.stream_stream_rpc_method_handler(relay.attach)
        service, method = ATTACH[1:].split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield relay
        finally:
            server.stop(None).wait()
